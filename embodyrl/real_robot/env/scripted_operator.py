"""Scripted people beside the simulated arm: one who corrects a policy, and one who demonstrates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.real_robot.control.actions import DeltaDecoder
from embodyrl.real_robot.control.messages import Mode
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


class ScriptedTeleoperator(Operator):
    """Demonstrates the task in every episode, as its expert would.

    Args:
        twin: the simulated arm.
    """

    def __init__(self, twin: Any) -> None:
        self._twin = twin
        self._expert = ScriptedExpert(twin)
        self._mode = ""  # of the safety filter; empty before the episode's first picture
        self._decoder: DeltaDecoder | None = None

    def begin(self, decoder: DeltaDecoder) -> None:
        """Begins an episode.

        Args:
            decoder: of its actions.
        """
        self._decoder = decoder
        self._expert.reset()
        self._mode = Mode.HOLD

    def wishes(self) -> list[str]:
        """See ``Operator``: it starts, goes on after a hold, and gives up after a fault."""
        mode = self._mode
        self._mode = ""
        wish = {"hold": "takeover", "fault": "failure", "estop": "failure"}.get(mode)
        return [wish] if wish else []

    def alive(self, now: float) -> bool:
        """See ``Operator``."""
        return True

    def action(self, dims: int) -> NDArray[np.float32]:
        """See ``Operator``."""
        # The expert acts on the present state, and on where the arm was told to be.
        assert self._decoder is not None
        self._twin.observe(self._decoder)
        return self._expert.act()[0].cpu().numpy()

    def show(self, status: dict[str, Any], images: dict[str, NDArray[np.uint8]]) -> None:
        """See ``Operator``."""
        self._mode = status["mode"]
