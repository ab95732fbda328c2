"""A rosbridge v2 server without ROS, so that the twin can be driven like a robot with rosbridge.

It carries topics between its clients and its own process, where the twin is. It speaks the topic
operations of the protocol in JSON (subscribe, unsubscribe, advertise, unadvertise, publish,
status) and listens on this machine only. Web pages are refused, as ``ports`` says.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection

from embodyrl.errors import UserError
from embodyrl.real_robot.parsing import MessageError, parse_json, shown, text
from embodyrl.real_robot.ports import listen, peer
from embodyrl.real_robot.ros import rosbridge
from embodyrl.real_robot.ros.bus import Fields

PORT = 9090
MAX_TOPICS = 1000
"""Largest number of topics that clients may subscribe to."""
log = logging.getLogger(__name__)


class RosbridgeServer:
    """The server; for its own process it is a ``Bus``.

    Args:
        port: where it listens; 0 takes a free port.

    Raises:
        UserError: the port is in use.
    """

    ros = 2

    def __init__(self, port: int = PORT) -> None:
        self._lock = threading.Lock()
        self._clients: dict[str, set[_Client]] = {}
        self._callbacks: dict[str, list[tuple[str, Callable[[Fields], None]]]] = {}
        self._server = listen(
            self._talk, "127.0.0.1", port, what="The rosbridge server", max_queue=1
        )
        self.port = int(self._server.socket.getsockname()[1])
        threading.Thread(
            target=self._server.serve_forever, name="rosbridge server", daemon=True
        ).start()

    def subscribe(self, topic: str, kind: str, callback: Callable[[Fields], None]) -> None:
        """See ``Bus``."""
        self._callbacks.setdefault(topic, []).append((kind, callback))

    def advertise(self, topic: str, kind: str) -> Callable[[Fields], None]:
        """See ``Bus``."""
        return lambda message: self._spread(topic, message)

    def trouble(self) -> str:
        """See ``Bus``."""
        return ""

    def close(self) -> None:
        """See ``Bus``."""
        self._server.shutdown()

    def _spread(self, topic: str, message: Fields) -> None:
        # Encoded once, and handed to each client, which sends it in a thread of its own.
        with self._lock:
            clients = list(self._clients.get(topic, ()))
        if clients:
            text = json.dumps(
                {"op": "publish", "topic": topic, "msg": message}, default=rosbridge.to_base64
            )
            for client in clients:
                client.put(topic, text)

    def _talk(self, connection: ServerConnection) -> None:
        client = _Client(connection)
        try:
            while True:
                data = connection.recv()
                # A bad request is answered by its error, as rosbridge does; the client stays.
                try:
                    self._obey(client, parse_json(data))
                except UserError as error:
                    self._tell_error(connection, str(error))
                except Exception as error:
                    log.exception("A message of %s was not understood.", peer(connection))
                    self._tell_error(connection, f"not understood ({type(error).__name__})")
        except ConnectionClosed:
            pass
        finally:
            with self._lock:
                for clients in self._clients.values():
                    clients.discard(client)
            client.close()

    @staticmethod
    def _tell_error(connection: ServerConnection, why: str) -> None:
        connection.send(json.dumps({"op": "status", "level": "error", "msg": why}))

    def _obey(self, client: _Client, request: dict[str, Any]) -> None:
        """Does what a client asks for.

        Raises:
            MessageError: it is no request.
        """
        op = request.get("op")
        topic = text(request.get("topic"), "a topic")
        if op == "publish":
            message = request.get("msg")
            if not isinstance(message, dict):
                raise MessageError(f"the message on {shown(topic)} is no map")
            for kind, callback in self._callbacks.get(topic, ()):
                callback(rosbridge.from_json(kind, message))
            self._spread(topic, message)
        elif op in ("subscribe", "unsubscribe"):
            with self._lock:
                if topic not in self._clients and len(self._clients) >= MAX_TOPICS:
                    raise MessageError(f"there are {MAX_TOPICS} topics already")
                clients = self._clients.setdefault(topic, set())
                clients.add(client) if op == "subscribe" else clients.discard(client)
        elif op not in ("advertise", "unadvertise"):
            raise MessageError(f"there is no operation {shown(op)}")


class _Client:
    """One client. If it reads slowly, only the newest message of each topic waits for it."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection
        self._waiting = {}
        self._wake = threading.Condition()
        self._closed = False
        threading.Thread(target=self._work, name="rosbridge client", daemon=True).start()

    def put(self, topic: str, text: str) -> None:
        with self._wake:
            self._waiting[topic] = text
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                batch = list(self._waiting.values())
                self._waiting = {}
            try:
                for text in batch:
                    self._connection.send(text)
            except (ConnectionClosed, OSError):
                return
