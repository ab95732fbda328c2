"""Notices a camera that repeats its image while the arm moves."""

from __future__ import annotations

from typing import Any

import numpy as np

from embodyrl.real_robot.control.any_safety import Decoder
from embodyrl.real_robot.control.messages import Array
from embodyrl.real_robot.control.robot import NotReadyError, Robot

MAX_MOTION = 0.5
"""rad that the joints may move, to and fro, while a camera's image stays bit-identical."""


class FrozenCameraCheck:
    """Observes a robot during one episode, and refuses images that are frozen under new stamps.

    A real camera never takes two bit-identical images. A simulated one does if it sees nothing of
    the arm, so some motion is allowed.
    """

    def __init__(self, robot: Robot) -> None:
        self._robot = robot
        # Per camera: the last array, the image that it last changed to, and the motion since then.
        self._last: dict[str, np.ndarray] = {}
        self._changed: dict[str, np.ndarray] = {}
        self._moved: dict[str, float] = {}
        self._q: Array | None = None

    def observe(self, decoder: Decoder) -> dict[str, Any]:
        """See ``Robot.observe``.

        Raises:
            NotReadyError: also if an image stayed the same while the joints moved by more than
                ``MAX_MOTION`` rad.
        """
        seen = self._robot.observe(decoder)
        q = self._robot.state().q
        step = 0.0 if self._q is None else float(np.abs(q - self._q).max())
        self._q = q
        for name, image in seen["images"].items():
            # The same array object is no new image: whether it is too old is for the robot to say.
            new = image is not self._last.get(name)
            self._last[name] = image
            if name in self._changed and np.array_equal(self._changed[name], image):
                self._moved[name] += step
            else:
                self._changed[name] = image.copy()
                self._moved[name] = 0.0
            if new and not self._moved[name] <= MAX_MOTION:
                raise NotReadyError(
                    f"camera {name} repeats its picture, but the arm moved by more than "
                    f"{MAX_MOTION} rad"
                )
        return seen
