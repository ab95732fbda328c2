"""Hostile inputs for the safety filter: jumps, nonsense, faults, stalls and a robot that lags."""

from __future__ import annotations

import time

import numpy as np

from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.messages import Mode, RobotState, Target
from embodyrl.real_robot.control.safety import SafetyConfig, SafetyFilter
from embodyrl.real_robot.control.watch import Watch

BOX = {"box_low": (0.28, -0.35, 0.02), "box_high": (0.72, 0.35, 0.6)}


def fuzz(
    robot: str,
    ticks: int,
    seed: int,
    tick: float = 0.01,
    durations: list[tuple[int, int]] | None = None,
    wide: bool = False,
) -> tuple[Watch, dict[str, int]]:
    """Drives a filter with chunks of nonsense and a robot that lags, and watches what comes out.

    Args:
        robot: model.
        ticks: how many.
        seed: of the nonsense.
        tick: s.
        durations: is given the ns that each tick took, by the wall clock and of the processor.
        wide: without a workspace box, so that the joints' own ends are what stops the arm.

    Returns:
        The watch, and how many ticks each mode lasted.
    """
    rng = np.random.default_rng(seed)
    low, high = ((-2.0, -2.0, -2.0), (2.0, 2.0, 2.0)) if wide else (BOX["box_low"], BOX["box_high"])
    config = SafetyConfig(
        low, high, robot=robot, tick=tick, max_target_age=5 * tick, max_gap=3 * tick,
        resume="fresh_target", recover_reflex=True,
        max_tilt=3.1 if wide else 0.6, max_lead=0.5 if wide else 0.2, max_error=1.0 if wide else 0.3,
    )  # fmt: skip
    guard = SafetyFilter(config)
    watch = Watch(guard.hard, tick)
    modes = dict.fromkeys(map(str, Mode), 0)
    now = 0.0
    q = kinematics.HOME.copy()
    guard.start(now, RobotState(now, q, np.zeros(7)))
    guard.run(now)
    goal = np.array([0.5, 0.0, 0.3])
    turned = kinematics.DOWN
    lag = 1.0
    velocity = np.zeros(3)
    age = 0.0
    left = 0
    for _ in range(ticks):
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
            lag = float(rng.choice([1.0, 1.0, 0.6, 0.2]))
        left -= 1
        now += tick if rng.random() < 0.999 else float(rng.uniform(-0.2, 0.2))
        goal = goal + velocity * tick
        shown = goal + (rng.normal(0, 0.3, 3) if rng.random() < 0.02 else 0.0)
        if rng.random() < 0.0005:
            shown = shown * np.nan
        force = np.zeros(3) + (40.0 if rng.random() < 0.0003 else 0.0)
        event = rng.random()
        if event < 0.001:
            guard.takeover(now)
        elif event < 0.003:
            guard.release(now)
        elif event < 0.0032:
            guard.estop()
        state = RobotState(
            now, q, np.zeros(7), force=force, reflex="test" if rng.random() < 0.0001 else ""
        )
        human = rng.random() < (0.9 if guard.mode == Mode.HUMAN else 0.02)
        target = Target(now - age, shown, turned, 0.08, human)
        began = time.perf_counter_ns(), time.thread_time_ns()
        command = guard.tick(now, state, target)
        if durations is not None:
            durations.append((time.perf_counter_ns() - began[0], time.thread_time_ns() - began[1]))
        watch.see(command)
        modes[guard.mode] += 1
        q = q + lag * (command.q - q)
        rest = np.abs(command.dq).max() < 1e-6 and np.abs(q - command.q).max() < 1e-3
        if rest and guard.mode not in (Mode.RUN, Mode.HUMAN):
            still = RobotState(now, command.q, np.zeros(7))
            guard.clear(now, still)
            watch.last = None
            q = command.q
            guard.run(now)
    return watch, modes
