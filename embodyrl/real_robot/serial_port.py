"""A serial port in raw mode, by the standard library."""

from __future__ import annotations

import os
import select
import termios
import time
import tty

from embodyrl.errors import UserError

BAUDS = {
    int(name[1:]): getattr(termios, name)
    for name in vars(termios)
    if name.startswith("B") and name[1:].isdigit() and int(name[1:]) >= 9600
}
"""Bits per second -> its constant."""


class SerialPort:
    """An open port.

    Args:
        path: such as ``/dev/ttyUSB0``.
        baud: bits per second.

    Raises:
        OSError: there is none, or it may not be used.
        UserError: a speed that serial ports do not have.
    """

    def __init__(self, path: str, baud: int) -> None:
        if baud not in BAUDS:
            known = ", ".join(map(str, sorted(BAUDS)))
            raise UserError(f"No serial port runs at {baud} bits per second. There are: {known}.")
        self._file = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            tty.setraw(self._file, termios.TCSANOW)
            attributes = termios.tcgetattr(self._file)
            # Eight bits, no parity, no lines of a modem; both ways at the same speed.
            attributes[2] |= termios.CLOCAL | termios.CREAD
            attributes[4] = attributes[5] = BAUDS[baud]
            termios.tcsetattr(self._file, termios.TCSANOW, attributes)
        except termios.error as error:
            os.close(self._file)
            raise OSError(*error.args) from error

    def write(self, data: bytes) -> None:
        """Drops what came in unread, and sends.

        Raises:
            OSError: the port is gone.
        """
        # An answer that came too late must not be taken for the next one.
        try:
            termios.tcflush(self._file, termios.TCIFLUSH)
        except termios.error as error:
            raise OSError(*error.args) from error
        while data:
            data = data[os.write(self._file, data) :]

    def read(self, until: float) -> bytes:
        """What comes next; empty if nothing comes before ``until`` (s, monotonic).

        Raises:
            OSError: the port is gone.
        """
        wait = max(0.0, until - time.monotonic())
        if not select.select([self._file], [], [], wait)[0]:
            return b""
        data = os.read(self._file, 4096)
        if not data:
            raise OSError("the port is gone")
        return data

    def close(self) -> None:
        """Closes the port."""
        os.close(self._file)
