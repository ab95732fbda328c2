"""The log of an episode: MCAP with ROS 2's standard messages.

``ros2 bag``, Foxglove, PlotJuggler and rosbags can open it. Its topics:

    /run                       once: the settings, as JSON
    /episode                   once: the outcome, as JSON
    /state                     each tick: what was measured, stamped when it was measured
    /command                   each tick: what was sent; with /command/acceleration
    /action                    each control step: the action
    /proprio, /camera/NAME     each control step of a recorded run: what the policy saw before it
    /depth/NAME                the same step: depth in mm of what /camera/NAME shows
    /event                     changes of mode, and problems
    /mode, /reflex             when they change, before the first state and command they hold for
    /human, /recovery, /prompt when they change, before the first action they hold for
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mcap.reader import make_reader
from mcap.records import Schema
from mcap_ros2.decoder import DecoderFactory
from mcap_ros2.writer import Writer
from numpy.typing import NDArray

from embodyrl.errors import UserError
from embodyrl.real_robot.control.messages import Command, RobotState
from embodyrl.real_robot.images import to_png
from embodyrl.real_robot.parsing import MessageError, parse_json
from embodyrl.real_robot.ros import fields
from embodyrl.real_robot.ros.message_definitions import definition
from embodyrl.storage.paths import explain_os_error, no_access

CAMERA = "/camera/"
DEPTH = "/depth/"
_BY_PREFIX = {CAMERA: "sensor_msgs/CompressedImage", DEPTH: "sensor_msgs/Image"}
_TYPES = {
    "/state": "sensor_msgs/JointState",
    "/command": "sensor_msgs/JointState",
    "/command/acceleration": "std_msgs/Float64MultiArray",
    "/action": "std_msgs/Float32MultiArray",
    "/proprio": "std_msgs/Float32MultiArray",
    "/event": "rcl_interfaces/Log",
    "/run": "std_msgs/String",
    "/episode": "std_msgs/String",
    "/mode": "std_msgs/String",
    "/reflex": "std_msgs/String",
    "/human": "std_msgs/Bool",
    "/recovery": "std_msgs/Bool",
    "/prompt": "std_msgs/String",
}
_LATCHED = ("/mode", "/reflex", "/human", "/recovery", "/prompt")
"""Topics whose value holds until the next message."""
_READ = ("/state", "/command", "/action", "/event", "/run", "/episode")
"""Topics that ``read`` always returns."""
# Levels of ``rcl_interfaces/Log``.
_INFO = 20
_WARN = 30
_CHUNK = 2**16
"""Bytes written at once. A program that is killed loses that much: less than a second of ticks."""


class RunLog:
    """Writes in a thread of its own, so that the ticker never waits for a disk.

    Args:
        path: of the file; an existing one is replaced.
        settings: JSON data, the first message.
        now: s, of the clock that makes the stamps.
        robot: prefix of the joints' names, as in the robot's URDF.
        motors: names of the joints of an arm without a URDF, whose gripper is one of them.
    """

    def __init__(
        self,
        path: str | Path,
        settings: dict[str, Any],
        now: float,
        robot: str = "fr3",
        motors: Sequence[str] = (),
    ) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        joints = (f"{robot}_joint", range(1, 8))
        fingers = (f"{robot}_finger_joint", (1, 2))
        franka = [f"{name}{k}" for name, numbers in (joints, fingers) for k in numbers]
        self._names = [*motors] or franka
        self._fingers = 0 if motors else 2
        self._offset = time.time() - now  # from stamps to the time of day
        self._stream = self.path.open("wb")
        self._writer = Writer(self._stream, chunk_size=_CHUNK)
        self._schemas: dict[str, Schema] = {}
        self._latest: dict[str, Any] = {}
        self._error: Exception | None = None
        self._items: queue.SimpleQueue[
            tuple[Callable[..., None], float, tuple[Any, ...]] | None
        ] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="log", daemon=True)
        self._thread.start()
        self.put("/run", now, {"settings": settings})

    def put(self, topic: str, stamp: float, message: dict[str, Any]) -> None:
        """Logs plain JSON data: ``/run`` or ``/episode``."""
        self._items.put((self._json, stamp, (topic, message)))

    def tick(self, command: Command, state: RobotState) -> None:
        """Logs what was measured and what was sent."""
        self._items.put((self._tick, command.stamp, (command, state)))

    def action(
        self,
        stamp: float,
        action: NDArray[np.float32],
        human: bool,
        seen: dict[str, Any] | None = None,
        *,
        recovery: bool = False,
    ) -> None:
        """Logs an action.

        Args:
            stamp: s, when it was taken.
            action: (A,).
            human: whether a person took it.
            seen: what the policy saw before it (``Robot.observe``).
            recovery: whether it went back the way that the hand came.
        """
        proprio = [] if seen is None else seen["proprio"].tolist()
        what = (action.tolist(), human, recovery, proprio, seen)
        self._items.put((self._action, stamp, what))

    def event(self, stamp: float, kind: str, text: str) -> None:
        """Logs a change of mode (``kind`` is "mode") or a problem."""
        self._items.put((self._event, stamp, (kind, text)))

    @property
    def failed(self) -> bool:
        """Whether something could not be written; ``close`` then says why."""
        return self._error is not None

    def close(self) -> None:
        """Writes what is left and closes the file.

        Raises:
            UserError: the log could not be written.
        """
        # The thread ends when it comes to the None.
        self._items.put(None)
        self._thread.join()
        try:
            if self._error is None:
                self._writer.finish()
            self._stream.close()
        except OSError as error:
            self._error = error
        if self._error is not None:
            os_error = isinstance(self._error, OSError) and explain_os_error(self._error, self.path)
            raise UserError(
                f"The log {self.path} could not be written: {os_error or self._error}"
            ) from self._error

    def _work(self) -> None:
        while (item := self._items.get()) is not None:
            write, stamp, what = item
            if self._error is not None:
                continue  # after an error the rest is dropped, so that memory does not fill up
            try:
                write(stamp, *what)
                self._stream.flush()
            except Exception as error:  # e.g. a full disk; ``close`` reports it
                self._error = error

    def _write(self, topic: str, stamp: float, message: dict[str, Any]) -> None:
        """Writes one message; the first of its type also writes the type's definition."""
        of_camera = (kind for prefix, kind in _BY_PREFIX.items() if topic.startswith(prefix))
        kind = next(of_camera, None) or _TYPES[topic]
        if kind not in self._schemas:
            self._schemas[kind] = self._writer.register_msgdef(
                kind.replace("/", "/msg/"), definition(kind)
            )
        self._writer.write_message(
            topic, self._schemas[kind], message, log_time=round((stamp + self._offset) * 1e9)
        )

    def _time(self, stamp: float) -> dict[str, int]:
        return fields.time_fields(stamp + self._offset, ros=2)

    def _json(self, stamp: float, topic: str, message: dict[str, Any]) -> None:
        self._write(topic, stamp, {"data": json.dumps(message)})

    def _write_if_changed(self, topic: str, stamp: float, value: Any) -> None:
        if self._latest.get(topic) != value:
            self._latest[topic] = value
            self._write(topic, stamp, {"data": value})

    def _tick(self, stamp: float, command: Command, state: RobotState) -> None:
        self._write_if_changed("/reflex", stamp, state.reflex)
        self._write_if_changed("/mode", stamp, str(command.mode))
        for topic, motion in (("/state", state), ("/command", command)):
            fingers = [motion.width / 2] * self._fingers
            message = {
                "header": {"stamp": self._time(motion.stamp)},
                "name": self._names,
                "position": [*motion.q.tolist(), *fingers],
                "velocity": [*motion.dq.tolist(), *[np.nan] * self._fingers],  # unknown for fingers
            }
            self._write(topic, stamp, message)
        self._write("/command/acceleration", stamp, {"data": command.ddq.tolist()})

    def _action(
        self,
        stamp: float,
        action: list[float],
        human: bool,
        recovery: bool,
        proprio: list[float],
        seen: dict[str, Any] | None,
    ) -> None:
        self._write_if_changed("/human", stamp, human)
        self._write_if_changed("/recovery", stamp, recovery)
        self._write("/action", stamp, {"data": action})
        if seen is None:
            return
        self._write_if_changed("/prompt", stamp, seen["prompt"])
        self._write("/proprio", stamp, {"data": proprio})
        for name, image in seen["images"].items():
            header = {"stamp": self._time(stamp), "frame_id": name}
            message = {"header": header, "format": "png", "data": to_png(image)}
            self._write(CAMERA + name, stamp, message)
        for name, depth in seen.get("depth", {}).items():
            self._write(DEPTH + name, stamp, fields.depth_fields(depth, stamp + self._offset))

    def _event(self, stamp: float, kind: str, text: str) -> None:
        level = _INFO if kind == "mode" else _WARN
        self._write(
            "/event", stamp, {"stamp": self._time(stamp), "level": level, "name": kind, "msg": text}
        )


