"""Opens the bus of a transport: ROS 2, ROS 1 or a rosbridge server.

``rclpy_bus`` is ROS 2. ``rosbridge`` is a websocket to any ROS. ROS 1 speaks the same protocol
over the pipes of ``rospy_node``, a process under the Python that has rospy.
"""

from __future__ import annotations

from embodyrl.errors import UserError, did_you_mean
from embodyrl.real_robot.ros.bus import Bus

KINDS = ("ros2", "rosbridge", "ros1")


def connect(kind: str, address: str = "", name: str = "embodyrl") -> Bus:
    """Connects to ROS by one of the transports ``KINDS``.

    Args:
        kind: the transport.
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
