"""The safety filter: no limit broken by any input, and what each fault makes of a moving arm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from embodyrl.errors import UserError
from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.bound_monitor import BoundMonitor
from embodyrl.real_robot.control.fuzz import BOX, fuzz, fuzz_bounds
from embodyrl.real_robot.control.fuzz_messages import FIELDS, VALUES, fuzz_messages, try_message
from embodyrl.real_robot.control.limit_monitor import LimitMonitor
from embodyrl.real_robot.control.limits import FR3, PANDA, limits_of
from embodyrl.real_robot.control.messages import Mode, RobotState, Target
from embodyrl.real_robot.control.safety import Event, SafetyFilter
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.sims.mujoco import kinematics as batched

TICK = 0.01
AWAY = np.array([0.65, 0.2, 0.4])


def still(stamp: float, q: Any = kinematics.HOME, **changes: Any) -> RobotState:
    """A state at rest with no force at the hand."""
    return replace(RobotState(stamp, q, np.zeros(7), force=np.zeros(3)), **changes)


class Arm:
    """A filter with a robot that follows perfectly, and what came out."""

    def __init__(self, **config: Any) -> None:
        self.events: list[Event] = []
        self.guard = SafetyFilter(SafetyConfig(**{**BOX, **config}), self.events.append)
        self.watch = LimitMonitor(self.guard.robot_limits, self.guard.config.tick)
        self.now = 0.0
        self.noise = np.random.default_rng(0)  # of the force
        self.guard.start(self.now, still(self.now))

    def target(self, **changes: Any) -> Target:
        return replace(Target(self.now, AWAY, kinematics.DOWN, 0.08), **changes)

    def go(
        self,
        ticks: int,
        target: Callable[[], Target | None] | None = None,
        state: Callable[[RobotState], RobotState] = lambda s: s,
    ) -> Arm:
        """Ticks on, with the target or state that a fault makes of it."""
        for _ in range(ticks):
            self.now += self.guard.config.tick
            last = self.guard.command
            assert last is not None
            force = self.noise.normal(0.0, 0.1, 3)
            measured = state(RobotState(self.now, last.q, last.dq, force=force))
            self.watch.see(self.guard.tick(self.now, measured, (target or self.target)()))
        return self

    def moving(self) -> Arm:
        """At full speed towards a far corner."""
        self.guard.run(self.now)
        self.go(12)
        assert self.guard.mode == Mode.RUN and self.speed > 0.3
        return self

    @property
    def speed(self) -> float:
        assert self.guard.command is not None
        return float(np.abs(self.guard.command.dq).max())

    def seconds_to_stop(self, **kwargs: Any) -> float:
        for ticks in range(100):
            if self.speed < 1e-6:
                return ticks * self.guard.config.tick
            self.go(1, **kwargs)
        raise AssertionError(f"still moving at {self.speed} rad/s")


def test_single_arm_kinematics_agree_with_the_simulators() -> None:
    rng = np.random.default_rng(0)
    for q in rng.uniform(batched.JOINT_LOWER, batched.JOINT_UPPER, (20, 7)):
        for mine, theirs in zip(kinematics.forward(q), batched.forward(q[None]), strict=True):
            np.testing.assert_allclose(mine, theirs[0], atol=1e-12)
        np.testing.assert_allclose(kinematics.tip(q.tolist()), kinematics.forward(q)[0], atol=1e-12)
    for turn in (
        *rng.normal(size=(20, 3)),
        np.array([np.pi, 0, 0]),
        np.array([0, np.pi - 1e-8, 0]),
    ):
        turn = turn * min(1.0, np.pi / np.linalg.norm(turn))
        back = kinematics.rotation_vector(kinematics.exp_rotation(turn))
        np.testing.assert_allclose(
            kinematics.exp_rotation(back), kinematics.exp_rotation(turn), atol=1e-6
        )


def test_velocity_limits_are_those_of_the_data_sheet() -> None:
    low, high = FR3.velocity_bounds(np.array([2.5, 0, 0, -1.5, 0, 2.0, -3.0]))
    assert high[0] == pytest.approx(-0.30 + np.sqrt(2 * 6.0 * 0.2437))
    assert high[1] == pytest.approx(2.62) and low[1] == pytest.approx(-2.62)
    assert low[6] == pytest.approx(-(-0.35 + np.sqrt(2 * 17 * 0.0159)))
    assert (FR3.velocity_bounds(FR3.q_max)[1] == 0).all() and (
        PANDA.velocity_bounds(PANDA.q_min)[0] == 0
    ).all()
    with pytest.raises(UserError, match="Did you mean 'fr3'"):
        limits_of("fr33")


@pytest.mark.parametrize("robot", ["fr3", "panda"])
@pytest.mark.parametrize(
    ("tick", "wide"), [(0.01, False), (0.01, True), (0.001, False), (0.002, True)]
)
def test_no_command_breaks_a_limit(robot: str, tick: float, wide: bool) -> None:
    watch, bounds, modes = fuzz(robot, 2500, seed=3, tick=tick, wide=wide)
    assert not watch.violated and not bounds.violated, (watch.peak, bounds.peak)
    assert watch.peak["ddq"] > 0.99  # it was driven hard
    assert modes["run"] > 1000 and modes["hold"] > 50


@pytest.mark.slow
@pytest.mark.parametrize("robot", ["fr3", "panda"])
def test_no_command_breaks_a_limit_in_a_hundred_thousand(robot: str) -> None:
    for seed in range(4):
        watch, bounds, _ = fuzz(robot, 12_500, seed=100 + seed, wide=seed % 2 == 0)
        assert not watch.violated and not bounds.violated, (watch.peak, bounds.peak)


def test_every_bound_holds_for_the_commands_whatever_the_settings() -> None:
    """Tilt, workspace, speed and turning of the hand, and the lead, by forward kinematics."""
    assert fuzz_bounds(6, seed=0) == []
    # Settings under which the hand would turn three times too fast, without the filter's look ahead.
    assert fuzz_bounds(1, seed=9, ticks=500) == []


def test_a_hand_that_is_pulled_out_of_reach_keeps_its_tilt() -> None:
    """Out of reach, inverse kinematics gives up the rotation for the position."""
    arm = Arm(box_low=(-2, -2, -2), box_high=(2, 2, 2), max_target_age=10.0)
    watch = BoundMonitor(arm.guard.config)
    arm.guard.run(0.0)
    for goal in ((1.5, 0.0, 1.2), (0.2, 1.5, 0.1), (-1.0, -1.0, 0.5), (0.0, 0.0, 1.5)):
        for _ in range(100):
            measured = arm.guard.command.q  # type: ignore[union-attr]
            arm.go(1, lambda goal=goal: arm.target(position=np.array(goal)))
            watch.see(arm.guard.command, measured)  # type: ignore[arg-type]
    assert not watch.violated and not arm.watch.violated, watch.peak


def test_the_monitor_sees_commands_that_break_a_bound() -> None:
    arm = Arm()
    command = arm.guard.command
    assert command is not None
    tilted, moved = kinematics.HOME + 0.8 * np.eye(7)[5], kinematics.HOME + 0.3 * np.eye(7)[0]
    for q, broken in ((tilted, "tilt"), (moved, "speed"), (moved, "lead"), (moved, "turn")):
        watch = BoundMonitor(arm.guard.config)
        watch.see(command, kinematics.HOME)
        watch.see(replace(command, q=q), kinematics.HOME)
        assert broken in watch.violated
    watch = BoundMonitor(arm.guard.config)
    watch.see(replace(command, q=np.full(7, np.nan)), kinematics.HOME)
    assert "tilt" in watch.violated
    joints = LimitMonitor(FR3, TICK)
    joints.see(replace(command, dq=np.full(7, np.nan)))
    joints.see(command)
    assert "dq" in joints.violated


@pytest.mark.parametrize("field", FIELDS)
def test_one_bad_number_in_a_message_is_a_fault_in_words_and_then_forgotten(field: str) -> None:
    assert [wrong for value in VALUES if (wrong := try_message(field, value, seed=0))] == []


def test_random_bad_messages() -> None:
    assert fuzz_messages(10, seed=7) == []


def test_the_watch_sees_what_an_unfiltered_chunk_does() -> None:
    """The control: 15 Hz chunks of 8 with jumps of .05 rad, in straight lines at 100 Hz."""
    watch, q = LimitMonitor(FR3, TICK), kinematics.HOME.copy()
    path = [q + 0.05 * (k // 8) + 0.01 * k for k in range(32)]
    times = np.arange(0, 31 / 15, TICK)
    line = np.stack(
        [np.interp(times * 15, np.arange(32), np.array(path)[:, j]) for j in range(7)], axis=1
    )
    speed = np.gradient(line, TICK, axis=0)
    push = np.gradient(speed, TICK, axis=0)
    arm = Arm()
    command = arm.guard.command
    assert command is not None
    for k in range(len(times)):
        watch.see(replace(command, q=line[k], dq=speed[k], ddq=push[k]))
    assert watch.violated["ddq"] > 2 and "motion" in watch.violated


def test_it_arrives_where_it_is_sent() -> None:
    arm = Arm(max_target_age=10.0)
    arm.guard.run(0.0)
    arm.go(300)
    assert arm.guard.command is not None
    place, rotation, _ = kinematics.forward(arm.guard.command.q)
    np.testing.assert_allclose(place, AWAY, atol=2e-3)
    np.testing.assert_allclose(rotation, kinematics.DOWN, atol=2e-2)
    assert not arm.watch.violated


FAULTS: dict[str, tuple[dict[str, Any], Mode, str]] = {
    "no target": ({"target": lambda: None}, Mode.HOLD, "stale"),
    "nan": (
        {"target": lambda: Target(9, np.full(3, np.nan), kinematics.DOWN, 0.0)},
        Mode.FAULT,
        "not finite",
    ),
    "shape": (
        {"target": lambda: Target(9, np.zeros(4), kinematics.DOWN, 0.0)},
        Mode.FAULT,
        "shapes",
    ),
    "no rotation": (
        {"target": lambda: Target(9, AWAY, np.ones((3, 3)), 0.0)},
        Mode.FAULT,
        "rotation",
    ),
    "reflex": (
        {"state": lambda s: replace(s, reflex="joint_velocity_violation")},
        Mode.FAULT,
        "reflex",
    ),
    "collision": (
        {"state": lambda s: replace(s, force=np.array([0.0, 0.0, 45.0]))},
        Mode.FAULT,
        "force: 45 N",
    ),
    "force unknown": (
        {"state": lambda s: replace(s, force=np.full(3, np.nan))},
        Mode.FAULT,
        "force",
    ),
    "state nan": ({"state": lambda s: replace(s, q=np.full(7, np.nan))}, Mode.FAULT, "finite"),
    "state old": (
        {"state": lambda s: replace(s, stamp=s.stamp - 0.2)},
        Mode.FAULT,
        "no fresh state",
    ),
    "state frozen": (
        {"state": lambda s: replace(s, q=kinematics.HOME)},
        Mode.FAULT,
        "away from where",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_stops_a_moving_arm(fault: str) -> None:
    how, mode, reason = FAULTS[fault]
    arm = Arm(max_error=0.1).moving()
    before = arm.now
    if "target" in how:
        given = how["target"]()
        how = {"target": lambda: replace(given, stamp=arm.now) if given else None}
    while arm.guard.mode == Mode.RUN:
        arm.go(1, **how)
    event = arm.events[-1]
    assert (event.after, arm.guard.mode) == (mode, mode) and reason in event.reason
    # A stale target is noticed within two ticks of its age limit; all else at once or after one
    # tracking error.
    allowed = {"no target": arm.guard.config.max_target_age + 2 * TICK, "state frozen": 0.2}.get(
        fault, TICK
    )
    assert event.stamp - before <= allowed + 1e-9
    assert arm.seconds_to_stop(**how) < 0.3
    assert not arm.watch.violated, arm.watch.peak
    still = arm.guard.command
    arm.go(5, **how)
    assert arm.guard.command is not None and still is not None
    np.testing.assert_array_equal(arm.guard.command.q, still.q)


def test_estop_wins_and_stays() -> None:
    arm = Arm().moving()
    arm.guard.estop("button")
    arm.go(1)
    assert arm.guard.mode == Mode.ESTOP and arm.events[-1].reason == "button"
    arm.guard.takeover(arm.now)
    arm.go(1, state=lambda s: replace(s, reflex="x"))
    assert arm.guard.mode == Mode.ESTOP
    with pytest.raises(UserError, match="still moves"):
        arm.guard.clear(arm.now, still(arm.now))
    arm.seconds_to_stop()
    with pytest.raises(UserError, match="cannot run: it is in estop"):
        arm.guard.run(arm.now)
    with pytest.raises(UserError, match="must be cleared first"):
        arm.guard.start(arm.now, still(arm.now))
    assert arm.guard.command is not None
    arm.guard.clear(arm.now, still(arm.now, arm.guard.command.q))
    assert arm.guard.mode == Mode.HOLD
    arm.guard.run(arm.now)
    assert arm.go(1).guard.mode == Mode.RUN and not arm.watch.violated


@pytest.mark.parametrize("allowed", [False, True])
def test_a_reflex_needs_an_explicit_policy(allowed: bool) -> None:
    arm = Arm(recover_reflex=allowed).moving()
    arm.go(1, state=lambda s: replace(s, reflex="cartesian_reflex"))
    arm.seconds_to_stop()
    arm.go(500)
    assert arm.guard.mode == Mode.FAULT  # it never comes back by itself
    state = still(arm.now, arm.guard.command.q)  # type: ignore[union-attr]
    if allowed:
        arm.guard.clear(arm.now, state)
        assert arm.guard.mode == Mode.HOLD
    else:
        with pytest.raises(UserError, match="stopped itself"):
            arm.guard.clear(arm.now, state)


def test_a_force_that_is_needed_must_come_and_keep_coming() -> None:
    for state, words in (
        (lambda s: replace(s, force=None), "reports no force at the hand, but safety.max_force"),
        (lambda s: replace(s, force_stamp=s.stamp - 0.2), "no fresh force at the hand for 0.200 s"),
        (lambda s: replace(s, force_stamp=np.nan), "no fresh force at the hand"),
        (lambda s: replace(s, force=np.zeros(2)), "not three finite numbers"),
    ):
        arm = Arm().moving().go(1, state=state)
        assert arm.guard.mode == Mode.FAULT and words in arm.guard.reason
    free = Arm(max_force=None).moving().go(1, state=lambda s: replace(s, force=None))
    assert free.guard.mode == Mode.RUN


def test_a_force_that_repeats_under_new_stamps_is_a_fault() -> None:
    frozen = lambda s: replace(s, force=np.array([0.3, -0.1, 1.7]))  # noqa: E731
    arm = Arm(max_target_age=10.0)
    arm.guard.run(0.0)
    # Half a second may be chance; what is longer is none.
    assert arm.go(50, state=frozen).guard.mode == Mode.RUN
    arm.go(3, state=frozen)
    assert arm.guard.mode == Mode.FAULT
    assert arm.guard.reason.startswith("the measured force at the hand is exactly the same for")
    # It cannot be cleared before the force comes alive.
    arm.seconds_to_stop(state=frozen)
    assert arm.guard.command is not None
    good = still(arm.now, arm.guard.command.q)
    with pytest.raises(UserError, match="exactly the same"):
        arm.guard.clear(arm.now, frozen(good))
    arm.guard.clear(arm.now, good)
    assert arm.guard.mode == Mode.HOLD


def test_a_force_may_come_seldom_or_without_noise_where_that_is_said() -> None:
    # The same sample in several ticks is no new one: its age is what counts.
    slow = Arm(max_state_age=1.0)
    slow.guard.run(0.0)
    seldom = lambda s: replace(s, force=np.zeros(3), force_stamp=s.stamp // 0.8 * 0.8)  # noqa: E731
    assert slow.go(75, state=seldom).guard.mode == Mode.RUN
    for config in ({"max_force_repeat": None}, {"max_force": None}):
        arm = Arm(**config)
        arm.guard.run(0.0)
        same = lambda s: replace(s, force=np.zeros(3))  # noqa: E731
        assert arm.go(120, state=same).guard.mode == Mode.RUN


def test_a_fault_is_not_cleared_while_something_pushes_or_the_state_is_old() -> None:
    arm = Arm().moving().go(1, state=lambda s: replace(s, force=np.full(3, 40.0)))
    arm.seconds_to_stop()
    assert arm.guard.command is not None
    good = still(arm.now, arm.guard.command.q)
    for bad, words in (
        (replace(good, force=np.full(3, 40.0)), "force: 69 N"),
        (replace(good, force=None), "reports no force"),
        (replace(good, stamp=arm.now - 1.0), "no fresh state"),
        (replace(good, dq=np.full(7, 0.2)), "still moves"),
    ):
        with pytest.raises(UserError, match=words):
            arm.guard.clear(arm.now, bad)
        assert arm.guard.mode == Mode.FAULT
    arm.guard.clear(arm.now, good)
    assert arm.guard.mode == Mode.HOLD


def test_a_cleared_arm_goes_to_where_it_was_measured_within_its_limits() -> None:
    """It was blocked: the commands may not jump to the measured joints."""
    arm = Arm(max_error=0.1).moving()
    stuck = arm.guard.command.q  # type: ignore[union-attr]
    while arm.guard.mode == Mode.RUN:
        arm.go(1, state=lambda s: replace(s, q=stuck + 1e-5 * arm.now))
    arm.seconds_to_stop(state=lambda s: replace(s, q=stuck))
    before = arm.guard.command.q  # type: ignore[union-attr]
    assert arm.guard.mode == Mode.FAULT and np.abs(before - stuck).max() > 0.1
    arm.guard.clear(arm.now, still(arm.now, stuck))
    for k in range(100):
        arm.go(1, state=lambda s, k=k: replace(s, q=stuck + 1e-7 * k))
    assert arm.guard.mode == Mode.HOLD and not arm.watch.violated, arm.watch.peak
    np.testing.assert_allclose(arm.guard.command.q, stuck, atol=1e-3)  # type: ignore[union-attr]


@pytest.mark.parametrize("reason", ["", "button"])
def test_a_stop_stops_whatever_its_reason(reason: str) -> None:
    arm = Arm().moving()
    arm.guard.estop(reason)
    arm.go(1)
    assert arm.guard.mode == Mode.ESTOP and arm.guard.reason


def test_a_person_takes_over_within_a_tick() -> None:
    arm = Arm().moving()
    arm.guard.takeover(arm.now)
    back = np.array([0.4, -0.2, 0.2])
    arm.go(1, lambda: arm.target(position=back, human=True))
    assert arm.guard.mode == Mode.HUMAN
    arm.go(200, lambda: arm.target(position=back, human=True))
    assert arm.guard.command is not None
    np.testing.assert_allclose(kinematics.tip(arm.guard.command.q), back, atol=3e-3)
    arm.go(15)  # the policy's targets are not followed
    assert arm.guard.mode == Mode.HOLD and not arm.watch.violated
    arm.guard.takeover(arm.now)
    arm.guard.release(arm.now)
    assert arm.guard.mode == Mode.HOLD


@pytest.mark.parametrize("jump", [0.05, -0.3, 3600.0])
def test_a_stall_or_a_jump_of_the_clock_holds(jump: float) -> None:
    arm = Arm().moving()
    arm.now += jump
    arm.go(1)
    assert arm.guard.mode == Mode.HOLD and arm.events[-1].reason
    assert arm.seconds_to_stop() < 0.3 and not arm.watch.violated


def test_reordered_and_repeated_targets_change_nothing() -> None:
    plain, shuffled = Arm().moving(), Arm().moving()
    plain.go(20)
    for k in range(20):
        if k % 3 == 1:  # an old one comes late, with something else in it
            shuffled.go(1, lambda: shuffled.target(stamp=shuffled.now - 0.05, position=AWAY - 0.2))
        else:
            shuffled.go(1)
    assert shuffled.guard.command is not None and plain.guard.command is not None
    np.testing.assert_allclose(shuffled.guard.command.q, plain.guard.command.q, atol=1e-9)


def test_a_hold_ends_by_itself_only_if_told_so() -> None:
    for resume, mode in (("person", Mode.HOLD), ("fresh_target", Mode.RUN)):
        arm = Arm(resume=resume).moving()
        arm.go(30, lambda: None)
        assert arm.guard.mode == Mode.HOLD
        arm.go(2)
        assert arm.guard.mode == mode and not arm.watch.violated


@pytest.mark.parametrize(
    "goal",
    [
        (2.0, 0.0, 0.3),
        (0.5, 3.0, 0.3),
        (0.5, 0.0, -1.0),
        (0.0, 0.0, 0.3),
        (0.72, 0.35, 0.6),
        (1e6, 1e6, -1e6),
    ],
)
def test_the_hand_stays_in_the_workspace(goal: tuple[float, float, float]) -> None:
    """Targets outside, beyond reach, and above the base, where the arm is singular."""
    arm = Arm(max_target_age=10.0, ee_speed=3.0)
    arm.guard.run(0.0)
    low, high = np.array(BOX["box_low"]) - 7e-3, np.array(BOX["box_high"]) + 7e-3
    for _ in range(250):
        arm.go(1, lambda: arm.target(position=np.array(goal)))
        place = np.array(kinematics.tip(arm.guard.command.q))  # type: ignore[union-attr]
        assert (place > low).all() and (place < high).all(), place
    assert not arm.watch.violated and arm.speed < 0.1


def test_near_a_joints_end_it_slows_down_in_time() -> None:
    arm = Arm(
        box_low=(-1.0, -1.0, -0.5), box_high=(1.0, 1.0, 1.3), max_target_age=10.0, max_tilt=3.1
    )
    arm.guard.run(0.0)
    arm.go(600, lambda: arm.target(position=np.array([-0.5, -0.1, 0.2])))
    assert not arm.watch.violated and arm.speed < 0.05


def test_a_blocked_arm_stores_up_no_jerk() -> None:
    arm = Arm(max_lead=0.05, max_error=0.3, max_target_age=10.0)
    arm.guard.run(0.0)
    arm.go(200, state=lambda s: replace(s, q=kinematics.HOME))
    assert arm.guard.mode == Mode.RUN
    assert np.abs(arm.guard.command.q - kinematics.HOME).max() < 0.08  # type: ignore[union-attr]


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(UserError, match=r"is not a box\. Give x, y and z"):
        SafetyConfig(box_low=(0, 0, 0), box_high=(1, 0, 1))
    with pytest.raises(TypeError):
        SafetyConfig()  # type: ignore[call-arg]  # the box must be given
    for wrong in ({"tick": 1.0}, {"follow": 0.0}, {"resume": "always"}):
        with pytest.raises(UserError):
            SafetyConfig(**BOX, **wrong)
    guard = SafetyFilter(SafetyConfig(**BOX))
    for state, words in (
        (still(0, np.zeros(7)), "joint 4 is at its end"),
        (still(0, kinematics.HOME + 2 * np.eye(7)[0]), "outside the workspace"),
        (still(0, kinematics.HOME + np.eye(7)[5]), r"turned by 1\.0"),
        (still(0, reflex="x"), "reflex"),
        (still(-0.2), "no fresh state of the robot for 0.200 s"),
        (still(0, dq=np.full(7, 0.1)), "still moves"),
        (still(0, dq=np.full(7, np.nan)), "not 7 finite"),
        (still(0, width=np.nan), "opening of the gripper is nan"),
        (still(0, force=None), "reports no force"),
        (still(0, force=np.full(3, 40.0)), "force: 69 N"),
        (still(0, force_stamp=-1.0), "no fresh force at the hand for 1.000 s"),
    ):
        with pytest.raises(UserError, match=words):
            guard.start(0.0, state)
    with pytest.raises(RuntimeError):
        guard.tick(0.0, RobotState(0, kinematics.HOME, np.zeros(7)), None)
