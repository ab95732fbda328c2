"""An arm's link to the page of several arms (``arms_page``).

To the arm it is the person: what they ask for and the keys that they hold come over a websocket,
the status and the images go back. The link is made anew when it is lost. Then nothing moves the
arm: it is held until a person says otherwise.

Every message of the arm bears a stamp of its own clock, and every one of the page the last stamp
that it heard. So the arm knows how old a key or a wish is, without two clocks that agree. What is
older than ``LATE`` is not obeyed, unless it is a stop.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.sync.client import ClientConnection, connect

from embodyrl.errors import UserError
from embodyrl.real_robot.arm_names import with_name
from embodyrl.real_robot.control.clocks import Clock
from embodyrl.real_robot.control.operator import LOST, WISHES, Operator
from embodyrl.real_robot.images import to_jpeg
from embodyrl.real_robot.operator.page import ALIVE, MAX_MESSAGE, Keys, ask_and_wait, key_action
from embodyrl.real_robot.parsing import MessageError, number, parse_json

BEAT = 0.1
"""s between two messages of the arm, where nothing new is shown."""
SILENT = 1.2
"""s without a word of the page after which the link counts as lost."""
LATE = 0.5
"""s after which what the person asked for, or the keys that they held, are too old to be obeyed."""
AGAIN = 1.0
"""s between two attempts to connect."""
log = logging.getLogger(__name__)


class ArmLink(Operator):
    """The person at the page of several arms.

    Args:
        clock: of the arm's control loop.
        address: of the page, ``ws://HOST:PORT`` or ``ws://HOST:PORT/NAME``.
        token: that the page wants.

    Raises:
        UserError: no such page answers, or it has an arm of that name already.
    """

    def __init__(self, clock: Clock, address: str, token: str = "") -> None:
        self.address = with_name(address)
        self._clock = clock
        self._headers = {"Authorization": f"Api-Key {token}"} if token else None
        self._wishes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._keys = Keys(-np.inf, frozenset(), True)
        # What is shown: a number that changes with it, the status, and the images.
        self._shown: tuple[int, dict[str, Any], dict[str, NDArray[np.uint8]]] = (0, {}, {})
        self._news = threading.Condition()
        self._closing = False
        opened = ExitStack()
        first = self._connect(opened)
        self._thread = threading.Thread(
            target=self._work, args=(opened, first), name="arm link", daemon=True
        )
        self._thread.start()

    def wishes(self) -> list[str]:
        """See ``Operator``."""
        found = []
        while not self._wishes.empty():
            found.append(self._wishes.get())
        return found

    def alive(self, now: float) -> bool:
        """See ``Operator``: whether keys came within the last ``ALIVE`` s."""
        return now - self._keys.stamp <= ALIVE

    def action(self, dims: int, share: float = 0.4) -> NDArray[np.float32]:
        """See ``Operator``, and ``page.key_action``."""
        return key_action(self._keys, dims, share)

    def show(self, status: dict[str, Any], images: dict[str, NDArray[np.uint8]]) -> None:
        """See ``Operator``."""
        with self._news:
            self._shown = (self._shown[0] + 1, status, images)
            self._news.notify_all()

    def ask(self, sentence: str) -> None:
        """Shows what a person must do, and waits until they press run."""
        ask_and_wait(self, sentence)

    def close(self) -> None:
        """Takes the arm off the page."""
        with self._news:
            self._closing = True
            self._news.notify_all()
        self._thread.join(timeout=3.0)

    # ---- The link, in threads of its own.

    def _connect(self, opened: ExitStack) -> ClientConnection:
        """Opens the link, which ``opened`` closes.

        Raises:
            UserError: the page does not answer, or refuses the arm.
        """
        try:
            connection = opened.enter_context(
                connect(
                    self.address,
                    additional_headers=self._headers,
                    compression=None,
                    max_size=MAX_MESSAGE,
                    open_timeout=5.0,
                    close_timeout=1.0,
                )
            )
        except (OSError, InvalidHandshake, InvalidURI, TimeoutError) as error:
            raise UserError(
                f"No page of several arms answers at {self.address} ({error}). Start it with: "
                "embodyrl operator"
            ) from error
        try:
            # The page says one word to an arm that it takes.
            self._hear(connection.recv(timeout=5.0))
        except (ConnectionClosed, TimeoutError, MessageError) as error:
            opened.close()
            reason = getattr(getattr(error, "rcvd", None), "reason", "") or str(error)
            raise UserError(
                f"The page at {self.address} does not take this arm: {reason}."
            ) from error
        return connection

    def _work(self, opened: ExitStack, connection: ClientConnection) -> None:
        """Keeps the link until ``close``."""
        while True:
            with opened:
                self._listen(connection)
            if self._closing:
                return
            # Nothing moves the arm while nobody could stop it.
            self._wishes.put(LOST)
            log.warning("The link to the page at %s is lost; the arm is held.", self.address)
            # Try again, until there is a page.
            opened = ExitStack()
            while True:
                with self._news:
                    self._news.wait_for(lambda: self._closing, AGAIN)
                if self._closing:
                    return
                try:
                    connection = self._connect(opened)
                    break
                except UserError:
                    continue

    def _listen(self, connection: ClientConnection) -> None:
        """Hears one connection until it ends, is silent or talks nonsense."""
        ended = threading.Event()
        sender = threading.Thread(
            target=self._send, args=(connection, ended), name="arm shows", daemon=True
        )
        sender.start()
        try:
            while not self._closing:
                self._hear(connection.recv(timeout=SILENT))
        except (ConnectionClosed, TimeoutError):
            pass
        except MessageError as error:
            log.warning("The page at %s sent nonsense: %s", self.address, error)
        # The thread that shows ends with its connection.
        ended.set()
        with self._news:
            self._news.notify_all()

    def _hear(self, data: str | bytes) -> None:
        """Takes in a wish, keys, or a word that only says that the page is there.

        Raises:
            MessageError: it is none of them.
        """
        message = parse_json(data, MAX_MESSAGE)
        # How long ago the arm said the last thing that the page had heard when it said this.
        age = time.monotonic() - number(message.get("stamp", -1e12), -1e12, 1e12, "stamp")
        wish = message.get("do")
        if wish is not None:
            if wish not in WISHES:
                raise MessageError("the page asked for what it cannot ask for")
            if wish == "estop" or age <= LATE:
                self._wishes.put(wish)
            return
        if "keys" in message and age <= LATE:
            self._keys = Keys.of(message, self._clock.now())

    def _send(self, connection: ClientConnection, ended: threading.Event) -> None:
        """Sends whatever is shown next, and the arm's stamp ten times a second."""
        last = 0
        try:
            while True:
                with self._news:
                    self._news.wait_for(
                        lambda last=last: self._shown[0] != last or ended.is_set() or self._closing,
                        BEAT,
                    )
                    number_, status, images = self._shown
                if ended.is_set():
                    return
                if self._closing:
                    connection.close()
                    return
                message: dict[str, Any] = {"stamp": time.monotonic()}
                if number_ == last:
                    connection.send(json.dumps(message))
                    continue
                # A status, and an image of each camera that it names.
                last = number_
                connection.send(json.dumps({**message, "status": status, "cameras": list(images)}))
                for image in images.values():
                    connection.send(to_jpeg(image))
        except ConnectionClosed:
            pass
