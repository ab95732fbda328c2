"""The simulated arm as a ROS node, in real time.

It publishes joint states, images and the state of the task, and takes commands.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from embodyrl.errors import UserError
from embodyrl.real_robot.control.messages import Array
from embodyrl.real_robot.parsing import MessageError, number, whole
from embodyrl.real_robot.ros import fields
from embodyrl.real_robot.ros.bus import Bus, Fields
from embodyrl.real_robot.ros.config import Topics
from embodyrl.real_robot.twin.mujoco_twin import MujocoTwin

STATE_HZ = 200.0
CAMERA_HZ = 25.0
BEYOND = 0.05
"""rad by which a commanded angle may lie beyond the end of a joint."""
MAX_SPEED = 10.0
"""rad/s; largest commanded velocity."""
MAX_WIDTH = 0.2
"""m; largest commanded opening of the gripper."""
log = logging.getLogger(__name__)


class TwinNode:
    """One twin on one bus.

    Args:
        twin: the simulated arm in its task.
        bus: connected.
        topics: the same as the driver's: what it subscribes to is published here.

    Attributes:
        refused: number of messages that were not understood. Each is dropped, with a warning in
            the log, and the node goes on.
    """

    def __init__(self, twin: MujocoTwin, bus: Bus, topics: Topics) -> None:
        self._twin = twin
        self._bus = bus
        self._topics = topics
        self._command: tuple[Array, Array, Array] | None = None
        self._width: float | None = None
        self._reset: int | None = 0
        self.refused = 0
        self._hear(topics.command, "trajectory_msgs/JointTrajectory", self._on_command)
        self._hear(topics.gripper, "std_msgs/Float32", self._on_width)
        self._hear(topics.reset, "std_msgs/Int64", self._on_reset)
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

    def _hear(self, topic: str, kind: str, callback: Callable[[Fields], None]) -> None:
        """Subscribes to a topic; a message that is not understood is dropped and named."""

        def guarded(message: Fields) -> None:
            try:
                callback(message)
            except Exception as error:
                why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}"
                log.warning("A message on %s was dropped: %s.", topic, why)
                self.refused += 1

        self._bus.subscribe(topic, kind, guarded)

    def _on_command(self, message: Fields) -> None:
        times, q, dq = fields.read_trajectory(message, self._topics.joints)
        low, high = self._twin.model.jnt_range[:7].T
        if (q < low - BEYOND).any() or (q > high + BEYOND).any():
            raise MessageError("the positions lie beyond the ends of the joints")
        if np.abs(dq).max() > MAX_SPEED:
            raise MessageError(f"the velocities are above {MAX_SPEED:g} rad/s")
        self._command = times, q, dq

    def _on_width(self, message: Fields) -> None:
        self._width = number(message.get("data"), 0.0, MAX_WIDTH, "the gripper's width")

    def _on_reset(self, message: Fields) -> None:
        limit = self._twin.spec.num_init_states or 2**31
        self._reset = whole(message.get("data"), -1, limit - 1, "the initial state")

    def run(self, seconds: float = float("inf")) -> None:
        """Runs until ``seconds`` are over or the bus fails; ``bus.trouble`` then says why."""
        twin = self._twin
        end = time.monotonic() + seconds
        period = 1.0 / STATE_HZ
        init = -1
        pictures_due = 0.0
        due = time.monotonic()
        ahead = twin.now() - due  # s by which the twin's clock is ahead of real time
        while due < end and not self._bus.trouble():
            # 1. Arrange an initial state, if one was asked for. -1 only clears the last answer.
            asked = self._reset
            self._reset = None
            if asked is not None and asked < 0:
                init = -1
            elif asked is not None and asked != init:  # the same number may come twice
                init = asked
                twin.begin(init)
                # Commands for the last scene no longer count.
                self._command = None
                self._width = None
                due = time.monotonic()
                ahead = twin.now() - due
            # 2. Take the newest command, move the physics on, and publish.
            try:
                self._obey()
            except (UserError, ArithmeticError, LookupError, TypeError, ValueError) as error:
                # A robot goes on after a command that it refuses.
                log.warning("A command is refused: %s.", error)
            twin.sleep_until(due + ahead)
            self._publish_state()
            if due >= pictures_due:
                pictures_due = max(pictures_due + 1.0 / CAMERA_HZ, due)
                self._publish_scene(init)
            # 3. Wait for real time. Short delays are made up for, long ones are not.
            due = max(due + period, time.monotonic() - 0.1)
            time.sleep(max(due - time.monotonic(), 0.0))

    def _obey(self) -> None:
        """Gives the newest command to the arm and the gripper."""
        command = self._command
        self._command = None
        if command is not None:
            self._twin.follow(*command)
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
        values: dict[str, Any] = {
            topics.instruction: twin.instructions[0],
            topics.success: twin.solved(),
            topics.init: init,
        }
        for topic, value in values.items():
            self._task[topic]({"data": value})
