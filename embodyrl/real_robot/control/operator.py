"""The interface of the person beside the robot. The room ``operator`` implements it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

WISHES = ("estop", "hold", "run", "takeover", "release", "rewind", "clear", "success", "failure")
"""What an operator can ask for."""
LABELS = ("success", "failure", "discard")
"""Wishes that end an episode. Only a recording session offers the last: it keeps no such episode."""
LOST = "lost"
"""What an operator whose link is lost asks for by itself, and no person: a hold."""

HOLDS = {
    "hold": "a person said hold",
    "release": "a person let go",
    LOST: "the link to the operator's page is lost",
}
"""Reasons of the holds that an operator asks for."""


WATCHING = ("estop", "hold", "run", "clear", "success", "failure")
"""What may be asked for by a person who cannot move the arm."""


class Operator(Protocol):
    """A person who can watch, stop, take over and label; see ``operator.page.OperatorPage``."""

    def wishes(self) -> list[str]:
        """What was asked for since the last call, each one of ``WISHES``, or ``LOST``."""
        ...

    def alive(self, now: float) -> bool:
        """Whether the person's input is recent enough to move the arm."""
        ...

    def action(self, dims: int) -> NDArray[np.float32]:
        """What the person's input asks for, as an action (``dims``,) of the policy's kind."""
        ...

    def show(self, status: dict[str, Any], images: dict[str, NDArray[np.uint8]]) -> None:
        """Shows the state and the camera images; returns at once."""
        ...