def logged_picture(message: dict[str, Any]) -> NDArray[np.uint8]:
    """The image (h, w, 3) of a camera's message."""
    return fields.picture(message)


def read(path: str | Path) -> dict[str, list[dict[str, Any]]]:
    """Reads a log.

    Returns:
        Topic -> its messages in order, as dicts. Each has ``stamp`` (s), and besides:

        - ``/state``: ``q``, ``dq``, ``width`` and ``reflex``;
        - ``/command``: ``q``, ``dq``, ``ddq``, ``width`` and ``mode``;
        - ``/action``: ``action``, ``human`` and ``recovery``, in a recorded run also ``proprio``
          and ``prompt``;
        - ``/event``: ``kind`` and ``text``;
        - ``/camera/NAME``: what ``logged_picture`` takes;
        - ``/depth/NAME``: ``depth``, (h, w) uint16 mm.

    Raises:
        UserError: the file is not a log, is one of an earlier version, or is not complete.
    """
    found: dict[str, list[dict[str, Any]]] = {topic: [] for topic in _READ}
    latest: dict[str, Any] = {}
    try:
        with Path(path).open("rb") as stream:
            # With checksums: a flipped bit must not become another action in a data set.
            reader = make_reader(stream, validate_crcs=True, decoder_factories=[DecoderFactory()])
            if reader.get_header().profile != "ros2":
                raise UserError(
                    f"{path} holds no ROS 2 messages: logs were JSON in an earlier version, and "
                    "are not read any more."
                )
            for _, channel, message, ros in reader.iter_decoded_messages(log_time_order=False):
                _sort_in(found, latest, channel.topic, message.log_time / 1e9, ros)
    except MessageError as error:
        raise UserError(f"{path} is no log of a run: {error}.") from error
    except UserError:
        raise
    except OSError as error:
        raise no_access(error, path) from error
    except Exception as error:  # the reader of damaged bytes raises many kinds
        raise UserError(
            f"{path} is no whole log ({type(error).__name__}: {str(error)[:200]}). If its program "
            f"was killed, take the log out of the folder, or try: mcap recover {path} -o FILE"
        ) from error
    if not found["/run"]:
        raise UserError(f"{path} is no log of a run: it has no /run.")
    return found


