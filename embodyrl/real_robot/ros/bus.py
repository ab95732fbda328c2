"""What every bus of ROS topics can do, whichever ROS carries them; ``connect_bus`` opens one.

A message is a dict of its fields, as in rosbridge's protocol, except that ``uint8[]`` are bytes.
A message type is written ``package/Name``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Fields = dict[str, Any]
"""A message: the name of each field -> its value."""


class Bus(Protocol):
    """Publishes and subscribes."""

    ros: int
    """1 or 2: the ROS whose field names times have."""

    def subscribe(self, topic: str, kind: str, callback: Callable[[Fields], None]) -> None:
        """Calls back with the messages that come, in a thread of the bus.

        When they come faster than they are handled, only the newest is sure to be handled.
        """
        ...

    def advertise(self, topic: str, kind: str) -> Callable[[Fields], None]:
        """A function that publishes on a topic and never waits.

        Of messages that cannot be sent yet, only the newest is kept.
        """
        ...

    def trouble(self) -> str:
        """Why the connection is lost; empty while all is well. A lost connection stays lost."""
        ...

    def close(self) -> None:
        """Ends the connection; may be called twice."""
        ...
