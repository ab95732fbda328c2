"""Topics, whichever ROS carries them.

A message is a dict of its fields as in rosbridge's protocol, but for ``uint8[]``, which are bytes;
a type is written ``package/Name``. ``rclpy_bus`` is ROS 2, ``rosbridge`` a websocket of any ROS,
and ROS 1 the same over the pipes of ``rospy_node``, a process under the Python that has rospy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from embodyrl.errors import UserError, did_you_mean

KINDS = ("ros2", "rosbridge", "ros1")
Fields = dict[str, Any]


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


def connect(kind: str, address: str = "", name: str = "embodyrl") -> Bus:
    """A bus of one of ``KINDS``.

    Args:
        kind: which.
        address: of the rosbridge server; ROS itself finds its nodes by its environment variables.
        name: of the node.

    Raises:
        UserError: an unknown kind, or it cannot be reached.
        MissingDependencyError: ROS is not installed.
    """
    if kind == "ros2":
        from embodyrl.real_robot.ros.rclpy_bus import RclpyBus

        return RclpyBus(name)
    from embodyrl.real_robot.ros import rosbridge

    if kind == "rosbridge":
        return rosbridge.RosbridgeBus(rosbridge.WebsocketWire(address or rosbridge.ADDRESS), ros=2)
    if kind == "ros1":
        return rosbridge.RosbridgeBus(rosbridge.RospyWire(name), ros=1)
    raise UserError(f"There is no transport {kind!r}. {did_you_mean(kind, KINDS)}")
