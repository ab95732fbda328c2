"""A client of the rosbridge v2 protocol (JSON), over a websocket or the pipes of a rospy node."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from websockets.exceptions import InvalidHandshake, InvalidURI, WebSocketException
from websockets.sync.client import connect

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.real_robot.parsing import MAX_BYTES, MessageError, parse_json, shown
from embodyrl.real_robot.ros.bus import Fields

ADDRESS = "ws://127.0.0.1:9090"
"""Where a rosbridge server is by default."""
STALL = 0.5
"""s that a server may take to read what it was sent."""
START = 60.0
"""s that a rospy node may take to find its master."""
PYTHONS = ("/usr/bin/python3",)
"""Interpreters that may have rospy, besides the one that ROS1_PYTHON names."""


class WireError(Exception):
    """The connection is lost; the message says why."""


class Wire(Protocol):
    """A connection that carries JSON messages. Only ``close`` never raises ``WireError``."""

    def send(self, text: str) -> None:
        """Sends a message; may wait."""
        ...

    def settle(self) -> None:
        """Waits until the other side has read what was sent."""
        ...

    def receive(self) -> str | bytes:
        """Waits for the next message."""
        ...

    def close(self) -> None:
        """Ends the connection at once, also for a thread that waits in it."""
        ...


class WebsocketWire:
    """A websocket to a rosbridge server.

    Args:
        address: ``ws://HOST:PORT``, or ``HOST:PORT``.
        timeout: s that connecting may take.

    Raises:
        UserError: no server answers there.
    """

    def __init__(self, address: str, timeout: float = 10.0) -> None:
        self.address = address if "://" in address else f"ws://{address}"
        self._open = ExitStack()
        try:
            self._connection = self._open.enter_context(
                connect(self.address, compression=None, max_size=MAX_BYTES, open_timeout=timeout)
            )
        except (OSError, InvalidHandshake, InvalidURI, TimeoutError) as error:
            raise UserError(
                f"No rosbridge server answers at {self.address} ({error}). Start one on the "
                "robot's computer (ros2 launch rosbridge_server rosbridge_websocket_launch.xml), "
                "or give its --address."
            ) from error

    def send(self, text: str) -> None:
        """See ``Wire``."""
        try:
            self._connection.send(text)
        except (OSError, WebSocketException) as error:
            raise WireError(f"the connection to rosbridge at {self.address} was lost") from error

    def settle(self) -> None:
        """See ``Wire``. The answer to a ping comes only after what was sent before was read."""
        try:
            if self._connection.ping().wait(STALL):
                return
        except (OSError, WebSocketException) as error:
            raise WireError(f"the connection to rosbridge at {self.address} was lost") from error
        raise WireError(f"rosbridge at {self.address} has not read for {STALL:g} s")

    def receive(self) -> str | bytes:
        """See ``Wire``."""
        try:
            return self._connection.recv()
        except (OSError, WebSocketException) as error:
            raise WireError(f"the connection to rosbridge at {self.address} was lost") from error

    def close(self) -> None:
        """See ``Wire``."""
        self._connection.close_socket()  # at once: a hung server would not answer a goodbye
        self._open.close()


class RospyWire:
    """The pipes of a rospy node, a process of its own, because ROS 1 has its own Python.

    Args:
        name: of the node.

    Raises:
        MissingDependencyError: no interpreter has rospy.
        UserError: there is no roscore.
    """

    def __init__(self, name: str) -> None:
        script = Path(__file__).with_name("rospy_node.py")
        # Packages on our path belong to another Python than the node's.
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        env["PYTHONPATH"] = os.environ.get("ROS1_PYTHONPATH", "")
        self._process = subprocess.Popen(
            [find_rospy(), str(script), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            start_new_session=True,  # Ctrl-C goes to the control loop alone
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        self.pid = self._process.pid
        # Its first message says whether it has found its master. A master that hangs would keep it
        # waiting for ever.
        ready, _, _ = select.select([self._stdout], [], [], START)
        line = self._stdout.readline() if ready else b'{"msg": "it said nothing for a minute"}'
        try:
            first = parse_json(line or b'{"msg": "the rospy node ended at once"}')
        except MessageError as error:
            first = {"msg": str(error)}
        if first.get("level") != "info":
            self.close()
            raise UserError(
                f"The ROS 1 node cannot start: {first.get('msg', first)}. Is roscore running?"
            )

    def send(self, text: str) -> None:
        """See ``Wire``."""
        try:
            self._stdin.write(text.encode() + b"\n")
            self._stdin.flush()
        except (OSError, ValueError) as error:
            raise WireError("the rospy node ended") from error

    def settle(self) -> None:
        """See ``Wire``. A pipe holds only a few messages, so there is nothing to wait for."""

    def receive(self) -> bytes:
        """See ``Wire``."""
        line = self._stdout.readline(MAX_BYTES + 1)
        if not line:
            raise WireError("the rospy node ended")
        return line  # ``parse_json`` refuses one that is too long

    def close(self) -> None:
        """See ``Wire``."""
        self._process.kill()
        self._process.wait()


def find_rospy() -> str:
    """The path of a Python interpreter that has rospy.

    Raises:
        MissingDependencyError: there is none.
    """
    own = os.environ.get("ROS1_PYTHON", "")
    for python in (own,) if own else PYTHONS:
        if not shutil.which(python):
            continue
        probe = subprocess.run([python, "-c", "import rospy"], capture_output=True)
        if probe.returncode == 0:
            return python
    raise MissingDependencyError(
        "No Python with rospy was found. On Debian: apt-get install python3-rospy "
        "python3-sensor-msgs python3-geometry-msgs python3-trajectory-msgs; elsewhere source ROS "
        "and set ROS1_PYTHON (and ROS1_PYTHONPATH)."
    )


class RosbridgeBus:
    """See ``Bus``. One thread reads and one writes, so a server that hangs delays no control loop.

    The next batch is sent only when the server has read the last one. Otherwise commands would pile
    up on the way to a slow server, and the arm would follow them long after. A lost connection
    stays lost, because commands that waited for a new one would be old.

    Args:
        wire: connected.
        ros: 1 or 2.
    """

    def __init__(self, wire: Wire, ros: int) -> None:
        self.ros = ros
        self._wire = wire
        self._callbacks: dict[str, list[tuple[str, Callable[[Fields], None]]]] = {}
        self._waiting: dict[str, dict[str, Any]] = {}
        self._wake = threading.Condition()
        self._closed = False
        self._trouble = ""
        for work in (self._read, self._write):
            threading.Thread(target=work, name="rosbridge", daemon=True).start()

    def subscribe(self, topic: str, kind: str, callback: Callable[[Fields], None]) -> None:
        """See ``Bus``."""
        self._callbacks.setdefault(topic, []).append((kind, callback))
        self._put(
            f"subscribe {topic}",
            {"op": "subscribe", "topic": topic, "type": kind, "queue_length": 1},
        )

    def advertise(self, topic: str, kind: str) -> Callable[[Fields], None]:
        """See ``Bus``."""
        self._put(f"advertise {topic}", {"op": "advertise", "topic": topic, "type": kind})
        return lambda fields: self._put(topic, {"op": "publish", "topic": topic, "msg": fields})

    def trouble(self) -> str:
        """See ``Bus``."""
        return self._trouble

    def close(self) -> None:
        """See ``Bus``."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._wire.close()

    def _put(self, key: str, message: dict[str, Any]) -> None:
        with self._wake:
            self._waiting[key] = message
            self._wake.notify()

    def _write(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                # Take the newest message of each topic.
                batch = list(self._waiting.values())
                self._waiting = {}
            try:
                for message in batch:
                    self._wire.send(json.dumps(message, default=to_base64))
                self._wire.settle()
            except WireError as error:
                return self._fail(str(error))
            except Exception as error:  # whatever ends this thread is a lost link
                return self._fail(
                    f"a message cannot be sent to rosbridge ({type(error).__name__}: {error})"
                )

    def _read(self) -> None:
        while not self._closed:
            try:
                self._hear(parse_json(self._wire.receive()))
            except WireError as error:
                return self._fail(str(error))
            except Exception as error:  # whatever ends this thread is a lost link
                return self._fail(
                    f"rosbridge sent what is not understood ({type(error).__name__}: {error})"
                )

    def _hear(self, message: dict[str, Any]) -> None:
        if message.get("op") == "publish":
            fields = message.get("msg")
            if not isinstance(fields, dict):
                raise MessageError(f"the message on {shown(message.get('topic'))} is no map")
            for kind, callback in self._callbacks.get(str(message.get("topic")), ()):
                callback(from_json(kind, fields))
        elif message.get("op") == "status" and message.get("level") == "error":
            self._fail(f"rosbridge says: {str(message.get('msg'))[:300]}")

    def _fail(self, why: str) -> None:
        self._trouble = self._trouble or ("" if self._closed else why)


def to_base64(value: Any) -> str:
    """Encodes bytes for JSON; the ``default`` of ``json.dumps``."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"A message cannot hold a {type(value).__name__}.")


def from_json(kind: str, fields: Fields) -> Fields:
    """The fields of a message of type ``kind``, with its bytes decoded from base64.

    Raises:
        MessageError: an image whose data are not base64.
    """
    if kind not in ("sensor_msgs/Image", "sensor_msgs/CompressedImage"):
        return fields
    try:
        return {**fields, "data": base64.b64decode(fields["data"])}
    except (KeyError, TypeError, ValueError) as error:
        raise MessageError("the data of a picture are not base64") from error
