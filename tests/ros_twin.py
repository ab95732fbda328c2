"""A twin as a node in a process of its own, whose faults the tests ask for by signals.

SIGUSR1: from now on its clock is three seconds ahead. SIGUSR2: its cameras fall silent. SIGHUP: all is well again.

    python ros_twin.py ros2|ros1|rosbridge TASK
"""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

from embodyrl.real_robot.ros import twin_node
from embodyrl.real_robot.ros.bus import connect
from embodyrl.real_robot.ros.config import PRESETS
from embodyrl.real_robot.ros.rosbridge_server import RosbridgeServer
from embodyrl.real_robot.twin import MujocoTwin
from embodyrl.sims.mujoco.env import Config


class FaultyTime:
    """The module ``time``, with a wall clock that can be wrong."""

    ahead = 0.0
    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    def time(self) -> float:
        return time.time() + self.ahead


class FaultyNode(twin_node.TwinNode):
    mute = False

    def _publish_scene(self, init: int) -> None:
        cameras = self._cameras
        self._cameras = {} if self.mute else cameras
        super()._publish_scene(init)
        self._cameras = cameras


def main(kind: str, task: str) -> None:
    clock: Any = FaultyTime()
    twin_node.time = clock
    bus = RosbridgeServer(0) if kind == "rosbridge" else connect(kind, name="embodyrl_twin")
    twin = MujocoTwin(Config(task=task, image_size=32, split="eval"))
    node = FaultyNode(twin, bus, PRESETS["twin"])
    signal.signal(signal.SIGUSR1, lambda *_: setattr(clock, "ahead", 3.0))
    signal.signal(signal.SIGUSR2, lambda *_: setattr(node, "mute", True))
    signal.signal(signal.SIGHUP, lambda *_: (setattr(clock, "ahead", 0.0), setattr(node, "mute", False)))
    print("ready", getattr(bus, "port", 0), flush=True)
    node.run()
    print("ended", bus.trouble(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
