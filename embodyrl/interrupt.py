"""Ctrl-C as a wish to stop at the next good moment."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

INTERRUPTED = 130
"""Exit status of a command that was interrupted, as a shell gives it: what follows it in a script must not go on."""


class Interrupted(Exception):
    """Raised by ``Interrupt.check`` once a signal asked for an end."""


class Interrupt:
    """Turns the first SIGINT or SIGTERM into a wish to stop; the second one acts at once."""

    def __init__(self) -> None:
        self.asked = False
        self._previous: dict[int, Any] = {}

    def check(self) -> None:
        """Raises ``Interrupted`` if a signal came."""
        if self.asked:
            raise Interrupted

    def __enter__(self) -> Self:
        if (
            threading.current_thread() is threading.main_thread()
        ):  # no other thread may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
