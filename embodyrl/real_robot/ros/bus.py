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
    """1 or 2: how times are written."""

    def subscribe(self, topic: str, kind: str, callback: Callable[[Fields], None]) -> None:
        """Calls back, in a thread of the bus, with each message that comes; all but the newest may be left out."""
        ...

    def advertise(self, topic: str, kind: str) -> Callable[[Fields], None]:
        """What publishes on a topic without ever waiting: of messages that cannot go yet only the newest is kept."""
        ...

    def trouble(self) -> str:
        """Why nothing comes or goes any more; empty while all is well. It never mends by itself."""
        ...

    def close(self) -> None:
        """Lets go of the connection; may be called twice."""
        ...
