"""What happened, as MCAP with JSON messages: Foxglove and the mcap tools open it.

Topics: ``/command`` and ``/state`` once per tick, ``/action`` once per control step, ``/event`` for changes of mode and
problems, ``/run`` once with the settings.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from pathlib import Path
from typing import Any

from mcap.writer import Writer

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
            schema = {"type": "object", "properties": properties}
            number = self._writer.register_schema(
                f"embodyrl{topic.replace('/', '.')}", "jsonschema", json.dumps(schema).encode()
            )
            self._channels[topic] = self._writer.register_channel(topic, "json", number)
        self._items: queue.SimpleQueue[tuple[str, float, dict[str, Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="log", daemon=True)
        self._thread.start()
        self.put("/run", now, {"settings": settings})

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
            self._writer.add_message(self._channels[topic], nanoseconds, json.dumps(message).encode(), nanoseconds)


def read(path: str | Path) -> dict[str, list[dict[str, Any]]]:
    """Topic -> its messages in order, each with ``stamp`` (s)."""
    from mcap.reader import make_reader

    found: dict[str, list[dict[str, Any]]] = {topic: [] for topic in _TOPICS}
    with Path(path).open("rb") as stream:
        for _, channel, message in make_reader(stream).iter_messages():
            found[channel.topic].append({**json.loads(message.data), "stamp": message.log_time / 1e9})
    return found