def outcome(path: str | Path) -> dict[str, Any]:
    """How the episode of a log ended (``/episode``); reads no more than that and ``/run``.

    Of the settings it has ``init``, and ``asked``, whether a person had to make the scene ready
    because a reset had failed.

    Raises:
        UserError: the file is no whole log.
    """
    try:
        with Path(path).open("rb") as stream:
            reader = make_reader(stream, decoder_factories=[DecoderFactory()])
            found: dict[str, Any] = {}
            for _, channel, _, message in reader.iter_decoded_messages(topics=["/run", "/episode"]):
                found[channel.topic] = parse_json(message.data)
            settings = found["/run"]["settings"]
            known = {"init": settings.get("init"), "asked": settings.get("asked", False)}
            return {**known, **found["/episode"]}
    except OSError as error:
        raise no_access(error, path) from error
    except Exception as error:  # as in ``read``
        raise UserError(
            f"{path} is no whole log ({type(error).__name__}: {str(error)[:200]}). Bring back a "
            "copy of it, or take it out of the folder."
        ) from error


def _sort_in(
    found: dict[str, list[dict[str, Any]]],
    latest: dict[str, Any],
    topic: str,
    stamp: float,
    ros: Any,
) -> None:
    """Adds one message to what ``read`` returns.

    Args:
        found: what was read so far.
        latest: the latest value of each latched topic.
        topic: of the message.
        stamp: s.
        ros: the message.
    """
    # Accelerations and proprio have messages of their own, right after what they belong to.
    if topic in _LATCHED:
        latest[topic] = ros.data
    elif topic == "/command/acceleration":
        found["/command"][-1]["ddq"] = ros.data
    elif topic == "/proprio":
        found["/action"][-1] |= {"proprio": ros.data, "prompt": latest["/prompt"]}
    else:
        found.setdefault(topic, []).append(_plain(topic, ros, latest) | {"stamp": stamp})


def _plain(topic: str, ros: Any, latest: dict[str, Any]) -> dict[str, Any]:
    """A message as a dict, with the latched values that hold for it."""
    if topic in ("/state", "/command"):
        # The last two joints of a Franka are the fingers.
        arm = len(ros.name) - sum("_finger_joint" in name for name in ros.name)
        width = sum(ros.position[arm:])
        motion = {"q": ros.position[:arm], "dq": ros.velocity[:arm], "width": width}
        if topic == "/state":
            return motion | {"reflex": latest["/reflex"]}
        return motion | {"mode": latest["/mode"]}
    if topic == "/action":
        # Older logs do not say that an action went back.
        recovery = latest.get("/recovery", False)
        return {"action": ros.data, "human": latest["/human"], "recovery": recovery}
    if topic == "/event":
        return {"kind": ros.name, "text": ros.msg}
    if topic.startswith(CAMERA):
        return {"format": ros.format, "data": ros.data}
    if topic.startswith(DEPTH):
        names = ("encoding", "height", "width", "data")
        return {"depth": fields.depth_map({name: getattr(ros, name) for name in names})}
    return parse_json(ros.data)
