"""The way back: the poses of the hand so far, so that a person can undo what the policy did.

Going back before correcting taught more than corrections alone in RaC (arXiv:2509.07953). The
poses are targets for the safety filter like any others. Objects stay where they were pushed.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.messages import Array, Command

SPACING = 0.05
"""s of motion between two poses of the trail."""
LENGTH = 60.0
"""s of motion that are kept."""
SPEED = 0.5
"""Speed of going back, as a share of the speed at which the hand came."""


class Trail:
    """Poses of the commanded hand in the order in which it passed through them."""

    def __init__(self) -> None:
        self._poses: deque[tuple[Array, Array]] = deque(maxlen=round(LENGTH / SPACING))
        self._next = -np.inf  # when the next pose is to be noted
        self._began = None  # when going back began; None while the hand goes forwards

    def see(self, command: Command) -> None:
        """Notes where the hand is told to be, while it moves forwards."""
        if self._began is None and command.stamp >= self._next and np.abs(command.dq).max() > 1e-3:
            position, rotation, _ = kinematics.forward(command.q)
            self._poses.append((position, rotation))
            self._next = command.stamp + SPACING

    def start(self, now: float) -> None:
        """Begins to go back."""
        self._began = now

    def back(self, now: float) -> tuple[Array, Array] | None:
        """Position (3,) and rotation (3, 3) to be at now; None at the beginning of the trail."""
        steps = self._steps(now)
        k = int(steps)
        if k + 1 >= len(self._poses):
            return None
        # Between two poses the position is interpolated.
        (here, rotation) = self._poses[-1 - k]
        (there, _) = self._poses[-2 - k]
        return here + (steps - k) * (there - here), rotation

    def stop(self, now: float) -> None:
        """Goes forwards again; the part of the trail that was gone back is forgotten."""
        for _ in range(min(int(self._steps(now)), len(self._poses))):
            self._poses.pop()
        self._began = None

    def _steps(self, now: float) -> float:
        """How many poses the hand has gone back."""
        return 0.0 if self._began is None else (now - self._began) * SPEED / SPACING
