"""A twin as a node in a process of its own, whose faults the tests ask for by signals.

SIGUSR1: from now on its clock is three seconds ahead. SIGUSR2: its cameras fall silent. The
real-time signals: its joint states (0) stand still with fresh stamps, (1) are 1.6 s old, (2) are
not numbers, (3) are dropped, repeated and in the wrong order; (4) its cameras repeat a picture with
fresh stamps; (5) something pushes the hand with 50 N; (6) its wrenches
stop; (7) they repeat a force with fresh stamps. SIGHUP: all is well again.

    python ros_twin.py ros2|ros1|rosbridge TASK
"""

from __future__ import annotations

import random
import signal
import sys
import time
from typing import Any

from embodyrl.real_robot.ros import fields
from embodyrl.real_robot.ros.config import PRESETS
from embodyrl.real_robot.ros.connect_bus import connect
from embodyrl.real_robot.ros.rosbridge_server import RosbridgeServer
from embodyrl.real_robot.twin import ros_node
from embodyrl.real_robot.twin.mujoco_twin import MujocoTwin
from embodyrl.sims.mujoco.env import MujocoConfig


class FaultyTime:
    """The module ``time``, with a wall clock that can be wrong."""

    ahead = 0.0
    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    def time(self) -> float:
        return time.time() + self.ahead


FAULTS = ("frozen", "late", "not finite", "shuffled", "repeats", "force", "no force", "same force")


class FaultyNode(ros_node.TwinNode):
    mute, wrong = False, ""

    def __init__(self, twin: MujocoTwin, bus: Any) -> None:
        super().__init__(twin, bus, PRESETS["twin"])
        self._push, self._number, self._held = (
            bus.advertise("/wrench", "geometry_msgs/WrenchStamped"),
            0,
            None,
        )
        self._see, self._shown = twin.pictures, {}
        twin.pictures = self._pictures  # type: ignore[method-assign]

    def _pictures(self) -> dict[str, Any]:
        if self.wrong != "repeats" or not self._shown:
            self._shown = self._see()
        return self._shown

    def _publish_state(self) -> None:
        data, topics = self._twin.data, self._topics
        if self.wrong != "frozen":
            self._kept = data.qpos[:9].copy(), data.qvel[:9].copy()
        q, dq = self._kept
        q = q * float("nan") if self.wrong == "not finite" else q
        stamp = time.time() + FaultyTime.ahead - (1.6 if self.wrong == "late" else 0.0)
        message = fields.joint_state((*topics.joints, *topics.fingers), q, dq, stamp, self._bus.ros)
        self._number += 1
        if self.wrong != "shuffled":
            self._states(message)
        elif self._number % 4 == 1:
            self._held = message  # comes after the next, twice
        elif self._number % 4 == 2:
            for each in (message, self._held, self._held):
                self._states(each) if each is not None else None
        elif self._number % 4 == 3:
            self._states(message)  # and the fourth is lost

    def _publish_scene(self, init: int) -> None:
        header = {"stamp": fields.time_fields(time.time(), self._bus.ros), "frame_id": "base"}
        zero = dict.fromkeys("xyz", 0.0)
        if self.wrong != "same force":
            self._noise = random.gauss(0.0, 0.1)
        force = zero | {"z": self._noise + (50.0 if self.wrong == "force" else 0.0)}
        if self.wrong != "no force":
            self._push({"header": header, "wrench": {"force": force, "torque": zero}})
        cameras = self._cameras
        self._cameras = {} if self.mute else cameras
        super()._publish_scene(init)
        self._cameras = cameras


def main(kind: str, task: str) -> None:
    clock: Any = FaultyTime()
    ros_node.time = clock
    bus = RosbridgeServer(0) if kind == "rosbridge" else connect(kind, name="embodyrl_twin")
    twin = MujocoTwin(MujocoConfig(task=task, image_size=32, split="eval"))
    node = FaultyNode(twin, bus)
    signal.signal(signal.SIGUSR1, lambda *_: setattr(FaultyTime, "ahead", 3.0))
    signal.signal(signal.SIGUSR2, lambda *_: setattr(node, "mute", True))
    for number, fault in enumerate(FAULTS):
        signal.signal(
            signal.SIGRTMIN + number, lambda *_, fault=fault: setattr(node, "wrong", fault)
        )

    def well(*_):
        FaultyTime.ahead = 0.0
        node.mute = False
        node.wrong = ""

    signal.signal(signal.SIGHUP, well)
    print("ready", getattr(bus, "port", 0), flush=True)
    node.run()
    print("ended", bus.trouble(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
