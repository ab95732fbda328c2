"""``ModelDoubt``: how far the networks of a world model disagree about what the next chunk will do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodyrl.detectors.signals import Signal
from embodyrl.errors import UserError
from embodyrl.storage.env_spec import check_compatible
from embodyrl.types import Obs
from embodyrl.world_models.model import WorldModel


class ModelDoubt(Signal):
    """The largest spread so far of a state model's networks, as a dream's own doubt.

    Args:
        dream: folder of the world model.
        device: of the model.

    Raises:
        UserError: no world model there, one without several networks for the state, or one that
            needs a simulator.
    """

    kind = "doubt"

    def __init__(self, dream: str, device: Any = "cpu") -> None:
        if not dream:
            raise UserError(
                "A detector of the kind doubt asks a world model. Give it: --dream MODEL."
            )
        self.dream = str(Path(dream).absolute())
        self.model = WorldModel.load(dream, device)
        if self.model.state is None or len(self.model.state.members) < 2:
            raise UserError(
                f"The world model in {dream} has fewer than two networks for the state, so none can "
                "disagree. Train one with a state: `embodyrl world train` without state=false."
            )
        if self.model.finder is None:
            raise UserError(
                f"The world model in {dream} reads the simulator's state, which a robot does not "
                "have. Train one that finds it in pictures: `embodyrl world train ... found=true`."
            )

    def check(self, policy: Any) -> None:
        """See ``Signal``."""
        check_compatible(self.model.spec, policy.spec)

    @torch.no_grad()
    def read(self, policy: Any, obs: Obs, chunk: Tensor, generator: torch.Generator) -> Tensor:
        """The spread (B,) after the executed actions."""
        # Where things are, as far as the finder sees.
        obs = obs.to(self.model.device)
        known = self.model.state_of(obs)
        assert known is not None and self.model.state is not None
        state = torch.cat([obs.proprio, known], dim=1)
        # Dream of the executed actions, and take the ensemble's spread at their end.
        actions = chunk.to(self.model.device)
        steps = torch.full((len(actions),), actions.shape[1], device=actions.device)
        return self.model.state.roll(state, actions, steps)[1].float().cpu()

    def score(self, readings: Tensor, steps: Sequence[int], without: int = -1) -> float:
        """See ``Signal``."""
        return float(readings.max())
