"""What a slow policy costs: every way to execute chunks, on the simulated arm behind its safety filter.

    python benchmarks/robot_rtc.py runs/sft16 --episodes 48 --out benchmarks/robot_rtc.json

An inference is charged 0, 100, 200 or 300 ms of the arm's own time, so nothing here depends on the machine; all rows
have the same initial states. ``rtc`` is guided inpainting, ``rtc trained`` a policy that imitation taught to continue
a chunk (``policy.max_prefix``, only where the checkpoint has it). Per row: ``success``; ``wait``, s of an episode in
which the arm had no action; ``jump``, how far a new chunk's first action is from what the one before had planned for
that step, in units of actions without the gripper; ``acceleration``, root mean square of the joints' (rad/s^2).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.provenance import git_commit, hardware, versions
from embodyrl.real_robot.actions import DeltaDecoder, action_space
from embodyrl.real_robot.deploy import drive
from embodyrl.real_robot.executor import Executor, ExecutorConfig, VirtualInference
from embodyrl.real_robot.log import RunLog, read
from embodyrl.real_robot.policy_side import CheckpointPolicy
from embodyrl.real_robot.rigs import Rig, simulated_robot, twin_config
from embodyrl.real_robot.safety import SafetyFilter
from embodyrl.stats import wilson

MODES = ("sync", "naive", "ensemble", "rtc", "rtc trained")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--episodes", type=int, default=48)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.1, 0.2, 0.3])
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--speed", type=float, default=0.25)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    load, rows = os.getloadavg()[0], []
    with simulated_robot(twin_config(a.checkpoint, [])) as rig, tempfile.TemporaryDirectory() as folder:
        for delay in a.delays:
            for mode in a.modes:
                policy = CheckpointPolicy(a.checkpoint, "cpu")
                trained = getattr(policy.policy.config, "max_prefix", 0)
                if mode == "rtc trained" and not trained:
                    continue
                if mode == "rtc" and trained:  # the same weights, guided
                    policy.policy.config = dataclasses.replace(policy.policy.config, max_prefix=0)
                rows.append(row(rig, policy, mode, delay, a.speed, a.episodes, Path(folder) / "run.mcap"))
                print(json.dumps(rows[-1]), flush=True)
    result = {"checkpoint": str(a.checkpoint), "horizon": policy.metadata["horizon"], "speed": a.speed, "rows": rows}
    result |= {"load": [load, os.getloadavg()[0]], "commit": git_commit()}
    result |= {"hardware": hardware(), "versions": versions()}
    if a.out:
        a.out.write_text(json.dumps(result, indent=1) + "\n")


def mean(values: list[Any]) -> float:
    return float(np.mean(values)) if values else 0.0


def row(
    rig: Rig, policy: CheckpointPolicy, mode: str, delay: float, speed: float, episodes: int, file: Path
) -> dict[str, Any]:
    """All episodes of one mode at one delay."""
    told, hz = policy.metadata, policy.metadata["control_hz"] * speed
    execution = ExecutorConfig(told["horizon"], told["action_dim"], hz, mode.split()[0])
    solved, waits, starved, jumps, delays, squares, peak = 0, [], [], [], [], [], 0.0
    for init in range(episodes):
        rig.begin(init)
        executor = Executor(execution, VirtualInference(policy.infer, lambda took: delay))
        decoder = DeltaDecoder(action_space(told), hz, rig.safety.box_low, rig.safety.box_high)
        log, guard = RunLog(file, {}, rig.clock.now()), SafetyFilter(rig.safety)
        seconds = told["max_episode_steps"] / hz
        episode = drive(rig.robot, rig.clock, guard, executor, decoder, log, seconds=seconds)
        log.close()
        counts = executor.counts
        solved += episode.solved
        waits.append(max(0.0, episode.seconds - counts.taken / hz))
        starved.append(counts.starved)
        jumps += counts.jumps
        delays += counts.delays
        squares += [float(np.mean(np.square(m["ddq"]))) for m in read(file)["/command"] if m["mode"] == "run"]
        peak = max(peak, *episode.peak.values())
    return {
        "mode": mode,
        "delay_ms": round(delay * 1e3),
        "success": round(solved / episodes, 3),
        "interval": wilson(solved, episodes),
        "episodes": episodes,
        "wait": {"mean": round(mean(waits), 3), "max": round(max(waits), 3)},
        "starved_steps": round(mean(starved), 2),
        "delay_actions": round(mean(delays), 2),
        "jump": {
            "mean": round(float(np.mean(jumps or [0])), 3),
            "p95": round(float(np.percentile(jumps or [0], 95)), 3),
        },
        "acceleration": round(mean(squares) ** 0.5, 3),
        "peak_of_limits": round(peak, 4),
    }


if __name__ == "__main__":
    main()
