"""An arm behind ROS topics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from embodyrl.errors import UserError
from embodyrl.functional.pictures import Image, fit
from embodyrl.real_robot.cameras.camera import Camera
from embodyrl.real_robot.control import limits
from embodyrl.real_robot.control.actions import ActionSpace, DeltaDecoder, proprio
from embodyrl.real_robot.control.clocks import Clock
from embodyrl.real_robot.control.input_checks import age_problem
from embodyrl.real_robot.control.joint_tracking import Stopper
from embodyrl.real_robot.control.messages import Array, Command, RobotState
from embodyrl.real_robot.control.robot import NotReadyError
from embodyrl.real_robot.parsing import MessageError, numbers, text
from embodyrl.real_robot.ros import fields
from embodyrl.real_robot.ros.bus import Bus, Fields
from embodyrl.real_robot.ros.config import Topics
from embodyrl.real_robot.ros.stamps import StampConverter
from embodyrl.real_robot.ros.topic_camera import TopicCamera

_COMMAND_KINDS = {
    "joint_trajectory": "trajectory_msgs/JointTrajectory",
    "joint_state": "sensor_msgs/JointState",
    "pose": "geometry_msgs/PoseStamped",
}
"""``Topics.command_type`` -> message type."""
_WORD_KINDS = {str: "String", bool: "Bool", int: "Int64"}
STOP_POINTS = 6
"""Number of points of the stop that goes with each command."""


class RosRobot:
    """See ``Robot``.

    The newest messages are kept in attributes, which the bus's thread only ever replaces as a
    whole, so no lock is needed.

    Args:
        bus: connected; ``close`` closes it.
        topics: of the robot.
        model: robot model, whose limits the stop that goes with each command keeps.
        clock: of the control loop.
        space: of the policy's actions.
        cameras: of the policy, name -> (height, width).
        prompt: instruction for the policy where no topic gives one.
        tick: s between two commands.

    Raises:
        UserError: a camera of the policy has no topic.
    """

    def __init__(
        self,
        bus: Bus,
        topics: Topics,
        model: str,
        clock: Clock,
        space: ActionSpace,
        cameras: Mapping[str, tuple[int, int]],
        prompt: str = "",
        tick: float = 0.01,
    ) -> None:
        if missing := [name for name in cameras if name not in topics.cameras]:
            raise UserError(
                f"The policy has a camera {missing[0]!r}, but no topic is given for it "
                "(topics.cameras)."
            )
        self._bus = bus
        self._topics = topics
        self._clock = clock
        self._space = space
        self._tick = tick
        self._stopper = Stopper(limits.limits_of(model).inside())
        self._prompt = prompt
        self._trouble = ""
        self._state: RobotState | None = None
        self._width = 0.0
        self._force: tuple[float, Array] | None = None  # (when measured, force)
        self._hand = None
        self._images: dict[str, tuple[float, Image]] = {}  # (when measured, image)
        self._cameras = dict(cameras)
        self._success = False
        self._scene_ready = False
        self._init = None
        self._arranged_at = -math.inf  # when the scene was arranged; what is older is of another
        self._last_width = -1.0
        jump = topics.max_clock_jump
        self._image_stamps = {
            name: StampConverter(f"the pictures of camera {name}", jump) for name in cameras
        }
        self._joint_stamps = StampConverter("the joint states", jump)
        self._wrench_stamps = StampConverter("the wrenches", jump)
        self._subscribe()
        self._command = bus.advertise(topics.command, _COMMAND_KINDS[topics.command_type])
        self._gripper = (
            bus.advertise(topics.gripper, "std_msgs/Float32") if topics.gripper else None
        )
        self._reset = bus.advertise(topics.reset, "std_msgs/Int64") if topics.reset else None

    def _subscribe(self) -> None:
        topics = self._topics
        # The arm and the gripper. Fingers that have a topic of their own are not looked for among
        # the arm's joints.
        own = bool(topics.finger_states)
        joint_state = "sensor_msgs/JointState"
        self._hear(topics.states, joint_state, lambda m: self._on_states(m, fingers=not own))
        self._hear(topics.finger_states, joint_state, self._on_fingers)
        self._hear(topics.wrench, "geometry_msgs/WrenchStamped", self._on_wrench)
        self._hear(topics.pose, "geometry_msgs/PoseStamped", self._on_pose)
        # The cameras.
        for name in self._cameras:
            topic = topics.cameras[name]
            kind = "CompressedImage" if topic.endswith("/compressed") else "Image"
            self._hear(topic, f"sensor_msgs/{kind}", lambda m, name=name: self._on_image(name, m))
        # The task.
        for topic, kind, attribute in (
            (topics.instruction, str, "_prompt"),
            (topics.success, bool, "_success"),
            (topics.scene_ready, bool, "_scene_ready"),
            (topics.init, int, "_init"),
        ):
            self._hear(
                topic,
                f"std_msgs/{_WORD_KINDS[kind]}",
                lambda m, kind=kind, attribute=attribute: self._on_word(m, kind, attribute),
            )

    def _hear(self, topic: str, kind: str, callback: Callable[[Fields], None]) -> None:
        """Subscribes to a topic, if the robot has it.

        What is wrong with a message becomes the robot's trouble, which is a fault. The first
        trouble stays. Nothing that a message holds may end the bus's thread.
        """

        def guarded(message: Fields) -> None:
            try:
                callback(message)
            except UserError as error:
                self._trouble = self._trouble or str(error)
            except Exception as error:
                why = f"a message is not understood ({type(error).__name__}: {error})"
                self._trouble = self._trouble or why

        if topic:
            self._bus.subscribe(topic, kind, guarded)

    def _on_states(self, message: Fields, fingers: bool) -> None:
        now = self._clock.now()
        names = self._topics.joints
        if fingers and self._topics.fingers and self._topics.fingers[0] in message["name"]:
            self._on_fingers(message)
            if names[0] not in message["name"]:
                return  # a message of the fingers alone
        if (stamp := self._joint_stamps.measured(message["header"], now)) is not None:
            q, dq = (fields.by_name(message, names, what) for what in ("position", "velocity"))
            self._state = RobotState(stamp, q, dq, self._width, hand=self._hand)

    def _on_fingers(self, message: Fields) -> None:
        width = float(fields.by_name(message, self._topics.fingers, "position").sum())
        if not math.isfinite(width):
            raise MessageError("the positions of the fingers are not finite")
        self._width = width

    def _on_wrench(self, message: Fields) -> None:
        now = self._clock.now()
        if (stamp := self._wrench_stamps.measured(message["header"], now)) is not None:
            # A force that is not finite is a fault for the safety filter.
            force = [message["wrench"]["force"][axis] for axis in "xyz"]
            self._force = (stamp, numbers(force, 3, "the force", finite=False))

    def _on_pose(self, message: Fields) -> None:
        position = [message["pose"]["position"][axis] for axis in "xyz"]
        self._hand = numbers(position, 3, "the hand's position")

    def _on_word(self, message: Fields, kind: type, attribute: str) -> None:
        """A message with one value, of the instruction, the success or the initial state."""
        value = message["data"]
        if type(value) is not kind:
            raise MessageError(f"a message has the data {value!a:.40}, which is no {kind.__name__}")
        setattr(self, attribute, text(value, "the instruction") if kind is str else value)

    def _on_image(self, name: str, message: Fields) -> None:
        now = self._clock.now()
        if (stamp := self._image_stamps[name].measured(message["header"], now)) is not None:
            self._images[name] = (stamp, fit(fields.picture(message), self._cameras[name]))

    def wait(self, seconds: float = 10.0) -> None:
        """Waits for joint states, wrenches and images measured since the scene was arranged.

        Raises:
            UserError: nothing came on a topic within ``seconds``, or the robot cannot be used.
        """
        end = time.monotonic() + seconds
        while True:
            if trouble := self._bus.trouble() or self._trouble:
                raise UserError(f"The robot cannot be used: {trouble}.")
            silent = self._silent_topics()
            if not silent:
                return
            if time.monotonic() > end:
                raise UserError(
                    f"Nothing came on {silent[0]} within {seconds:.0f} s. Is its node running, and "
                    "the name right?"
                )
            time.sleep(0.02)

    def _silent_topics(self) -> list[str]:
        """Topics on which nothing came that was measured since the scene was arranged."""
        since = self._arranged_at
        never = (-math.inf, None)
        silent = [
            self._topics.cameras[name]
            for name in self._cameras
            if self._images.get(name, never)[0] <= since
        ]
        if self._state is None or self._state.stamp <= since:
            silent.insert(0, self._topics.states)
        if self._topics.wrench and (self._force is None or self._force[0] <= since):
            silent.insert(0, self._topics.wrench)
        return silent

    def begin(self, init: int, seconds: float = 20.0) -> None:
        """Has initial state ``init`` arranged, where a topic does that, and waits for its images.

        Raises:
            UserError: that took longer than ``seconds``.
        """
        self.wait(seconds)
        if self._reset is None:
            return
        end = time.monotonic() + seconds
        # -1 first clears the answer to the last reset, which may have had the same number.
        for number in (-1, init):
            self._init = None
            # The number is repeated, because the other node may not have been listening yet.
            while self._init != number:
                self._reset({"data": number})
                for _ in range(50):
                    time.sleep(0.02)
                    if self._init == number:
                        break
                if time.monotonic() > end:
                    raise UserError(
                        f"Initial state {init} was not arranged within {seconds:.0f} s "
                        f"({self._topics.reset})."
                    )
        # States and images from before may still be on their way, by another connection.
        self._arranged_at = self._clock.now()
        self._success = False
        self._last_width = -1.0
        self.wait(seconds)

    def state(self) -> RobotState:
        """See ``Robot``."""
        state = self._state
        if state is None:
            raise UserError(f"No joint states came yet on {self._topics.states}.")
        trouble = self._bus.trouble() or self._trouble
        stamp, force = self._force or (None, None)
        return replace(state, width=self._width, trouble=trouble, force=force, force_stamp=stamp)

    def send(self, command: Command) -> None:
        """See ``Robot``."""
        topics = self._topics
        ros = self._bus.ros
        if topics.command_type == "joint_trajectory":
            # The trajectory ends in a stop: if no more commands come, the arm brakes by itself.
            times, q, dq = stop_points(self._stopper, command, self._tick)
            message = fields.trajectory(topics.joints, times, q, dq, ros)
        elif topics.command_type == "joint_state":
            message = fields.joint_state(topics.joints, command.q, command.dq, time.time(), ros)
        else:
            message = fields.pose(command.q, topics.frame, time.time(), ros)
        self._command(message)
        # The gripper is told only when its width changes.
        if self._gripper is not None and command.width != self._last_width:
            self._gripper({"data": float(command.width)})
            self._last_width = command.width

    def observe(self, decoder: DeltaDecoder) -> dict[str, Any]:
        """See ``Robot``."""
        now = self._clock.now()
        images = {}
        for name in self._cameras:
            came, image = self._images.get(name, (-np.inf, None))
            what = f"picture of camera {name}"
            if wrong := age_problem(what, came, now, self._topics.max_image_age):
                raise NotReadyError(wrong)
            images[name] = image
        state = self.state()
        return {
            "images": images,
            "proprio": proprio(self._space, state, decoder),
            "prompt": self._prompt,
        }

    def pictures(self) -> dict[str, Image]:
        """See ``Robot``."""
        return {name: image for name, (_, image) in list(self._images.items())}

    def cameras(self) -> Mapping[str, Camera]:
        """See ``HasDevices``."""
        return {name: TopicCamera(name, self._images) for name in self._cameras}

    def max_image_age(self) -> float:
        """See ``HasDevices``."""
        return self._topics.max_image_age

    def gripper(self) -> None:
        """See ``HasDevices``: the fingers come with the arm's states."""
        return None

    def prompt(self) -> str:
        """See ``Robot``."""
        return self._prompt

    def solved(self) -> bool:
        """See ``Robot``."""
        return self._success

    @property
    def tells_ready(self) -> bool:
        """Whether a topic says that the scene is as an episode begins."""
        return bool(self._topics.scene_ready)

    def scene_ready(self) -> bool:
        """What that topic said last."""
        return self._scene_ready

    def close(self) -> None:
        """See ``Robot``."""
        self._bus.close()


def stop_points(stopper: Stopper, command: Command, tick: float) -> tuple[Array, Array, Array]:
    """A command, and after it the hardest stop from there.

    Returns:
        Times (k,) in s from now, angles (k, 7) and velocities (k, 7).
    """
    if np.abs(command.dq).max() < 1e-6:
        return np.array([tick]), command.q[None], command.dq[None]
    path = stopper.plan((command.q.tolist(), command.dq.tolist(), command.ddq.tolist()))
    after = np.linspace(0.0, path.duration, STOP_POINTS + 1)
    points = [path.at_time(t) for t in after.tolist()]
    return tick + after, np.array([p[0] for p in points]), np.array([p[1] for p in points])
