"""Times ``SafetyFilter.tick`` of whatever checkout is first on the path; ``robot_filter.py`` runs it.

    PYTHONPATH=CHECKOUT python benchmarks/robot_filter_ticks.py TICKS SEED

It reads nothing but what the filter had from its beginning, so that old commits can be measured
too. The target moves along random lines and jumps now and then, and the robot follows closely or
lags. Prints JSON: percentiles of the processor's time per tick in microseconds. The same ticks are
played ``PLAYS`` times. ``p50``, ``p90`` and ``p99`` are of all of them; ``own_p99`` is of the least
time of each tick, so without what other processes and interrupts cost. ``real_time`` says whether
the process got a real-time priority, as a robot's should have.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np

from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.messages import RobotState, Target
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.safety_config import SafetyConfig

LOW, HIGH = (0.28, -0.35, 0.02), (0.72, 0.35, 0.6)
TICK = 0.01
PLAYS = 3
PRIORITY = 10


def play(ticks: int, seed: int) -> np.ndarray:
    """Microseconds of each tick (ticks,), after a hundred that count for nothing."""
    rng = np.random.default_rng(seed)
    config = SafetyConfig(LOW, HIGH, max_target_age=5 * TICK, resume="fresh_target")
    guard = SafetyFilter(config)
    q, goal, velocity, lag = kinematics.HOME.copy(), np.array([0.5, 0.0, 0.3]), np.zeros(3), 1.0
    guard.start(0.0, RobotState(0.0, q, np.zeros(7), force=np.zeros(3)))
    guard.run(0.0)
    took = []
    for k in range(1, ticks + 101):
        now = k * TICK
        if k % 40 == 0:
            goal = rng.uniform(LOW, HIGH)
            velocity = rng.normal(0.0, 0.3, 3)
            lag = float(rng.choice([1.0, 0.6]))
        goal = np.clip(goal + velocity * TICK, LOW, HIGH)
        state = RobotState(now, q, np.zeros(7), force=rng.normal(0.0, 0.1, 3))
        target = Target(now, goal, kinematics.DOWN, 0.08)
        began = time.thread_time_ns()
        command = guard.tick(now, state, target)
        took.append(time.thread_time_ns() - began)
        q = q + lag * (command.q - q)
    assert guard.mode == "run", guard.reason
    return np.array(took[100:]) / 1e3


def percentiles(ticks: int, seed: int) -> dict[str, float]:
    """What the module says, in microseconds."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    except PermissionError:
        print("no real-time priority: run it as root", file=sys.stderr)
    took = np.array([play(ticks, seed) for _ in range(PLAYS)])
    p50, p90, p99 = np.percentile(took, [50, 90, 99]).round(1).tolist()
    own = round(float(np.percentile(took.min(axis=0), 99)), 1)
    real_time = os.sched_getscheduler(0) == os.SCHED_FIFO
    return {"p50": p50, "p90": p90, "p99": p99, "own_p99": own, "real_time": real_time}


if __name__ == "__main__":
    print(json.dumps(percentiles(int(sys.argv[1]), int(sys.argv[2]))))
