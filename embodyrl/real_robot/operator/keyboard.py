"""Reads the keyboard of the terminal that the program was started in.

A terminal tells that a key was pressed, again and again while it is held, and never that it was
let go. So a key moves the hand for ``HELD`` s, and one that is held moves it on. The page in a
browser knows when a key is let go, and is smoother.
"""

from __future__ import annotations

import contextlib
import os
import select
import termios
import time
import tty

import numpy as np

from embodyrl.errors import UserError
from embodyrl.real_robot.operator.devices import Reading

STDIN = 0
"""File descriptor of the standard input."""
HELD = 0.15
"""s that a key counts as held; terminals repeat a held key every .03 s."""
MOTION = {
    "w": (0, 1), "s": (0, -1), "a": (1, 1), "d": (1, -1), "r": (2, 1), "f": (2, -1),
    "q": (5, 1), "e": (5, -1),
}  # fmt: skip
"""Key -> axis of the hand, and the sign; as on the page."""
MEANING = {
    " ": "fingers", "t": "takeover", "g": "release", "h": "hold", "p": "run", "b": "rewind",
    "1": "success", "0": "failure", "x": "discard", "c": "clear", "\x1b": "estop",
}  # fmt: skip
"""Key -> what it asks for; as on the page."""
HELP = (
    "Keys, here and on the page: t start or go on, h pause, w s a d r f move, q e turn, space "
    "gripper, 1 success, 0 failure, x discard, Esc STOP; c here clears it. Ctrl-C ends the session."
)


class TerminalKeyboard:
    """A ``Device``: the keys of a terminal.

    Args:
        terminal: its file descriptor; None takes the standard input.

    Raises:
        UserError: it is no terminal.
    """

    def __init__(self, terminal: int | None = None) -> None:
        self._terminal = STDIN if terminal is None else terminal
        if not os.isatty(self._terminal):
            raise UserError(
                "--teleop keyboard reads the keys of a terminal, and there is none. Start it in "
                "one, or use --teleop page."
            )
        # Keys come at once and are not shown; Ctrl-C stays what it is.
        self._before = termios.tcgetattr(self._terminal)
        tty.setcbreak(self._terminal, termios.TCSANOW)
        self._until: dict[str, float] = {}  # motion key -> when it no longer counts as held

    def read(self) -> Reading:
        """See ``Device``."""
        pressed = set()
        for key in _keys(self._unread()):
            if key in MOTION:
                self._until[key] = time.monotonic() + HELD
            elif key in MEANING:
                pressed.add(MEANING[key])
        # Keys that were pressed a moment ago still count.
        motion = np.zeros(6, np.float32)
        for key, until in self._until.items():
            if time.monotonic() < until:
                axis, sign = MOTION[key]
                motion[axis] += sign
        return Reading(motion, frozenset(pressed))

    def _unread(self) -> str:
        if not select.select([self._terminal], [], [], 0.0)[0]:
            return ""
        data = os.read(self._terminal, 1024)
        if not data:
            raise OSError("the terminal is gone")
        return data.decode("ascii", "ignore")

    def close(self) -> None:
        """See ``Device``: the terminal is as it was."""
        with contextlib.suppress(termios.error):  # it may be gone
            termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._before)


def _keys(text: str) -> list[str]:
    """The keys of what a terminal sent; arrows and the like, which begin with Esc, are none."""
    if len(text) > 1 and text[0] == "\x1b" and text[1] in "[O":
        return []
    return list(text.lower())
