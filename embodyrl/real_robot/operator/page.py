"""The operator's web page: cameras, state, takeover by keyboard, stop, labels.

The page loads nothing from elsewhere and is served on this machine only. Whoever opens it must know
the token. It is the part of the address after ``#``, so no request contains it: the page sends it
in its first message. Pages of another origin are refused. The page can only send a fixed set of
words, and moves the arm only through the safety filter.
"""

from __future__ import annotations

import json
import queue
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection

from embodyrl.real_robot.control.clocks import Clock
from embodyrl.real_robot.control.operator import WISHES, Operator
from embodyrl.real_robot.images import to_jpeg
from embodyrl.real_robot.parsing import MessageError, parse_json
from embodyrl.real_robot.ports import listen, same_secret

ALIVE = 0.3
"""s after which a page that says nothing no longer moves the arm."""
BEAT = 0.25
"""s after which a page is told that the link is good, where nothing new is shown."""
MAX_MESSAGE = 4096
"""Bytes of a message from the page."""
AXES = {
    "w": (0, 1),
    "s": (0, -1),
    "a": (1, 1),
    "d": (1, -1),
    "r": (2, 1),
    "f": (2, -1),
    "q": (5, 1),
    "e": (5, -1),
}
"""Key -> index among x, y, z and the three of rotation, and the sign."""
_CONTENT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src blob: data:; connect-src 'self'"
)
PAGE_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": _CONTENT_POLICY,
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True)
class Keys:
    """Which keys are held, when the page last said so, and whether the fingers shall be open."""

    stamp: float
    held: frozenset[str]
    open: bool

    @classmethod
    def of(cls, message: dict[str, Any], now: float) -> Keys:
        """The keys of a page's message that came ``now``.

        Raises:
            MessageError: it has none.
        """
        keys = message.get("keys")
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise MessageError("the page's keys must be a list of texts")
        return cls(now, frozenset(keys) & frozenset(AXES), message.get("open") is True)


def read_page(html: Path) -> bytes:
    """A page as one file: with the script that all pages share."""
    script = Path(__file__).with_name("link.js").read_bytes()
    return html.read_bytes().replace(b"/* link.js */", script)


def key_action(keys: Keys, dims: int, share: float = 0.4) -> NDArray[np.float32]:
    """The keys as an action (``dims``,) of the policy's kind.

    Args:
        keys: that are held.
        dims: A.
        share: size of a key's step, as a share of the largest one.
    """
    action = np.zeros(dims, np.float32)
    for key in keys.held:
        axis, way = AXES[key]
        if axis < dims - 1:
            action[axis] += way * share
    action[-1] = 1.0 if keys.open else -1.0
    return action


def ask_and_wait(person: Operator, sentence: str) -> None:
    """Shows what a person must do, and waits until they press run."""
    status = {
        "mode": "hold",
        "reason": f"{sentence} Then press run.",
        "asks": sentence,
        "task": "",
        "open": True,
        "can": ["run"],
    }
    # Wishes from before the question do not count.
    person.wishes()
    while "run" not in person.wishes():
        person.show({**status, "numbers": {}, "events": []}, {})
        time.sleep(0.1)


