"""The clocks that the control loop runs by."""

from __future__ import annotations

import time
from typing import Protocol

CATCH_UP = 0.05
"""s of delay that ``PacedClock`` makes up for. With more it would rush, and keys would act late."""


class Clock(Protocol):
    """Tells the time and waits."""

    def now(self) -> float:
        """The time in s; it never goes back."""
        ...

    def sleep_until(self, stamp: float) -> None:
        """Returns at ``stamp``, or at once if that is past."""
        ...


class RealClock:
    """The monotonic clock of this machine."""

    def now(self) -> float:
        """See ``Clock``."""
        return time.monotonic()

    def sleep_until(self, stamp: float) -> None:
        """See ``Clock``."""
        if (left := stamp - time.monotonic()) > 0:
            time.sleep(left)


class PacedClock:
    """A simulated clock that runs no faster than real time, so that a person can act in it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stamp = clock.now()
        self._wall = time.monotonic()  # when ``_stamp`` was due in real time

    def now(self) -> float:
        """See ``Clock``."""
        return self._clock.now()

    def sleep_until(self, stamp: float) -> None:
        """See ``Clock``."""
        # The simulation may take any time to get there.
        self._clock.sleep_until(stamp)
        # Real time follows at the same pace, at most CATCH_UP seconds late.
        self._wall = max(self._wall + max(stamp - self._stamp, 0.0), time.monotonic() - CATCH_UP)
        self._stamp = stamp
        if (left := self._wall - time.monotonic()) > 0:
            time.sleep(left)
