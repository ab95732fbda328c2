"""From actions in [-1, 1] to the units and the form that ManiSkill's robots take."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.errors import UserError


class NativeActions:
    """Maps actions in [-1, 1] to a robot's own ranges, and counts their dimensions.

    Args:
        base: ManiSkill's env; with several robots, their actions follow one another in one vector.

    Raises:
        UserError: the controller's actions have no bounds.
    """

    def __init__(self, base: Any) -> None:
        space = base.single_action_space
        parts = space.spaces.values() if hasattr(space, "spaces") else [space]
        low = np.concatenate([part.low for part in parts])
        high = np.concatenate([part.high for part in parts])
        agents = getattr(base.agent, "agents", [base.agent])
        self.mode = str(agents[0].control_mode)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            known = agents[0].supported_control_modes
            raise UserError(
                f"The control mode {self.mode!r} has no bounds, so actions in [-1, 1] mean nothing "
                f"there. Take one of {', '.join(known)}."
            )
        self.dim = len(low)
        self._unit = bool((low == -1).all() and (high == 1).all())
        self._low = torch.from_numpy(low)
        self._span = torch.from_numpy(high - low)

    def __call__(self, actions: Tensor) -> Tensor:
        """(N, A) in the robot's units for (N, A) in [-1, 1]."""
        if self._unit:
            return actions
        low = self._low.to(actions.device)
        span = self._span.to(actions.device)
        return low + span * (actions + 1) / 2


def split_action(base: Any, action: Tensor) -> Any:
    """(N, A) as ManiSkill wants it: with several robots, one tensor for each."""
    space = base.single_action_space
    if not hasattr(space, "spaces"):
        return action
    widths = [part.shape[0] for part in space.spaces.values()]
    return dict(zip(space.spaces, action.split(widths, dim=1), strict=True))
