"""The steps of a start, such as importing PyTorch or building envs: each says what it does.

A step that is over at once says nothing. Ctrl-C ends any of them within two seconds, also where a
library swallows it or does not look.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from embodyrl.interrupt import INTERRUPTED

QUIET = 0.5
"""Seconds that a step may take without a word."""

PATIENCE = 1.5
"""Seconds after Ctrl-C in which a step may end by itself."""

_under_way: list[str] = []


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Says on stderr what this block does, if it takes longer than ``QUIET``.

    Args:
        what: for example ``"building 64 envs of mujoco"``.
    """
    timer = threading.Timer(QUIET, _say, (what,))
    timer.daemon = True
    timer.start()
    _under_way.append(what)
    try:
        yield
    finally:
        _under_way.remove(what)
        timer.cancel()
        timer.join()  # no thread is left: the process may fork next


def _say(what: str) -> None:
    sys.stderr.write(f"embodyrl: {what} ...\n")  # in one piece, whoever else writes
    sys.stderr.flush()


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """In this block Ctrl-C ends a step of a start, whatever it does. For a whole process."""
    previous = signal.signal(signal.SIGINT, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _stop(number: int, frame: FrameType | None) -> None:
    if _under_way:
        # Nothing is half written during a start, so the process may end anywhere.
        timer = threading.Timer(PATIENCE, _end)
        timer.daemon = True
        timer.start()
    raise KeyboardInterrupt


def _end() -> None:
    print("\nembodyrl: stopped.", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)
