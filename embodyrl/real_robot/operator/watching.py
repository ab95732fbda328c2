"""A person who watches, stops and labels, at a page whose keys do not fit the arm."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.real_robot.control.operator import LOST, WATCHING, Operator


class Watching(Operator):
    """Leaves out of a person's wishes what would move the arm.

    Args:
        person: at the page.
    """

    def __init__(self, person: Operator) -> None:
        self._person = person

    def wishes(self) -> list[str]:
        """See ``Operator``."""
        return [wish for wish in self._person.wishes() if wish in (*WATCHING, LOST)]

    def alive(self, now: float) -> bool:
        """See ``Operator``."""
        return self._person.alive(now)

    def action(self, dims: int) -> NDArray[np.float32]:
        """Is never asked for: nobody takes over."""
        raise RuntimeError("A person who watches has no action.")

    def show(self, status: dict[str, Any], images: dict[str, NDArray[np.uint8]]) -> None:
        """See ``Operator``."""
        self._person.show({**status, "can": WATCHING}, images)
