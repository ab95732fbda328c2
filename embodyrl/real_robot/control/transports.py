"""The one interface to a robot, and the clocks that the ticker runs by."""

from __future__ import annotations

import time
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from embodyrl.errors import UserError
from embodyrl.real_robot.control.actions import DeltaDecoder
from embodyrl.real_robot.control.messages import Command, RobotState


class Robot(Protocol):
    """A Franka arm with a gripper and cameras. No method may block the ticker for long."""

    def state(self) -> RobotState:
        """The newest measured state, stamped by the ticker's clock."""
        ...

    def send(self, command: Command) -> None:
        """Hands over the next command."""
        ...

    def observe(self, decoder: DeltaDecoder) -> dict[str, Any]:
        """What the policy sees now: ``images``, ``proprio`` and ``prompt`` (see ``server.check_observation``).

        Raises:
            NotReadyError: there is nothing fresh to be seen.
        """
        ...

    def solved(self) -> bool:
        """Whether the task is, where the robot can tell."""
        ...

    def pictures(self) -> dict[str, NDArray[np.uint8]]:
        """Camera -> (h, w, 3), the newest there is, for a person."""
        ...

    def prompt(self) -> str:
        """What the policy is told."""
        ...

    def close(self) -> None:
        """Lets go of the robot."""
        ...


class NotReadyError(UserError):
    """A picture is missing or too old."""


class Clock(Protocol):
    """Where time comes from."""

    def now(self) -> float:
        """s, never going back."""
        ...

    def sleep_until(self, stamp: float) -> None:
        """Returns at ``stamp``, or at once if that is past."""
        ...


CATCH_UP = 0.05
"""Seconds behind the wall's clock that are made up for; more would be a rush in which a person's keys come too late."""


class PacedClock:
    """A simulated clock that goes no faster than the wall's, so that a person can act in it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stamp = clock.now()
        self._wall = time.monotonic()

    def now(self) -> float:
        """See ``Clock``."""
        return self._clock.now()

    def sleep_until(self, stamp: float) -> None:
        """See ``Clock``."""
        self._clock.sleep_until(stamp)
        self._wall = max(self._wall + max(stamp - self._stamp, 0.0), time.monotonic() - CATCH_UP)
        self._stamp = stamp
        if (left := self._wall - time.monotonic()) > 0:
            time.sleep(left)


class RealClock:
    """The machine's own."""

    def now(self) -> float:
        """See ``Clock``."""
        return time.monotonic()

    def sleep_until(self, stamp: float) -> None:
        """See ``Clock``."""
        if (left := stamp - time.monotonic()) > 0:
            time.sleep(left)
