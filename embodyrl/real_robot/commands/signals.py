"""What Ctrl-C and SIGTERM do to the robot's commands."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.ticker import INTERRUPTED

_ENDS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what a service manager or ``kill`` sends."""


def sigterm_is_ctrl_c() -> None:
    """Makes SIGTERM and SIGINT raise ``KeyboardInterrupt``.

    A service manager ends a program with SIGTERM, and a shell starts a background job with SIGINT
    ignored.
    """
    for number in _ENDS:
        signal.signal(number, signal.default_int_handler)


@contextmanager
def interrupt_is_estop(guard: SafetyFilter) -> Iterator[None]:
    """Ctrl-C and SIGTERM stop the arm first, within its limits; the program ends once it rests."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = {n: signal.signal(n, lambda *_: guard.estop(INTERRUPTED)) for n in _ENDS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
