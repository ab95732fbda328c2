"""The steps of a start, such as importing PyTorch or building envs: each says what it does.

A step that is over at once says nothing. Ctrl-C ends any of them within two seconds, also where a
library swallows it or does not look.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
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

_woken: int | None = None
"""Within ``stoppable``: a pipe with the numbers of the signals that came."""


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Says on stderr what this block does, if it takes longer than ``QUIET``.

    Args:
        what: for example ``"building 64 envs of mujoco"``.
    """
    ended, end = os.pipe()
    watcher = threading.Thread(target=_watch, args=(what, ended), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        os.close(end)
        watcher.join()  # no thread is left: the process may fork next
        os.close(ended)


def load_torch() -> None:
    """Imports what takes longest, with a word; for a command that cannot do without."""
    with step("loading PyTorch"):
        importlib.import_module("torch")


def say(what: str) -> None:
    """A line on stderr, in one piece whoever else writes: what is under way."""
    sys.stderr.write(f"embodyrl: {what} ...\n")
    sys.stderr.flush()


def is_step(line: str) -> bool:
    """Whether a line on stderr is one of ``say``."""
    return line.startswith("embodyrl: ") and line.endswith(" ...")


def _watch(what: str, ended: int) -> None:
    """Beside a step, until it has ended: speaks, and looks for Ctrl-C.

    The signal's handler cannot do that: Python runs it when a call into a library has returned.
    """
    # A quick step ends before it has said anything.
    pipes = [ended] if _woken is None else [ended, _woken]
    ready = select.select(pipes, [], [], QUIET)[0]
    if not ready:
        say(what)
        ready = select.select(pipes, [], [])[0]
    while ended not in ready:
        assert _woken is not None
        # In the midst of a training Ctrl-C means something else, and has another handler.
        if signal.SIGINT in os.read(_woken, 64) and signal.getsignal(signal.SIGINT) is _stop:
            timer = threading.Timer(PATIENCE, _end)
            timer.daemon = True
            timer.start()
            return
        ready = select.select(pipes, [], [])[0]


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """In this block Ctrl-C ends any step of a start, whatever it does. For a whole process."""
    global _woken
    _woken, waker = os.pipe()
    os.set_blocking(waker, False)
    previous = signal.signal(signal.SIGINT, _stop), signal.set_wakeup_fd(waker)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous[0])
        signal.set_wakeup_fd(previous[1])
        os.close(waker)
        os.close(_woken)
        _woken = None


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _end() -> None:
    """Nothing is half written during a start, so the process may end anywhere."""
    sys.stderr.write("\nembodyrl: stopped.\n")
    sys.stderr.flush()
    os._exit(INTERRUPTED)
