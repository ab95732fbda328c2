"""``embodyrl twin``: plays a simulated arm as a ROS node, for ``embodyrl deploy`` to drive."""

from __future__ import annotations

from collections.abc import Sequence

from embodyrl.errors import UserError
from embodyrl.real_robot.commands.signals import sigterm_is_ctrl_c


def run_twin(
    path: str, overrides: Sequence[str] = (), *, transport: str = "ros2", port: int = 0
) -> None:
    """Plays a simulated arm in the environment that a checkpoint was trained in.

    It returns when it is interrupted.

    Args:
        path: a checkpoint, or a run's folder.
        overrides: of its config.
        transport: ``"ros2"``, ``"ros1"``, or ``"rosbridge"``, whose server then runs here as well.
        port: of that server; 0 takes a free one.

    Raises:
        UserError: the task is not one of the twin's, or the connection failed.
    """
    from embodyrl.real_robot.ros.config import PRESETS
    from embodyrl.real_robot.ros.connect_bus import connect
    from embodyrl.real_robot.ros.rosbridge_server import RosbridgeServer
    from embodyrl.real_robot.twin.config import twin_config
    from embodyrl.real_robot.twin.mujoco_twin import MujocoTwin
    from embodyrl.real_robot.twin.ros_node import TwinNode

    config = twin_config(path, overrides)
    sigterm_is_ctrl_c()
    if transport == "rosbridge":
        bus = RosbridgeServer(port)
    else:
        bus = connect(transport, name="embodyrl_twin")
    try:
        twin = MujocoTwin(config)
        try:
            node = TwinNode(twin, bus, PRESETS["twin"])
            at = f" at ws://127.0.0.1:{bus.port}" if isinstance(bus, RosbridgeServer) else ""
            print(f"The twin of {twin.spec.name} is on {transport}{at}. Ctrl-C stops.", flush=True)
            node.run()
        finally:
            twin.close()
        if why := bus.trouble():
            raise UserError(f"The twin stopped: {why}.")
    finally:
        bus.close()
