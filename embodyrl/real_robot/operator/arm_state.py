"""What the page of several arms knows of one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from websockets.sync.server import ServerConnection

from embodyrl.real_robot.control.operator import WISHES
from embodyrl.real_robot.parsing import MAX_TEXT, MessageError, check_depth, text


@dataclass
class ArmState:
    """What the page knows of one arm.

    Attributes:
        name: of the arm.
        connection: to it; None while the link is lost.
        status: that it showed last.
        images: camera -> JPEG.
        version: changes with the images.
        shown_at: when it last showed something new, by this machine's monotonic clock.
        asks: why it needs a person; empty while it needs none.
        since: when it began to ask.
        stamp: of its last message on this connection, by its own clock; 0 before the first.
        stop: a stop that it could not be told.
    """

    name: str
    connection: ServerConnection | None = None
    status: dict[str, Any] = field(default_factory=dict)
    images: dict[str, bytes] = field(default_factory=dict)
    version: int = 0
    shown_at: float = 0.0
    asks: str = ""
    since: float = 0.0
    stamp: float = 0.0
    stop: bool = False

    def note_asks(self, why: str, now: float) -> None:
        """Notes that it asks, or no longer does; the time counts from when it began."""
        if why and not self.asks:
            self.since = now
        self.asks = why

    def row(self, now: float) -> dict[str, Any]:
        """What the page shows of the self."""
        empty = {"mode": "lost", "reason": "", "task": "", "open": True, "can": [], "numbers": {}}
        return {
            **empty,
            "events": [],
            **self.status,
            "name": self.name,
            "linked": self.connection is not None and self.stamp > 0.0,
            "age": now - self.shown_at,
            "asks": self.asks,
            "waits": now - self.since if self.asks else 0.0,
        }


def check_status(status: dict[str, Any]) -> dict[str, Any]:
    """What an arm shows, field by field; what the page does not show is left out.

    Raises:
        MessageError: a field is not as it must be.
    """
    check_depth(status, 4)
    numbers = status.get("numbers", {})
    events = status.get("events", [])
    can = status.get("can", [])
    if not isinstance(numbers, dict) or len(numbers) > 32:
        raise MessageError("numbers must be a map of at most 32")
    if not isinstance(events, list) or len(events) > 100 or not isinstance(can, list):
        raise MessageError("events and can must be lists, of at most 100 events")
    return {
        "mode": text(status.get("mode"), "mode", 16),
        "reason": _cut(status.get("reason"), "reason"),
        "asks": _cut(status.get("asks", ""), "asks"),
        "task": text(status.get("task", ""), "task"),
        "open": status.get("open") is True,
        "can": [wish for wish in WISHES if wish in can],
        "numbers": {
            text(k, "a number's name", 64): text(v, "a number", 64) for k, v in numbers.items()
        },
        "events": [_cut(event, "an event") for event in events],
    }


def _cut(value: Any, what: str) -> str:
    """A text that may quote a long error, cut to what is shown."""
    return text(value[:MAX_TEXT] if isinstance(value, str) else value, what)
