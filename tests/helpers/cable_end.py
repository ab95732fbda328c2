"""The far end of a serial cable: a pseudo-terminal that a simulated device serves."""

from __future__ import annotations

import os
import pty
import threading
import tty
from pathlib import Path


class CableEnd:
    """A device that can be unplugged and plugged in; whoever inherits serves while ``plugged``.

    Args:
        path: of the link by which a program opens the cable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plug()

    def plug(self) -> None:
        self._ours, theirs = pty.openpty()
        tty.setraw(theirs)
        unplugged = self.path.with_suffix(".new")
        unplugged.symlink_to(os.ttyname(theirs))
        unplugged.rename(self.path)
        os.close(theirs)
        self.plugged = True
        self._thread = threading.Thread(target=self._serve, args=(self._ours,), daemon=True)
        self._thread.start()

    def unplug(self) -> None:
        self.plugged = False
        self._thread.join(timeout=5.0)
        os.close(self._ours)

    def _serve(self, cable: int) -> None:
        """Answers at the descriptor ``cable``."""
        raise NotImplementedError
