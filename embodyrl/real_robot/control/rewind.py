"""The way back: where the hand has been, so that a person may undo what the policy did before they correct it.

Going back first and correcting from there taught more than corrections alone in RaC
(arXiv:2509.07953). The poses are targets for the safety filter like any others; objects stay where
they were pushed.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.messages import Array, Command

EVERY = 0.05
KEEP = 60.0
"""s of motion between two poses, and s of motion that are kept."""
SHARE = 0.5
"""Of the speed at which the hand came."""


class Trail:
    """Poses of the commanded hand in the order in which it went through them."""

    def __init__(self) -> None:
        self._poses: deque[tuple[Array, Array]] = deque(maxlen=round(KEEP / EVERY))
        self._next = -np.inf
        self._began = None

    def see(self, command: Command) -> None:
        """Notes where the hand is told to be, while it moves forwards."""
        if self._began is None and command.stamp >= self._next and np.abs(command.dq).max() > 1e-3:
            position, rotation, _ = kinematics.forward(command.q)
            self._poses.append((position, rotation))
            self._next = command.stamp + EVERY

    def start(self, now: float) -> None:
        """Begins to go back."""
        self._began = now

    def back(self, now: float) -> tuple[Array, Array] | None:
        """Position (3,) and rotation (3, 3) to be at now; None at the beginning of the trail."""
        steps = self._steps(now)
        k = int(steps)
        if k + 1 >= len(self._poses):
            return None
        (here, rotation) = self._poses[-1 - k]
        (there, _) = self._poses[-2 - k]
        return here + (steps - k) * (there - here), rotation

    def stop(self, now: float) -> None:
        """From here on it goes forwards again; the way that was gone back is forgotten."""
        for _ in range(min(int(self._steps(now)), len(self._poses))):
            self._poses.pop()
        self._began = None

    def _steps(self, now: float) -> float:
        return 0.0 if self._began is None else (now - self._began) * SHARE / EVERY
