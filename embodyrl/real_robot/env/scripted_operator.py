"""A scripted person beside the simulated arm: learning from corrections, tried without people."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.real_robot.control.operator import Operator
from embodyrl.sims.mujoco.experts import ScriptedExpert


class ScriptedOperator(Operator):
    """Takes over when an episode is not solved in time, and finishes it as the task's expert would.

    Args:
        twin: the simulated arm.
        patience: number of actions that the policy may take alone in an episode.
        elapsed: returns how many actions of the episode are over.
        look: brings the state that the expert acts on up to date.
    """

    def __init__(
        self, twin: Any, patience: int, elapsed: Callable[[], int], look: Callable[[], object]
    ) -> None:
        self._patience = patience
        self._elapsed = elapsed
        self._look = look
        self._expert = ScriptedExpert(twin)

    def wishes(self) -> list[str]:
        """See ``Operator``; asked once after each action."""
        if self._elapsed() + 1 != self._patience:
            return []
        self._expert.reset()
        return ["takeover"]

    def alive(self, now: float) -> bool:
        """See ``Operator``."""
        return True

    def action(self, dims: int) -> NDArray[np.float32]:
        """See ``Operator``."""
        self._look()
        return self._expert.act()[0].cpu().numpy()

    def show(self, status: dict[str, Any], images: dict[str, NDArray[np.uint8]]) -> None:
        """See ``Operator``; nobody looks."""
