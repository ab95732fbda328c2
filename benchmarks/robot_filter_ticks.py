"""Times ``SafetyFilter.tick`` of whatever checkout is first on the path; ``robot_filter.py`` runs it.

    PYTHONPATH=CHECKOUT python benchmarks/robot_filter_ticks.py TICKS SEED

It reads nothing but what the filter had from its beginning, so that old commits can be measured
too. The target moves along random lines and jumps now and then, and the robot follows closely or
lags. Prints JSON: percentiles of the processor's time per tick in microseconds.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.messages import RobotState, Target
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.safety_config import SafetyConfig

LOW, HIGH = (0.28, -0.35, 0.02), (0.72, 0.35, 0.6)
TICK = 0.01


def percentiles(ticks: int, seed: int) -> dict[str, float]:
    """Percentiles of the time per tick, after a hundred ticks that count for nothing."""
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
    values = np.percentile(np.array(took[100:]) / 1e3, [50, 90, 99])
    return dict(zip(("p50", "p90", "p99"), values.round(1).tolist(), strict=True))


if __name__ == "__main__":
    print(json.dumps(percentiles(int(sys.argv[1]), int(sys.argv[2]))))
