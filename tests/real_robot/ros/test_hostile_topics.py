"""Bad numbers in the messages of topics: each is told, and no check is off after it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from embodyrl.errors import UserError
from embodyrl.real_robot.connect_robot import ConnectedRobot
from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.actions import SPACES, DeltaDecoder
from embodyrl.real_robot.control.fuzz import BOX
from embodyrl.real_robot.control.input_checks import state_problem
from embodyrl.real_robot.control.robot import NotReadyError
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.real_robot.resets.between import Between
from embodyrl.real_robot.resets.in_turn import InTurn
from embodyrl.real_robot.resets.judges import open_judge
from embodyrl.real_robot.resets.open_resets import open_between
from embodyrl.real_robot.resets.options import ResetOptions
from embodyrl.real_robot.ros import fields
from embodyrl.real_robot.ros.config import Topics
from embodyrl.real_robot.ros.robot import RosRobot
from embodyrl.real_robot.ros.stamps import StampConverter

TOPICS = Topics(
    wrench="/wrench",
    cameras={"front": "/front"},
    finger_states="/fingers",
    success="/success",
    scene_ready="/ready",
    init="/init",
    instruction="/instruction",
)
SPACE = SPACES["robot", "ee_delta_pos"]
CONFIG = SafetyConfig(**BOX)  # type: ignore[arg-type]
BAD = (math.nan, math.inf, -math.inf, -1.0, 1e12, -1e12)


class Here:
    """A bus and a clock in this process: what is published is heard at once."""

    ros = 2

    def __init__(self) -> None:
        self.time = 100.0
        self.heard: dict[str, Callable[[Any], None]] = {}

    def now(self) -> float:
        return self.time

    def sleep_until(self, stamp: float) -> None:
        self.time = stamp

    def subscribe(self, topic: str, kind: str, callback: Callable[[Any], None]) -> None:
        self.heard[topic] = callback

    def advertise(self, topic: str, kind: str) -> Callable[[Any], None]:
        return lambda message: None

    def trouble(self) -> str:
        return ""

    def close(self) -> None:
        pass


class Arm:
    """A robot that hears good messages, ten milliseconds apart."""

    def __init__(self) -> None:
        self.bus = Here()
        self.robot = RosRobot(self.bus, TOPICS, "fr3", self.bus, SPACE, {"front": (4, 4)})
        self.image = 0

    def messages(self) -> dict[str, dict[str, Any]]:
        stamp = self.bus.time + 1000.0  # of another machine's clock
        self.image += 1
        force = dict.fromkeys("xyz", 1.0)
        picture = np.full((4, 4, 3), self.image % 256, np.uint8)
        arm = fields.joint_state(TOPICS.joints, kinematics.HOME, np.zeros(7), stamp, 2)
        hand = fields.joint_state(TOPICS.fingers, np.full(2, 0.04), np.zeros(2), stamp, 2)
        header = {"stamp": fields.time_fields(stamp, 2), "frame_id": ""}
        return {
            TOPICS.states: arm,
            TOPICS.finger_states: hand,
            TOPICS.wrench: {"header": header, "wrench": {"force": force, "torque": force}},
            "/front": fields.image_fields(picture, stamp, 2),
            "/success": {"data": False},
            "/ready": {"data": False},
            "/init": {"data": 0},
            "/instruction": {"data": "pick"},
        }

    def hear(self, seconds: float, without: str = "", change: Any = None) -> Arm:
        for _ in range(round(seconds / 0.01)):
            self.bus.time += 0.01
            messages = self.messages()
            if change is not None:
                change(messages)
            for topic, message in messages.items():
                if topic != without:
                    self.bus.heard[topic](message)
        return self

    def problem(self) -> str:
        """What the safety filter says of the state, or why the policy sees nothing."""
        if wrong := state_problem(CONFIG, self.bus.time, self.robot.state()):
            return wrong
        decoder = DeltaDecoder(SPACE, 25.0, **BOX)
        decoder.start(self.bus.time, self.robot.state())
        try:
            self.robot.observe(decoder)
        except NotReadyError as error:
            return str(error)
        return ""


def put(message: dict[str, Any], path: str, value: Any) -> None:
    """Sets the element of a message that ``path`` names."""
    *way, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    inner: Any = message
    for key in way:
        inner = inner[key]
    inner[last] = value


STAMPED = (TOPICS.states, TOPICS.wrench, "/front")
PLACES = [(topic, f"header.stamp.{key}") for topic in STAMPED for key in ("sec", "nanosec")]
PLACES += [(TOPICS.states, "position.0"), (TOPICS.states, "velocity.6")]
PLACES += [(TOPICS.wrench, "wrench.force.z"), (TOPICS.finger_states, "position.0")]


@pytest.mark.parametrize(("topic", "path"), PLACES)
def test_a_bad_number_is_told_and_switches_no_check_off(topic: str, path: str) -> None:
    for value in BAD:
        arm = Arm().hear(1.2)
        assert arm.problem() == ""
        arm.hear(0.01, change=lambda m, value=value: put(m[topic], path, value))
        # A finite angle, velocity or force may be right: the filter compares it with the command.
        # A nanosecond less is no fault either.
        finite = math.isfinite(value)
        may_be = "nanosec" in path and value == -1.0
        may_be |= finite and path.startswith(("position", "velocity")) and topic == TOPICS.states
        may_be |= path.startswith("wrench") and value == -1.0
        assert may_be or arm.problem(), f"{topic} {path} = {value} is not told"
        # A source that stops is noticed afterwards.
        if topic != TOPICS.finger_states:
            assert arm.hear(0.5, without=topic).problem(), f"{topic} {path} = {value}"


@pytest.mark.parametrize(
    ("topic", "told"),
    [
        (TOPICS.states, "no fresh state of the robot"),
        (TOPICS.wrench, "no fresh force at the hand"),
        ("/front", "no fresh picture of camera front"),
    ],
)
def test_a_topic_that_stops_is_noticed(topic: str, told: str) -> None:
    arm = Arm().hear(1.2)
    assert arm.problem() == ""
    assert told in arm.hear(0.5, without=topic).problem()


def test_a_wrench_that_never_comes_is_noticed_before_and_after_the_start() -> None:
    arm = Arm().hear(0.5, without=TOPICS.wrench)
    with pytest.raises(UserError, match="Nothing came on /wrench within"):
        arm.robot.wait(0.1)
    assert "reports no force at the hand" in arm.problem()


@pytest.mark.parametrize(
    ("topic", "value"),
    [("/success", math.nan), ("/success", 1.0), ("/init", math.nan), ("/instruction", 5)],
)
def test_a_value_of_another_type_is_told(topic: str, value: Any) -> None:
    arm = Arm().hear(0.1, change=lambda m: put(m[topic], "data", value))
    assert "a message has the data" in arm.problem() and not arm.robot.solved()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -5.0])
def test_a_stamp_that_is_no_time_changes_nothing(value: float) -> None:
    stamps = StampConverter("the joint states", 0.5)

    def measured(stamp: float, now: float) -> float | None:
        return stamps.measured({"stamp": {"sec": stamp, "nanosec": 0}}, now)

    for k in range(200):
        measured(50 + 0.01 * k, 0.01 * k)
    with pytest.raises(UserError, match=r"a time is|which is no time"):
        measured(value, 2.0)
    # It still knows what is old, and what is too far ahead.
    assert measured(52.1, 2.4) == pytest.approx(2.1, abs=1e-2)
    with pytest.raises(UserError, match="jumped"):
        measured(60.0, 2.7)


def test_a_topic_says_that_the_scene_is_ready_for_a_reset() -> None:
    arm = Arm().hear(0.5)
    connected = ConnectedRobot(arm.robot, arm.bus, CONFIG, arm.robot.begin, False, False)
    judge = open_judge(connected, "", simulated=True)
    assert judge is not None and not judge(dict)
    arm.hear(0.01, change=lambda m: m["/ready"].update(data=True))
    assert judge(dict)
    arm.hear(0.01)
    assert not judge(dict)
    # An arm without that topic has nobody who tells.
    silent = RosRobot(Here(), Topics(), "fr3", arm.bus, SPACE, {})
    connected = ConnectedRobot(silent, arm.bus, CONFIG, silent.begin, False, False)
    assert open_judge(connected, "", simulated=True) is None
    practice = ResetOptions(practice=True, home=(0.45, 0.0, 0.25))
    given: dict[str, Any] = {"facts": {}, "decoder": object, "ask": print, "described": {}}
    with ExitStack() as opened, pytest.raises(UserError, match="Nobody tells whether the scene"):
        open_between(opened, connected, practice, **given)


def test_what_is_asked_for_is_of_the_present_task() -> None:
    arm = Arm().hear(0.5)
    connected = ConnectedRobot(arm.robot, arm.bus, CONFIG, arm.robot.begin, False, False)
    judge = open_judge(connected, "", simulated=True)
    between = Between(connected, None, ResetOptions(practice=True), print, judge)
    robot = InTurn(arm.robot, between, "put it back")
    decoder = DeltaDecoder(SPACE, 25.0, **BOX)
    decoder.start(arm.bus.time, robot.state())
    arm.hear(0.01, change=lambda m: m["/success"].update(data=True))
    assert robot.prompt() == robot.observe(decoder)["prompt"] == "pick" and robot.solved()
    between.state.back = True
    assert robot.prompt() == robot.observe(decoder)["prompt"] == "put it back"
    assert not robot.solved()
    arm.hear(0.01, change=lambda m: m["/ready"].update(data=True))
    assert robot.solved()
