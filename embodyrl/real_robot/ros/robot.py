"""An arm behind topics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from embodyrl.errors import UserError
from embodyrl.real_robot.control import limits
from embodyrl.real_robot.control.actions import ActionSpace, DeltaDecoder, proprio
from embodyrl.real_robot.control.messages import Array, Command, RobotState
from embodyrl.real_robot.control.tracking import Stopper
from embodyrl.real_robot.control.transports import Clock, NotReadyError
from embodyrl.real_robot.ros import fields
from embodyrl.real_robot.ros.bus import Bus, Fields
from embodyrl.real_robot.ros.config import Topics

STOP_POINTS = 6
LEARN = 1.0
"""s after the first message in which its clock's lead is still being learnt."""
DRIFT = 1e-4
"""s per s by which two clocks may drift apart."""


class Stamps:
    """When fresh messages were measured by our own clock, from stamps of another one, whose jumps it notices.

    The stamps of messages that come without delay lead our clock by the same amount. Delay can only
    lessen that lead, so the largest one seen is it, and what a message lacks of it is its delay.
    """

    def __init__(self, what: str, max_jump: float) -> None:
        self._what = what
        self._max_jump = max_jump
        self._newest = 0.0
        self._lead = -math.inf
        self._since = math.inf
        self._last = 0.0

    def measured(self, header: Fields, now: float) -> float | None:
        """When a message that came at ``now`` was measured; None if it is not newer than all before.

        Raises:
            UserError: it carries no stamp, or its clock jumped.
        """
        stamp = fields.seconds(header["stamp"])
        if stamp == 0.0:
            raise UserError(
                f"{self._what} come without a time stamp, so nobody could tell whether they are "
                "frozen"
            )
        ahead = stamp - now - self._lead
        back = self._newest - stamp
        if back > self._max_jump or (ahead > self._max_jump and now - self._since > LEARN):
            jump = -back if back > self._max_jump else ahead
            raise UserError(f"the clock that stamps {self._what} jumped by {jump:+.1f} s")
        self._lead = max(stamp - now, self._lead - DRIFT * (now - self._last))
        self._since = min(self._since, now)
        self._last = now
        if stamp <= self._newest:
            return None
        self._newest = stamp
        return stamp - self._lead


