"""A circuit breaker: a server that keeps failing is not asked for a while."""

from __future__ import annotations

import time
from collections.abc import Callable


class CircuitBreaker:
    """Opens after ``failures`` failed calls in a row.

    After ``seconds`` it lets one call through. If that succeeds the breaker closes, otherwise it
    stays open for as long again.

    Args:
        failures: in a row, after which it opens.
        seconds: for which it stays open.
        clock: monotonic, in seconds.
    """

    def __init__(
        self, failures: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.failures = failures
        self.seconds = seconds
        self.clock = clock
        self._in_a_row = 0
        self._next_try = 0.0

    @property
    def is_open(self) -> bool:
        """Whether enough calls in a row have failed, and none has succeeded since."""
        return self._in_a_row >= self.failures

    def allow(self) -> bool:
        """Whether a call may be made now. True once per ``seconds`` while open."""
        if not self.is_open:
            return True
        if self.clock() < self._next_try:
            return False
        self._next_try = self.clock() + self.seconds
        return True

    def record(self, ok: bool) -> None:
        """Notes whether a call succeeded."""
        was_open = self.is_open
        self._in_a_row = 0 if ok else self._in_a_row + 1
        if self.is_open and not was_open:
            self._next_try = self.clock() + self.seconds
