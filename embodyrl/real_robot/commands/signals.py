"""What Ctrl-C and SIGTERM do to the robot's commands."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.ticker import INTERRUPTED


def sigterm_is_ctrl_c() -> None:
    """Makes SIGTERM and SIGINT raise ``KeyboardInterrupt``.

    A service manager ends a program with SIGTERM, and a shell starts a background job with SIGINT
    ignored.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


@contextmanager
def ctrl_c_is_estop(guard: SafetyFilter) -> Iterator[None]:
    """Ctrl-C stops the arm first, within its limits; the program ends once the arm is at rest."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGINT, lambda *_: guard.estop(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
