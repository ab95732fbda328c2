"""A twin as a node in a process of its own, whose faults the tests ask for by signals.

SIGUSR1: from now on its clock is three seconds ahead. SIGUSR2: its cameras fall silent. The real-time signals: its
joint states (0) stand still with fresh stamps, (1) are 1.6 s old, (2) are not numbers. SIGHUP: all is well again.

    python ros_twin.py ros2|ros1|rosbridge TASK
"""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

from embodyrl.real_robot.ros import fields, twin_node
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


STATE_FAULTS = {signal.SIGRTMIN: "frozen", signal.SIGRTMIN + 1: "late", signal.SIGRTMIN + 2: "not finite"}


class FaultyNode(twin_node.TwinNode):
    mute, wrong = False, ""

    def _publish_state(self) -> None:
        data, topics = self._twin.data, self._topics
        if self.wrong != "frozen":
            self._kept = data.qpos[:9].copy(), data.qvel[:9].copy()
        q, dq = self._kept
        q = q * float("nan") if self.wrong == "not finite" else q
        stamp = time.time() + FaultyTime.ahead - (1.6 if self.wrong == "late" else 0.0)
        self._states(fields.joint_state((*topics.joints, *topics.fingers), q, dq, stamp, self._bus.ros))

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
    signal.signal(signal.SIGUSR1, lambda *_: setattr(FaultyTime, "ahead", 3.0))
    signal.signal(signal.SIGUSR2, lambda *_: setattr(node, "mute", True))
    for number in STATE_FAULTS:
        signal.signal(number, lambda n, _: setattr(node, "wrong", STATE_FAULTS[n]))  # type: ignore[arg-type]
    well = lambda *_: (setattr(FaultyTime, "ahead", 0.0), setattr(node, "mute", False), setattr(node, "wrong", ""))  # noqa: E731
    signal.signal(signal.SIGHUP, well)
    print("ready", getattr(bus, "port", 0), flush=True)
    node.run()
    print("ended", bus.trouble(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
