"""``embodyrl record`` in a process of its own, and the person at its page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from websockets import Origin
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect


@contextmanager
def session(*words: object, stdin: int | None = None) -> Iterator[Session]:
    """The command in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "embodyrl.cli", *map(str, words)],
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield Session(process)
    finally:
        process.kill()
        process.wait()


class Session:
    """A process and what it said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said = ""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line

    def says(self, pattern: str, seconds: float = 300.0) -> re.Match[str]:
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.said)):
            assert self.process.poll() is None or time.monotonic() < end - seconds + 5, self.said
            assert time.monotonic() < end, self.said
            time.sleep(0.02)
        return found

    def ends(self, status: int, seconds: float = 300.0) -> str:
        assert self.process.wait(timeout=seconds) == status, self.said
        time.sleep(0.2)  # the rest of what it said
        assert "Traceback" not in self.said
        return self.said


class Page:
    """What the page in a browser is told and tells."""

    def __init__(self, started: Session) -> None:
        at, token = started.says(r"http://(\S+)/#(\S+)").groups()
        self.session = started
        self._open = ExitStack()
        link = connect(f"ws://{at}/socket", origin=Origin(f"http://{at}"))
        self.socket: ClientConnection = self._open.enter_context(link)
        self.socket.send(token)
        self.status: dict[str, Any] = {}
        self.pictures = 0
        self.held: list[str] = []
        self.open = True
        self._closing = False
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._tell, daemon=True).start()

    def _listen(self) -> None:
        with suppress(ConnectionClosed):
            for message in self.socket:
                if isinstance(message, bytes):
                    self.pictures += 1
                else:
                    self.status = json.loads(message).get("status", self.status)

    def _tell(self) -> None:
        """Like the page's own beat: the keys that are held, ten times a second."""
        with suppress(ConnectionClosed):
            while not self._closing:
                self.socket.send(json.dumps({"keys": self.held, "open": self.open}))
                time.sleep(0.1)

    def do(self, what: str) -> None:
        self.socket.send(json.dumps({"do": what}))

    def until(self, holds: Callable[[dict[str, Any]], Any], seconds: float = 300.0) -> None:
        end = time.monotonic() + seconds
        while not (self.status and holds(self.status)):
            assert time.monotonic() < end and self.session.process.poll() is None, (
                self.status,
                self.session.said,
            )
            time.sleep(0.02)

    def moves(self, frames: int) -> None:
        """Starts, and moves the arm until an episode has that many frames."""
        self.until(lambda s: s["mode"] == "hold" and "Press Start" in s["reason"])
        self.held = ["w"]
        end = time.monotonic() + 300.0
        # On a busy machine the arm may rightly have stopped: then it is started again.
        while int(self.status["numbers"]["frames"]) < frames:
            assert time.monotonic() < end, self.status
            if self.status["mode"] != "human":
                self.do("takeover")
            time.sleep(0.3)

    def close(self) -> None:
        self._closing = True
        self._open.close()
