"""Ctrl-C as a request to stop at the next safe point, for example after the current update."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, Self

INTERRUPTED = 130
"""Exit status of an interrupted command, as in a shell. A script that checks it stops too."""


SAID = b"\nembodyrl: stops after the current update; Ctrl-C again stops at once.\n"


class Interrupted(Exception):
    """Raised by ``Interrupt.check`` after a signal."""


class Interrupt:
    """Turns the first SIGINT or SIGTERM into a request to stop; the second stops immediately.

    Use it as a context manager, and call ``check`` or read ``asked`` at safe points.

    Attributes:
        asked: whether a signal came.
    """

    def __init__(self) -> None:
        self.asked = False
        self._previous: dict[int, Any] = {}

    def check(self) -> None:
        """Raises ``Interrupted`` if a signal came."""
        if self.asked:
            raise Interrupted

    def __enter__(self) -> Self:
        # Python lets only the main thread set signal handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        # An update may take minutes. What Python buffers may be half written here, so it is not used.
        with suppress(OSError):
            os.write(2, SAID)

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
