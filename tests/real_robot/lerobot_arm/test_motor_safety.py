"""The safety filter of an arm whose shape is not known: its limits, its targets, its settings."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from lerobot_arm import JOINTS

from embodyrl.errors import UserError
from embodyrl.real_robot.control.any_safety import decoder_for, require_motors
from embodyrl.real_robot.control.joint_safety import SLACK, JointSafetyConfig
from embodyrl.real_robot.control.joint_space import JointDecoder, joint_space
from embodyrl.real_robot.control.limit_monitor import LimitMonitor
from embodyrl.real_robot.control.messages import (
    Command,
    JointTarget,
    Mode,
    RobotState,
    Target,
)
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.real_robot.env.config import RobotConfig, motors_spec
from embodyrl.real_robot.policy_link.metadata import policy_facts

SAFETY = JointSafetyConfig(joints=JOINTS)
FACTS = policy_facts(motors_spec(RobotConfig(robot="lerobot"), SAFETY.space))
START = np.zeros(6)
TICK = SAFETY.tick


def still(now: float, q: np.ndarray = START, **fields: Any) -> RobotState:
    return RobotState(now, q, 0.0 * q, **fields)


def running(safety: JointSafetyConfig = SAFETY) -> SafetyFilter:
    guard = SafetyFilter(safety)
    guard.start(0.0, still(0.0))
    guard.run(0.0)
    return guard


@pytest.mark.parametrize("seed", range(8))
def test_no_target_makes_it_break_a_limit(seed: int) -> None:
    """Jumps, ends, stops and takeovers, with motors that follow, lag behind or hang."""
    rng = np.random.default_rng(seed)
    guard = running()
    monitor = LimitMonitor(guard.robot_limits, TICK)
    space = SAFETY.space
    q = START.copy()
    hangs = rng.random(6) < 0.3
    goal = q
    furthest = np.zeros(6)
    for k in range(1, 1500):
        now = k * TICK
        if rng.random() < 0.05:
            goal = rng.uniform(space.low - 0.5, space.high + 0.5)
        if rng.random() < 0.01:
            guard.takeover(now) if rng.random() < 0.5 else guard.hold(now, "stale: a test")
        if guard.mode == Mode.HOLD and rng.random() < 0.1:
            guard.run(now)
        target = JointTarget(now, goal, human=guard.mode == Mode.HUMAN)
        command = guard.tick(now, still(now, q), target)
        monitor.see(command)
        # The motors follow with a delay, but some do not move at all.
        q = np.where(hangs, q, q + 0.3 * (command.q - q))
        furthest = np.maximum(furthest, np.abs(command.q - q))
    assert monitor.violated == {}
    assert monitor.peak["dq"] > 0.5  # it was moved
    # A motor that hangs is told no more than ``max_lead`` beyond where it is.
    assert furthest.max() <= SAFETY.max_lead + 1e-6
    assert guard.mode not in (Mode.FAULT, Mode.ESTOP)


def test_told_positions_stay_in_the_range() -> None:
    guard = running()
    q = START
    for k in range(1, 400):
        command = guard.tick(k * TICK, still(k * TICK, q), JointTarget(k * TICK, START + 9.0))
        q = command.q
    assert np.allclose(q, SAFETY.space.high, atol=1e-3)
    assert (q <= SAFETY.space.high + 1e-3).all()


def test_a_gripper_that_holds_something_stops_no_other_motor() -> None:
    guard = running()
    q = START
    goal = np.array([0.8, 0.0, 0.0, 0.0, 0.0, 1.0])
    for k in range(1, 200):
        command = guard.tick(k * TICK, still(k * TICK, q), JointTarget(k * TICK, goal))
        q = np.append(command.q[:5], 0.2)  # the fingers are stopped by what they hold
        if k == 10:
            q[5] = 0.2
    assert command.q[0] == pytest.approx(0.8, abs=1e-3)
    assert command.q[5] == pytest.approx(0.2 + SAFETY.max_lead, abs=1e-2)
    assert guard.mode == Mode.RUN


def test_a_stop_comes_to_rest_and_stays() -> None:
    guard = running()
    q = START
    for k in range(1, 200):
        if k == 20:
            guard.estop("a test")
        command = guard.tick(k * TICK, still(k * TICK, q), JointTarget(k * TICK, START + 0.5))
        q = command.q
        if k == 19:
            assert np.abs(command.dq).max() > 0.3
    assert command.mode == Mode.ESTOP
    assert np.abs(command.dq).max() == 0.0


@pytest.mark.parametrize(
    ("state", "target", "words"),
    [
        (still(TICK, START[:5]), None, "is not 6 finite"),
        (still(TICK, START + np.nan), None, "is not 6 finite"),
        (still(TICK, trouble="LeRobot's robot failed (no status packet)"), None, "status packet"),
        (still(-1.0), None, "no fresh state"),
        (still(TICK, START + 0.6), None, "blocked"),
        (still(TICK), JointTarget(TICK, START[:3]), "target of shape"),
        (still(TICK), JointTarget(TICK, START + math.inf), "not finite"),
        (still(TICK), JointTarget(math.nan, START), "stamp"),
        (still(TICK), Target(TICK, np.zeros(3), np.eye(3), 0.0), "no target of this arm"),
    ],
)
def test_what_is_wrong_is_a_fault(state: RobotState, target: Any, words: str) -> None:
    guard = running()
    guard.tick(TICK, state, target)
    assert guard.mode == Mode.FAULT
    assert words in guard.reason


def test_a_franka_takes_no_positions_of_motors() -> None:
    guard = SafetyFilter(SafetyConfig((0.2, -0.4, 0.0), (0.8, 0.4, 0.8), max_force=None))
    q = np.array([0.0, -0.1, 0.0, -2.35, 0.0, 2.25, np.pi / 4])
    guard.start(0.0, still(0.0, q))
    guard.run(0.0)
    guard.tick(0.01, still(0.01, q), JointTarget(0.01, q))
    assert guard.mode == Mode.FAULT
    assert "no target of this arm" in guard.reason


def test_an_arm_beyond_its_range_does_not_start() -> None:
    guard = SafetyFilter(SAFETY)
    q = START.copy()
    q[2] = math.radians(98.0)
    with pytest.raises(UserError, match=r"elbow_flex is at 98.0 degrees.* from -95 to 95"):
        guard.start(0.0, still(0.0, q))
    # A gripper that is closed to the last percent does.
    guard.start(0.0, still(0.0, np.array([0, 0, 0, 0, 0, -SLACK / 2])))


# ---- Actions.


def test_actions_are_shares_of_the_ranges() -> None:
    decoder = decoder_for(FACTS, 10.0, SAFETY)
    assert isinstance(decoder, JointDecoder)
    decoder.start(0.0, still(0.0))
    decoder.act(0.0, np.array([1, -1, 0, 0, 0, 1], np.float32), still(0.0))
    assert decoder.q / SAFETY.space.unit == pytest.approx([110, -100, 0, 0, 0, 100])
    # In the middle of the step it is half way there.
    assert decoder.target(0.05, True).q == pytest.approx(decoder.q / 2)
    assert decoder.target(1.0, False).stamp == 0.05
    assert "shoulder_lift -100" in decoder.told()["told to be at"]
    assert SAFETY.space.share(decoder.q) == pytest.approx([1, -1, 0, 0, 0, 1])
    decoder.act(0.2, np.full(6, np.nan, np.float32), still(0.0))
    assert np.isnan(decoder.target(0.3, True).q).all()


def test_the_way_back_keeps_the_gripper() -> None:
    decoder = decoder_for(FACTS, 10.0, SAFETY)
    q = np.full(6, 0.5)
    command = Command(0.0, 0.2 * q, 0 * q, 0 * q, 0.0, Mode.HUMAN)
    back = SAFETY.space.position(decoder.back_to(q, command))
    assert back == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.5, 0.1], abs=1e-6)


def test_a_policy_says_which_motors_it_moves() -> None:
    assert joint_space(FACTS) == SAFETY.space
    other = replace(SAFETY, joints={**JOINTS, "elbow_flex": [-90, 95]})
    with pytest.raises(UserError, match=r"trained with elbow_flex -95 to 95.*has elbow_flex -90"):
        decoder_for(FACTS, 10.0, other)
    fewer = JointSafetyConfig(joints={k: v for k, v in JOINTS.items() if k != "gripper"})
    with pytest.raises(UserError, match="trained with 6 motors, and"):
        require_motors(SAFETY.space, fewer.space)


@pytest.mark.parametrize(
    "facts",
    [
        {"env": "mujoco/pick", "control_mode": "ee_delta_pos"},
        {**FACTS, "conventions": {}},
        {**FACTS, "conventions": {"state": ["hand_position:3"]}},
        {**FACTS, "conventions": {"state": ["pan x to 3 degrees:1"]}},
        {**FACTS, "conventions": {"state": ["pan 3 to 3 degrees:1"]}},
        {**FACTS, "conventions": {"state": ["pan 0 to inf degrees:1"]}},
        {**FACTS, "conventions": {"state": ["pan nan to 3 degrees:1"]}},
    ],
)
def test_another_policy_is_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"no positions of motors|are no numbers"):
        decoder_for(facts, 10.0, SAFETY)


# ---- Settings.


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"joints": {}}, "safety.joints must give each motor its range"),
        ({"joints": {"pan": [0, 1]}}, "safety.joints.pan is [0, 1]"),
        ({"joints": {"pan": [5, -5]}}, "safety.joints.pan"),
        ({"joints": {"pan": [0]}}, "safety.joints.pan"),
        ({"joints": {"pan": [0, math.nan]}}, "safety.joints.pan"),
        ({"joints": {"pan": [0, True]}}, "safety.joints.pan"),
        ({"joints": {"pan": ["a", "b"]}}, "safety.joints.pan"),
        ({"percent": ("jaw",)}, "safety.percent names jaw"),
        ({"home": {"jaw": 0.0}}, "safety.home names jaw"),
        ({"home": {"gripper": 120.0}}, "safety.home.gripper is 120.0"),
        ({"speed": math.inf}, "safety.speed is inf"),
        ({"acceleration": 0.0}, "safety.acceleration is 0.0"),
        ({"jerk": math.nan}, "safety.jerk is nan"),
        ({"jerk": 20.0}, "safety.jerk is 20.0"),
        ({"acceleration": 50.0}, "safety.acceleration is 50.0"),
        ({"tick": 0.1}, "safety.tick is 0.1"),
        ({"max_error": 0.1}, "safety.max_error is 0.1"),
        ({"max_state_age": 0.001}, "safety.max_state_age is 0.001"),
        ({"resume": "never"}, "resume is 'never'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        JointSafetyConfig(**{"joints": JOINTS, **settings})


@pytest.mark.parametrize("tick", [0.005, 0.02, 0.05])
@pytest.mark.parametrize(("acceleration", "jerk"), [(0.1, 1.0), (1, 100), (10, 100), (10, 1e4)])
def test_every_setting_lets_the_arm_reach_its_ends(
    acceleration: float, jerk: float, tick: float
) -> None:
    safety = replace(SAFETY, acceleration=acceleration, jerk=jerk, tick=tick)
    guard = running(safety)
    monitor = LimitMonitor(guard.robot_limits, tick)
    q = START
    for k in range(1, round(40.0 / tick)):
        command = guard.tick(k * tick, still(k * tick, q), JointTarget(k * tick, START - 9.0))
        monitor.see(command)
        q = command.q
    assert np.allclose(q, safety.space.low, atol=2e-3)
    assert monitor.violated == {}