class OperatorPage:
    """Serves the page until ``close``.

    Args:
        clock: of the control loop.
        port: where it listens; 0 takes a free port.
        html: a page other than the robot's.
        wishes: what the page may ask for.

    Raises:
        UserError: the port is in use.
    """

    def __init__(
        self,
        clock: Clock,
        port: int = 0,
        html: Path | None = None,
        wishes: tuple[str, ...] = WISHES,
    ) -> None:
        self._clock = clock
        self._token = secrets.token_urlsafe(24)
        self._wishes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._keys = Keys(-np.inf, frozenset(), True)
        self._html = read_page(html or Path(__file__).with_name("page.html"))
        self._known = wishes
        # What the pages show: a number that changes with it, the status, and the images.
        self._shown: tuple[int, dict[str, Any], dict[str, NDArray[np.uint8]]] = (0, {}, {})
        self._shown_at = time.monotonic()
        self._news = threading.Condition()
        self._open = 0  # browsers that show the page
        self._called = ""  # what the terminal says that a person is asked for
        self._server = listen(
            self._talk,
            "127.0.0.1",
            port,
            what="The operator's page",
            pages=self._answer,
            max_bytes=MAX_MESSAGE,
        )
        self.port = int(self._server.socket.getsockname()[1])
        self.address = f"http://127.0.0.1:{self.port}/#{self._token}"
        threading.Thread(target=self._server.serve_forever, name="operator", daemon=True).start()

    def wishes(self) -> list[str]:
        """What the person asked for since the last call, in order."""
        found = []
        while True:
            try:
                found.append(self._wishes.get_nowait())
            except queue.Empty:
                return found

    def alive(self, now: float) -> bool:
        """Whether the page has reported its keys within the last ``ALIVE`` s."""
        return now - self._keys.stamp <= ALIVE

    def action(self, dims: int, share: float = 0.4) -> NDArray[np.float32]:
        """See ``Operator``, and ``key_action``."""
        return key_action(self._keys, dims, share)

    def show(self, status: dict[str, Any], images: dict[str, NDArray[np.uint8]]) -> None:
        """Sends a status, as plain JSON data, and images (h, w, 3) to every page."""
        with self._news:
            self._shown = (self._shown[0] + 1, status, images)
            self._shown_at = time.monotonic()
            self._news.notify_all()
        self._call(status.get("asks", ""))

    def _call(self, asks: str) -> None:
        """Says in the terminal what a person is asked for, while nobody has the page open."""
        asks = "" if self._open else asks
        if asks and asks != self._called:
            said = f"the arm waits for a person: {asks.rstrip('.')}"
            print(f"  Nobody has the page open, and {said}. Open {self.address}", flush=True)
        self._called = asks

    def ask(self, sentence: str) -> None:
        """Shows what a person must do, and waits until they press run."""
        ask_and_wait(self, sentence)

    def close(self) -> None:
        """Ends the server and its pages."""
        with self._news:
            self._shown = (-1, {}, {})
            self._news.notify_all()
        self._server.shutdown()

    def _answer(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answers a request with the page, or with None to open the websocket.

        Only a page of this port may open it, and pages say where they come from.
        """
        if request.path == "/socket":
            known = "Origin" in request.headers  # ``ports`` has compared it with this port
            return None if known else connection.respond(HTTPStatus.FORBIDDEN, "Not from there.\n")
        if request.path == "/":
            return Response(HTTPStatus.OK, "OK", Headers(PAGE_HEADERS), self._html)
        return connection.respond(HTTPStatus.NOT_FOUND, "Nothing here.\n")

    def _talk(self, connection: ServerConnection) -> None:
        """Listens to one page, once it has sent the token."""
        try:
            given = connection.recv(timeout=5.0)
            if not isinstance(given, str) or not same_secret(given, self._token):
                connection.close(4001, "wrong token")
                return
            threading.Thread(
                target=self._send, args=(connection,), name="operator page", daemon=True
            ).start()
            with self._counted():
                while True:
                    self._hear(parse_json(connection.recv(), MAX_MESSAGE))
        except (ConnectionClosed, TimeoutError):
            pass
        except MessageError as error:
            connection.close(4002, str(error)[:100])

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """While a browser shows the page."""
        with self._news:
            self._open += 1
        try:
            yield
        finally:
            with self._news:
                self._open -= 1

    def _hear(self, message: dict[str, Any]) -> None:
        """Takes in a wish, or the keys that are held.

        Raises:
            MessageError: it is neither.
        """
        if "do" in message:
            if message["do"] not in self._known:
                raise MessageError("the page asked for what it cannot ask for")
            self._wishes.put(message["do"])
            return
        # The age of the keys is by the control loop's clock, whatever the page's is.
        self._keys = Keys.of(message, self._clock.now())

    def _send(self, connection: ServerConnection) -> None:
        """Sends to one page whatever is shown next, until the server ends.

        Every message says how old (s) what is shown is; a beat, where nothing is new, says that
        alone. So the page tells a program that is gone from one whose loop stands still.
        """
        number = 0
        try:
            while True:
                with self._news:
                    new = self._news.wait_for(lambda last=number: self._shown[0] != last, BEAT)
                    number, status, images = self._shown
                    age = time.monotonic() - self._shown_at
                if number < 0:
                    return
                if not new:
                    connection.send(json.dumps({"age": age}))
                    continue
                connection.send(
                    json.dumps({"age": age, "status": {**status, "cameras": list(images)}})
                )
                for image in images.values():
                    connection.send(to_jpeg(image))
        except ConnectionClosed:
            pass
