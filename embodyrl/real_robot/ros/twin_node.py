"""The simulated arm as a node: joint states, pictures and the task's state out, commands in, at the wall's pace."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from embodyrl.real_robot.env.twin import MujocoTwin
from embodyrl.real_robot.ros import fields
from embodyrl.real_robot.ros.bus import Bus, Fields
from embodyrl.real_robot.ros.config import Topics

STATE_HZ = 200.0
CAMERA_HZ = 25.0


class TwinNode:
    """One twin on one bus.

    Args:
        twin: of the task.
        bus: connected.
        topics: as the robot's, seen from the other side.
    """

    def __init__(self, twin: MujocoTwin, bus: Bus, topics: Topics) -> None:
        self._twin = twin
        self._bus = bus
        self._topics = topics
        self._command: Fields | None = None
        self._width: float | None = None
        self._reset: int | None = 0
        bus.subscribe(
            topics.command,
            "trajectory_msgs/JointTrajectory",
            lambda m: setattr(self, "_command", m),
        )
        bus.subscribe(
            topics.gripper, "std_msgs/Float32", lambda m: setattr(self, "_width", float(m["data"]))
        )
        bus.subscribe(
            topics.reset, "std_msgs/Int64", lambda m: setattr(self, "_reset", int(m["data"]))
        )
        self._states = bus.advertise(topics.states, "sensor_msgs/JointState")
        self._pose = bus.advertise(topics.pose, "geometry_msgs/PoseStamped")
        self._cameras = {
            name: bus.advertise(topics.cameras[name], "sensor_msgs/Image")
            for name in twin.spec.cameras
        }
        self._task = {
            topic: bus.advertise(topic, f"std_msgs/{kind}")
            for topic, kind in (
                (topics.instruction, "String"),
                (topics.success, "Bool"),
                (topics.init, "Int64"),
            )
        }

    def run(self, seconds: float = float("inf")) -> None:
        """Until ``seconds`` are over or the bus fails, which it then says."""
        twin = self._twin
        end = time.monotonic() + seconds
        period = 1.0 / STATE_HZ
        init = -1
        pictures_due = 0.0
        ahead = 0.0  # of the twin's clock before the wall's
        due = time.monotonic()
        while due < end and not self._bus.trouble():
            asked = self._reset
            self._reset = None
            if asked is not None and asked < 0:
                init = -1
            elif asked is not None and asked != init:  # it may have been said twice
                init = asked
                twin.begin(init)
                self._command = self._width = None
                due = time.monotonic()
                ahead = twin.now() - due
            self._obey()
            twin.sleep_until(due + ahead)
            self._publish_state()
            if due >= pictures_due:
                pictures_due = max(pictures_due + 1.0 / CAMERA_HZ, due)
                self._publish_scene(init)
            due = max(due + period, time.monotonic() - 0.1)  # catches up, but not on a long pause
            time.sleep(max(due - time.monotonic(), 0.0))

    def _obey(self) -> None:
        command = self._command
        self._command = None
        if command is not None:
            points = command["points"]
            times = np.array([fields.seconds(p["time_from_start"]) for p in points])
            q, dq = (
                np.array([p[what] for p in points], dtype=float)
                for what in ("positions", "velocities")
            )
            order = [list(command["joint_names"]).index(name) for name in self._topics.joints]
            self._twin.follow(times, q[:, order], dq[:, order])
        width = self._width
        self._width = None
        if width is not None:
            self._twin.grasp(width)

    def _publish_state(self) -> None:
        data = self._twin.data
        topics = self._topics
        names = (*topics.joints, *topics.fingers)
        self._states(
            fields.joint_state(names, data.qpos[:9], data.qvel[:9], time.time(), self._bus.ros)
        )
        pose = fields.pose(data.qpos[:7], topics.frame, time.time(), self._bus.ros)
        pose["pose"]["position"] = dict(zip("xyz", self._twin.hand().tolist(), strict=True))
        self._pose(pose)

    def _publish_scene(self, init: int) -> None:
        stamp = time.time()
        twin = self._twin
        topics = self._topics
        seen = twin.pictures()
        for name, publish in self._cameras.items():
            publish(fields.image_fields(seen[name], stamp, self._bus.ros))
        told: dict[str, Any] = {
            topics.instruction: twin.instructions[0], topics.success: twin.solved(), topics.init: init,
        }  # fmt: skip
        for topic, value in told.items():
            self._task[topic]({"data": value})
