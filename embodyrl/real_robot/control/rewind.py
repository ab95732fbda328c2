"""The way back: the angles of the joints so far, so that a person can undo what the policy did.

Going back before correcting taught more than corrections alone in RaC (arXiv:2509.07953). The
way back is made of targets for the safety filter like any others. Objects stay where they were
pushed.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from embodyrl.real_robot.control.messages import Array, Command

SPACING = 0.05
"""s of motion between two places of the trail."""
LENGTH = 60.0
"""s of motion that are kept."""
SPEED = 0.5
"""Speed of going back, as a share of the speed at which the hand came."""


class Trail:
    """Angles of the commanded joints in the order in which the arm passed through them."""

    def __init__(self) -> None:
        self._places: deque[Array] = deque(maxlen=round(LENGTH / SPACING))
        self._next = -np.inf  # when the next place is to be noted
        self._began = None  # when going back began; None while the arm goes forwards

    def see(self, command: Command) -> None:
        """Notes where the arm is told to be, while it moves forwards."""
        if self._began is None and command.stamp >= self._next and np.abs(command.dq).max() > 1e-3:
            self._places.append(command.q)
            self._next = command.stamp + SPACING

    def start(self, now: float) -> None:
        """Begins to go back."""
        self._began = now

    def back(self, now: float) -> Array | None:
        """Angles (n,) to be at now; None at the beginning of the trail."""
        steps = self._steps(now)
        k = int(steps)
        if k + 1 >= len(self._places):
            return None
        # Between two places the angles are interpolated.
        here = self._places[-1 - k]
        return here + (steps - k) * (self._places[-2 - k] - here)

    def stop(self, now: float) -> None:
        """Goes forwards again; the part of the trail that was gone back is forgotten."""
        for _ in range(min(int(self._steps(now)), len(self._places))):
            self._places.pop()
        self._began = None

    def _steps(self, now: float) -> float:
        """How many places the arm has gone back."""
        return 0.0 if self._began is None else (now - self._began) * SPEED / SPACING
