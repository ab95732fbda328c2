"""What the policy sees, unless a camera shows it the past."""

from __future__ import annotations

from typing import Any

import numpy as np

from embodyrl.real_robot.control.actions import DeltaDecoder
from embodyrl.real_robot.control.messages import Array
from embodyrl.real_robot.control.transports import NotReadyError, Robot

SAME = 0.5
"""rad that the joints may move, to and fro, while a picture stays the same to the last bit."""


class Sight:
    """Observes a robot during one episode, and notices a camera that repeats its picture under new stamps.

    No two pictures of a real camera are the same to the last bit. A simulated one's are, if it sees
    nothing of the arm.
    """

    def __init__(self, robot: Robot) -> None:
        self._robot = robot
        self._last: dict[str, np.ndarray] = {}
        self._kept: dict[str, np.ndarray] = {}
        self._moved: dict[str, float] = {}
        self._q: Array | None = None

    def observe(self, decoder: DeltaDecoder) -> dict[str, Any]:
        """See ``Robot.observe``.

        Raises:
            NotReadyError: also if a picture stayed the same while the joints moved by more than
                ``SAME`` rad.
        """
        seen = self._robot.observe(decoder)
        q = self._robot.state().q
        step = 0.0 if self._q is None else float(np.abs(q - self._q).max())
        self._q = q
        for name, image in seen["images"].items():
            # The same array is no new picture: whether it is too old is for the robot to say.
            new = image is not self._last.get(name)
            self._last[name] = image
            if name in self._kept and np.array_equal(self._kept[name], image):
                self._moved[name] += step
            else:
                self._kept[name] = image.copy()
                self._moved[name] = 0.0
            if new and self._moved[name] > SAME:
                raise NotReadyError(
                    f"camera {name} repeats its picture, but the arm moved by more than {SAME} rad"
                )
        return seen
