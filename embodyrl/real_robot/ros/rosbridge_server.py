"""A rosbridge v2 server without ROS, so that the twin can be driven like a robot with rosbridge.

It carries topics between its clients and its own process, where the twin is. It speaks the topic
operations of the protocol in JSON (subscribe, unsubscribe, advertise, unadvertise, publish,
status) and listens on this machine only.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from embodyrl.errors import UserError
from embodyrl.real_robot.ros import rosbridge
from embodyrl.real_robot.ros.bus import Fields

PORT = 9090


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
        try:
            self._server = serve(
                self._talk,
                "127.0.0.1",
                port,
                compression=None,
                max_size=rosbridge.MAX_BYTES,
                max_queue=1,
            )
        except OSError as error:
            raise UserError(
                f"The rosbridge server cannot listen at port {port} ({error.strerror})."
            ) from error
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
                    self._obey(client, json.loads(data))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    text = f"{type(error).__name__}: {error}"
                    connection.send(json.dumps({"op": "status", "level": "error", "msg": text}))
        except ConnectionClosed:
            pass
        finally:
            with self._lock:
                for clients in self._clients.values():
                    clients.discard(client)
            client.close()

    def _obey(self, client: _Client, request: dict[str, Any]) -> None:
        op = request["op"]
        topic = str(request["topic"])
        if op == "publish":
            message = request["msg"]
            for kind, callback in self._callbacks.get(topic, ()):
                callback(rosbridge.from_json(kind, message))
            self._spread(topic, message)
        elif op in ("subscribe", "unsubscribe"):
            with self._lock:
                clients = self._clients.setdefault(topic, set())
                clients.add(client) if op == "subscribe" else clients.discard(client)
        elif op not in ("advertise", "unadvertise"):
            raise ValueError(f"unknown operation {op}")


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
