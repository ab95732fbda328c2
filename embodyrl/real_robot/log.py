"""What happened, as MCAP with JSON messages: Foxglove and the mcap tools open it.

Topics: ``/command`` and ``/state`` once per tick, ``/action`` once per control step, ``/event`` for changes of mode and
problems, ``/run`` once with the settings, ``/episode`` once with the outcome. A recorded run has what the policy would
see before each action, too: ``proprio`` and ``prompt`` of ``/action``, and pictures as ``foxglove.CompressedImage``.
"""

from __future__ import annotations

import base64
import io
import json
import queue
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from mcap.writer import Writer
from numpy.typing import NDArray

from embodyrl.real_robot.messages import Command, RobotState

_NUMBERS = {"type": "array", "items": {"type": "number"}}
_TOPICS: dict[str, dict[str, Any]] = {
    "/command": {
        "q": _NUMBERS,
        "dq": _NUMBERS,
        "ddq": _NUMBERS,
        "width": {"type": "number"},
        "mode": {"type": "string"},
    },
    "/state": {"q": _NUMBERS, "dq": _NUMBERS, "width": {"type": "number"}, "reflex": {"type": "string"}},
    "/action": {"action": _NUMBERS, "human": {"type": "boolean"}},
    "/event": {"kind": {"type": "string"}, "text": {"type": "string"}},
    "/run": {"settings": {"type": "object"}},
    "/episode": {"solved": {"type": "boolean"}, "reason": {"type": "string"}},
}
CAMERA = "/camera/"
_IMAGE = {
    "timestamp": {"type": "object", "title": "time", "properties": {x: {"type": "integer"} for x in ("sec", "nsec")}},
    "frame_id": {"type": "string"},
    "data": {"type": "string", "contentEncoding": "base64"},
    "format": {"type": "string"},
}


class RunLog:
    """Writes in a thread of its own, so that the ticker never waits for a disk.

    Args:
        path: the file; an existing one is replaced.
        settings: JSON data, the first message.
        now: of the clock that stamps come from.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any], now: float) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._offset = time.time() - now
        self._stream = self.path.open("wb")
        self._writer = Writer(self._stream)
        self._writer.start(library="embodyrl")
        self._channels = {}
        for topic, properties in _TOPICS.items():
            self._register(topic, f"embodyrl{topic.replace('/', '.')}", properties)
        self._items: queue.SimpleQueue[tuple[str, float, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="log", daemon=True)
        self._thread.start()
        self.put("/run", now, {"settings": settings})

    def _register(self, topic: str, name: str, properties: dict[str, Any]) -> None:
        schema = json.dumps({"title": name, "type": "object", "properties": properties}).encode()
        number = self._writer.register_schema(name, "jsonschema", schema)
        self._channels[topic] = self._writer.register_channel(topic, "json", number)

    def put(self, topic: str, stamp: float, message: dict[str, Any]) -> None:
        """A message of plain JSON data."""
        self._items.put((topic, stamp, message))

    def tick(self, command: Command, state: RobotState) -> None:
        """What was measured and what was sent."""
        self.put(
            "/state",
            command.stamp,
            {"q": state.q.tolist(), "dq": state.dq.tolist(), "width": state.width, "reflex": state.reflex},
        )
        motion = {"q": command.q.tolist(), "dq": command.dq.tolist(), "ddq": command.ddq.tolist()}
        self.put("/command", command.stamp, {**motion, "width": command.width, "mode": str(command.mode)})

    def action(
        self, stamp: float, action: NDArray[np.float32], human: bool, seen: dict[str, Any] | None = None
    ) -> None:
        """An action that was taken, whether a person took it, and what was ``seen`` before (``Robot.observe``)."""
        said: dict[str, Any] = {"action": action.tolist(), "human": human}
        if seen is not None:
            said |= {"proprio": seen["proprio"].tolist(), "prompt": seen["prompt"]}
            for name, image in seen["images"].items():
                self._items.put((CAMERA + name, stamp, image))
        self.put("/action", stamp, said)

    def event(self, stamp: float, kind: str, text: str) -> None:
        """A change of mode, a refused chunk, ..."""
        self.put("/event", stamp, {"kind": kind, "text": text})

    def close(self) -> None:
        """Writes what is left and ends the file."""
        self._items.put(None)
        self._thread.join()
        self._writer.finish()
        self._stream.close()

    def _work(self) -> None:
        while (item := self._items.get()) is not None:
            topic, stamp, message = item
            nanoseconds = int((stamp + self._offset) * 1e9)
            if topic.startswith(CAMERA):
                if topic not in self._channels:
                    self._register(topic, "foxglove.CompressedImage", _IMAGE)
                message = _image(message, nanoseconds, topic.removeprefix(CAMERA))
            self._writer.add_message(self._channels[topic], nanoseconds, json.dumps(message).encode(), nanoseconds)


def _image(image: NDArray[np.uint8], nanoseconds: int, camera: str) -> dict[str, Any]:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG", compress_level=1)
    stamp = {"sec": nanoseconds // 10**9, "nsec": nanoseconds % 10**9}
    return {"timestamp": stamp, "frame_id": camera, "format": "png", "data": base64.b64encode(out.getvalue()).decode()}


def picture(message: dict[str, Any]) -> NDArray[np.uint8]:
    """(h, w, 3) of a camera's message."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(base64.b64decode(message["data"]))).convert("RGB"))


def read(path: str | Path) -> dict[str, list[dict[str, Any]]]:
    """Topic -> its messages in order, each with ``stamp`` (s)."""
    from mcap.reader import make_reader

    found: dict[str, list[dict[str, Any]]] = {topic: [] for topic in _TOPICS}
    with Path(path).open("rb") as stream:
        for _, channel, message in make_reader(stream).iter_messages():
            found.setdefault(channel.topic, []).append({**json.loads(message.data), "stamp": message.log_time / 1e9})
    return found
