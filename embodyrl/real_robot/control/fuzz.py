"""Feeds the safety filter hostile inputs: jumps, nonsense, faults, stalls, and a lagging robot."""

from __future__ import annotations

import time

import numpy as np

from embodyrl.errors import UserError
from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.bound_monitor import BoundMonitor
from embodyrl.real_robot.control.limit_monitor import LimitMonitor
from embodyrl.real_robot.control.messages import Mode, RobotState, Target
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.safety_config import SafetyConfig

ROBOTS = ("fr3", "panda")
BOX = {"box_low": (0.28, -0.35, 0.02), "box_high": (0.72, 0.35, 0.6)}


def random_config(rng: np.random.Generator, robot: str, tick: float) -> SafetyConfig:
    """Settings of the safety filter that a person might choose, or a little stranger."""
    wide = rng.random() < 0.3
    return SafetyConfig(
        (-2.0, -2.0, -2.0) if wide else BOX["box_low"],
        (2.0, 2.0, 2.0) if wide else BOX["box_high"],
        robot=robot,
        tick=tick,
        max_tilt=float(rng.choice([0.05, 0.3, 0.6, 1.5, 3.1])),
        ee_speed=float(rng.choice([0.1, 0.5, 1.0, 1.7])),
        ee_turn=float(rng.choice([0.3, 1.0, 2.0, 2.5])),
        max_lead=float(rng.choice([0.02, 0.1, 0.2, 0.5])),
        max_error=float(rng.choice([0.3, 1.0])),
        follow=float(rng.choice([0.3, 0.8, 1.0])),
        max_target_age=5 * tick,
        max_gap=3 * tick,
        resume="fresh_target",
        recover_reflex=True,
    )


def fuzz(
    robot: str,
    ticks: int,
    seed: int,
    tick: float = 0.01,
    durations: list[tuple[int, int]] | None = None,
    wide: bool = False,
    vary: bool = False,
) -> tuple[LimitMonitor, BoundMonitor, dict[str, int]]:
    """Runs a safety filter on random inputs and checks its commands.

    Args:
        robot: model.
        ticks: number of ticks.
        seed: of the inputs.
        tick: s per tick.
        durations: list that receives the ns of each tick, in wall-clock and in processor time.
        wide: use a huge workspace, so that only the ends of the joints stop the arm.
        vary: use a ``random_config`` instead.

    Returns:
        The monitors of the joints' limits and of the config's bounds, and the number of ticks in
        each mode.
    """
    rng = np.random.default_rng(seed)
    low, high = ((-2.0, -2.0, -2.0), (2.0, 2.0, 2.0)) if wide else (BOX["box_low"], BOX["box_high"])
    config = SafetyConfig(
        low, high, robot=robot, tick=tick, max_target_age=5 * tick, max_gap=3 * tick,
        resume="fresh_target", recover_reflex=True,
        max_tilt=3.1 if wide else 0.6,
        max_lead=0.5 if wide else 0.2,
        max_error=1.0 if wide else 0.3,
    )  # fmt: skip
    if vary:
        config = random_config(rng, robot, tick)
    guard = SafetyFilter(config)
    monitor = LimitMonitor(guard.robot_limits, tick)
    bounds = BoundMonitor(config)
    modes = dict.fromkeys(map(str, Mode), 0)
    now = 0.0
    q = kinematics.HOME.copy()
    guard.start(now, RobotState(now, q, np.zeros(7), force=np.zeros(3)))
    guard.run(now)
    goal = np.array([0.5, 0.0, 0.3])
    turned = kinematics.DOWN
    lag = 1.0
    velocity = np.zeros(3)
    age = 0.0
    left = 0
    for _ in range(ticks):
        # Every 1 to 60 ticks a new kind of target: a jump, a steady motion, or absurd numbers,
        # perhaps turned or stale, and a robot that follows more or less closely.
        if left == 0:
            kind = rng.integers(10)
            left = int(rng.integers(1, 60))
            velocity = np.zeros(3)
            if kind < 4:
                goal = rng.uniform([0.0, -0.8, -0.3], [1.0, 0.8, 1.2])
            elif kind < 6:
                velocity = rng.normal(0, 1.0, 3)
            elif kind == 6:
                goal = rng.normal(0, 10.0 ** rng.integers(0, 300), 3)
            turned = kinematics.DOWN
            if rng.random() < 0.5:
                turned = kinematics.exp_rotation(rng.normal(0, 1.0, 3)) @ turned
            age = tick * float(rng.choice([0, 0, 0, 2, 20]))
            lag = float(rng.choice([1.0, 1.0, 0.6, 0.2, 0.0] if vary else [1.0, 1.0, 0.6, 0.2]))
        left -= 1
        # Now and then the clock jumps, the target is noisy or not a number, or something pushes.
        now += tick if rng.random() < 0.999 else float(rng.uniform(-0.2, 0.2))
        goal = goal + velocity * tick
        shown = goal + (rng.normal(0, 0.3, 3) if rng.random() < 0.02 else 0.0)
        if rng.random() < 0.0005:
            shown = shown * np.nan
        force = rng.normal(0.0, 0.1, 3) + (40.0 if rng.random() < 0.0003 else 0.0)
        # A person takes over, lets go, or presses stop.
        event = rng.random()
        if event < 0.001:
            guard.takeover(now)
        elif event < 0.003:
            guard.release(now)
        elif event < 0.0032:
            guard.estop()
        elif event < 0.05 and guard.mode == Mode.HOLD:
            guard.run(now)
        state = RobotState(
            now, q, np.zeros(7), force=force, reflex="test" if rng.random() < 0.0001 else ""
        )
        # Targets come mostly, but not only, from whoever moves the arm.
        human = rng.random() < (0.9 if guard.mode == Mode.HUMAN else 0.02)
        target = Target(now - age, shown, turned, 0.08, human)
        # The tick itself, timed.
        began = time.perf_counter_ns(), time.thread_time_ns()
        command = guard.tick(now, state, target)
        if durations is not None:
            durations.append((time.perf_counter_ns() - began[0], time.thread_time_ns() - began[1]))
        monitor.see(command)
        bounds.see(command, state.q)
        modes[guard.mode] += 1
        # The robot follows the command, perhaps slowly, or it is blocked. Once the command has come
        # to rest, it is started again.
        q = q + lag * (command.q - q)
        rest = np.abs(command.dq).max() < 1e-6
        if rest and guard.mode not in (Mode.RUN, Mode.HUMAN) and rng.random() < 0.2:
            try:
                guard.clear(now, RobotState(now, q, np.zeros(7), force=np.zeros(3)))
            except UserError:  # where the robot is blocked, it may not start: it tries again
                continue
            if rng.random() < 0.5:
                guard.run(now)
    return monitor, bounds, modes


def fuzz_bounds(tries: int, seed: int, ticks: int = 300) -> list[str]:
    """Runs filters with random settings on random inputs.

    Args:
        tries: number of filters.
        seed: of the first one.
        ticks: per filter.

    Returns:
        What was broken, one line per try that failed.
    """
    found = []
    for number in range(seed, seed + tries):
        robot = ROBOTS[number % len(ROBOTS)]
        tick = (0.01, 0.002, 0.05, 0.001)[number // 2 % 4]
        joints, bounds, _ = fuzz(robot, ticks, number, tick, vary=True)
        if wrong := joints.violated | bounds.violated:
            found.append(f"seed {number}, {robot}, tick {tick:g} s: {wrong} in {bounds.config}")
    return found