class RosRobot:
    """See ``Robot``. What was received last stands in attributes, which the bus's thread replaces whole.

    Args:
        bus: connected; ``close`` closes it.
        topics: of the robot.
        model: of its limits, for the stop that goes with each command.
        clock: of the ticker.
        space: of the policy's actions.
        cameras: of the policy, name -> (height, width).
        prompt: what the policy is told where no topic says it.
        tick: s between two commands.
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
        self._stopper = Stopper(limits.find(model).inside())
        self._prompt = prompt
        self._trouble = ""
        self._state: RobotState | None = None
        self._width = 0.0
        self._force = None
        self._hand = None
        self._images: dict[str, tuple[float, fields.Image]] = {}
        self._cameras = dict(cameras)
        self._success = False
        self._init = None
        self._since = -math.inf
        self._last_width = -1.0
        self._stamps = {
            name: Stamps(f"the pictures of camera {name}", topics.max_clock_jump)
            for name in cameras
        }
        self._joint_stamps = Stamps("the joint states", topics.max_clock_jump)
        self._listen()
        kind = {
            "joint_trajectory": "trajectory_msgs/JointTrajectory",
            "joint_state": "sensor_msgs/JointState",
        }
        kind = kind.get(topics.command_type, "geometry_msgs/PoseStamped")
        self._command = bus.advertise(topics.command, kind)
        self._gripper = (
            bus.advertise(topics.gripper, "std_msgs/Float32") if topics.gripper else None
        )
        self._reset = bus.advertise(topics.reset, "std_msgs/Int64") if topics.reset else None

    def _listen(self) -> None:
        topics = self._topics
        subscribe = self._bus.subscribe
        # Fingers that have a topic of their own are not looked for among the arm's joints.
        own = bool(topics.finger_states)
        subscribe(
            topics.states,
            "sensor_msgs/JointState",
            self._guarded(lambda m: self._on_states(m, fingers=not own)),
        )
        if own:
            subscribe(
                topics.finger_states, "sensor_msgs/JointState", self._guarded(self._on_fingers)
            )
        if topics.wrench:
            subscribe(topics.wrench, "geometry_msgs/WrenchStamped", self._guarded(self._on_wrench))
        if topics.pose:
            subscribe(topics.pose, "geometry_msgs/PoseStamped", self._guarded(self._on_pose))
        for name in self._cameras:
            topic = topics.cameras[name]
            kind = "CompressedImage" if topic.endswith("/compressed") else "Image"
            subscribe(
                topic,
                f"sensor_msgs/{kind}",
                self._guarded(lambda m, name=name: self._on_image(name, m)),
            )
        for topic, kind, attribute in (
            (topics.instruction, "String", "_prompt"),
            (topics.success, "Bool", "_success"),
            (topics.init, "Int64", "_init"),
        ):
            if topic:
                hear = self._guarded(
                    lambda m, attribute=attribute: setattr(self, attribute, m["data"])
                )
                subscribe(topic, f"std_msgs/{kind}", hear)

    def _guarded(self, callback: Callable[[Fields], None]) -> Callable[[Fields], None]:
        """What is wrong with a message becomes the robot's trouble, which faults; the first stays."""

        def guarded(message: Fields) -> None:
            try:
                callback(message)
            except UserError as error:
                self._trouble = self._trouble or str(error)
            except (KeyError, TypeError, ValueError) as error:
                self._trouble = (
                    self._trouble
                    or f"a message is not understood ({type(error).__name__}: {error})"
                )

        return guarded

    def _on_states(self, message: Fields, fingers: bool) -> None:
        now = self._clock.now()
        names = self._topics.joints
        if fingers and self._topics.fingers and self._topics.fingers[0] in message["name"]:
            self._on_fingers(message)
            if names[0] not in message["name"]:
                return
        if (stamp := self._joint_stamps.measured(message["header"], now)) is not None:
            q, dq = (fields.by_name(message, names, what) for what in ("position", "velocity"))
            self._state = RobotState(stamp, q, dq, self._width, self._force, hand=self._hand)

    def _on_fingers(self, message: Fields) -> None:
        self._width = float(fields.by_name(message, self._topics.fingers, "position").sum())

    def _on_wrench(self, message: Fields) -> None:
        self._force = np.array([message["wrench"]["force"][axis] for axis in "xyz"], dtype=float)

    def _on_pose(self, message: Fields) -> None:
        self._hand = np.array([message["pose"]["position"][axis] for axis in "xyz"], dtype=float)

    def _on_image(self, name: str, message: Fields) -> None:
        now = self._clock.now()
        if (stamp := self._stamps[name].measured(message["header"], now)) is not None:
            self._images[name] = (stamp, fields.fit(fields.picture(message), self._cameras[name]))

    def wait(self, seconds: float = 10.0) -> None:
        """Until joint states and pictures come that were measured since the scene was arranged.

        Raises:
            UserError: naming the topic on which nothing comes.
        """
        end = time.monotonic() + seconds
        while True:
            if trouble := self._bus.trouble() or self._trouble:
                raise UserError(f"The robot cannot be used: {trouble}.")
            since = self._since
            never = (-math.inf, None)
            silent = [
                self._topics.cameras[name]
                for name in self._cameras
                if self._images.get(name, never)[0] <= since
            ]
            if self._state is None or self._state.stamp <= since:
                silent.insert(0, self._topics.states)
            if not silent:
                return
            if time.monotonic() > end:
                raise UserError(
                    f"Nothing came on {silent[0]} within {seconds:.0f} s. Is its node running, and "
                    "the name right?"
                )
            time.sleep(0.02)

    def begin(self, init: int, seconds: float = 20.0) -> None:
        """Has initial state ``init`` arranged, where a topic does that, and waits for states and pictures of it.

        Raises:
            UserError: it was not within ``seconds``.
        """
        self.wait(seconds)
        if self._reset is None:
            return
        end = time.monotonic() + seconds
        for number in (-1, init):  # the answer from before goes first: it may be the same
            self._init = None
            while self._init != number:  # said again, because nobody may have been listening yet
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
        # What was measured before may still be on its way, by another connection.
        self._since = self._clock.now()
        self._success = False
        self._last_width = -1.0
        self.wait(seconds)

    def state(self) -> RobotState:
        """See ``Robot``."""
        state = self._state
        if state is None:
            raise UserError(f"No joint states came yet on {self._topics.states}.")
        trouble = self._bus.trouble() or self._trouble
        return replace(state, trouble=trouble) if trouble else state

    def send(self, command: Command) -> None:
        """See ``Robot``."""
        topics = self._topics
        ros = self._bus.ros
        if topics.command_type == "joint_trajectory":
            self._command(
                fields.trajectory(
                    topics.joints, *stop_points(self._stopper, command, self._tick), ros
                )
            )
        elif topics.command_type == "joint_state":
            self._command(
                fields.joint_state(topics.joints, command.q, command.dq, time.time(), ros)
            )
        else:
            self._command(fields.pose(command.q, topics.frame, time.time(), ros))
        if self._gripper is not None and command.width != self._last_width:
            self._gripper({"data": float(command.width)})
            self._last_width = command.width

    def observe(self, decoder: DeltaDecoder) -> dict[str, Any]:
        """See ``Robot``."""
        now = self._clock.now()
        images = {}
        for name in self._cameras:
            came, image = self._images.get(name, (-np.inf, None))
            if now - came > self._topics.max_image_age:
                raise NotReadyError(f"no fresh picture of camera {name} for {now - came:.2f} s")
            images[name] = image
        state = self.state()
        return {
            "images": images,
            "proprio": proprio(self._space, state, decoder),
            "prompt": self._prompt,
        }

    def pictures(self) -> dict[str, fields.Image]:
        """See ``Robot``."""
        return {name: image for name, (_, image) in list(self._images.items())}

    def prompt(self) -> str:
        """See ``Robot``."""
        return self._prompt

    def solved(self) -> bool:
        """See ``Robot``."""
        return bool(self._success)

    def close(self) -> None:
        """See ``Robot``."""
        self._bus.close()


def stop_points(stopper: Stopper, command: Command, tick: float) -> tuple[Array, Array, Array]:
    """A command, and after it the hardest stop: times (k,) from now, angles and velocities (k, 7)."""
    if np.abs(command.dq).max() < 1e-6:
        return np.array([tick]), command.q[None], command.dq[None]
    path = stopper.plan((command.q.tolist(), command.dq.tolist(), command.ddq.tolist()))
    after = np.linspace(0.0, path.duration, STOP_POINTS + 1)
    points = [path.at_time(t) for t in after.tolist()]
    return tick + after, np.array([p[0] for p in points]), np.array([p[1] for p in points])
