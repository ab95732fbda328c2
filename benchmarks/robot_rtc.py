"""What a slow policy costs: every way to execute chunks, on the simulated arm behind its safety filter.

    python benchmarks/robot_rtc.py --out benchmarks/robot_rtc.json              # makes its policy first
    python benchmarks/robot_rtc.py runs/sft16 --episodes 48                     # a policy of yours

What chunks of one moment have that those of the next have not is a choice: where a policy has two
ways to go on, a new chunk may take the other one. So the policy made here learns to reach for a
ball on a way that swerves to the left or to the right, at random, three times: 300 demonstrations,
chunks of 16 actions, imitated from states.

An inference is charged 0, 100, 200 or 300 ms of the arm's own time, so nothing here depends on the
machine; all rows have the same initial states. ``rtc`` is guided inpainting, ``rtc trained`` a
policy that imitation taught to continue a chunk (``policy.max_prefix``, only where the checkpoint
has it). Per row: ``success``; ``wait``, s of an episode in which the arm had no action; ``jump``,
how far a new chunk's first action is from what the one before had planned for that step, in units
of actions without the gripper; ``turn``, how far it is from the action before it, and ``inside``,
the same within chunks; ``acceleration``, root mean square of the joints' (rad/s^2).
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
from shared import complete

from embodyrl.config import env_config, resolve
from embodyrl.data.collect import collect_dataset
from embodyrl.functional.intervals import wilson
from embodyrl.real_robot.connect_robot import ConnectedRobot, simulated_robot
from embodyrl.real_robot.control.actions import DeltaDecoder, action_space
from embodyrl.real_robot.control.executor import Executor, ExecutorConfig
from embodyrl.real_robot.control.inference import VirtualInference
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.ticker import drive
from embodyrl.real_robot.logs.mcap_log import RunLog, read
from embodyrl.real_robot.policy_link.checkpoint_policy import CheckpointPolicy
from embodyrl.real_robot.twin.config import twin_config
from embodyrl.sims.mujoco.experts import PROGRAMS, Waypoint
from embodyrl.storage.provenance import git_commit, hardware, versions
from embodyrl.training.run_folder import finished

FOLDER = Path("runs/bench/robot_rtc")
OVERRIDES = [
    f"env.{x}"
    for x in ("task=reach", "cameras=[]", "renderer=none", "num_envs=16", "max_episode_steps=40")
]
START = np.array([0.45, -0.03, 0.17])
"""m, about where the hand is at the start."""
MODES = ("sync", "naive", "ensemble", "rtc", "rtc trained")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--episodes", type=int, default=48)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.1, 0.2, 0.3])
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--speed", type=float, default=0.25)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    a.checkpoint = a.checkpoint or make_policy()
    load, rows = os.getloadavg()[0], []
    with (
        simulated_robot(twin_config(a.checkpoint, [])) as rig,
        tempfile.TemporaryDirectory() as folder,
    ):
        for delay in a.delays:
            for mode in a.modes:
                policy = CheckpointPolicy(a.checkpoint, "cpu")
                trained = getattr(policy.policy.config, "max_prefix", 0)
                if mode == "rtc trained" and not trained:
                    continue
                if mode == "rtc" and trained:  # the same weights, guided
                    policy.policy.config = dataclasses.replace(policy.policy.config, max_prefix=0)
                rows.append(
                    row(rig, policy, mode, delay, a.speed, a.episodes, Path(folder) / "run.mcap")
                )
                print(json.dumps(rows[-1]), flush=True)
    result = {
        "checkpoint": str(a.checkpoint),
        "horizon": policy.metadata["horizon"],
        "speed": a.speed,
        "rows": rows,
    }
    result |= {"load": [load, os.getloadavg()[0]], "commit": git_commit()}
    result |= {"hardware": hardware(), "versions": versions()}
    if a.out:
        a.out.write_text(json.dumps(result, indent=1) + "\n")


def make_policy() -> str:
    """A run whose policy swerves, or what is left to be done of it."""
    if not (FOLDER / "demos").exists():
        PROGRAMS["reach"] = [
            *(Waypoint(swerve(k), tolerance=0.02, speed=0.5) for k in (1, 2, 3)),
            *PROGRAMS["reach"],
        ]
        collect_dataset(env_config("mujoco", OVERRIDES), FOLDER / "demos", num_episodes=300)
    policy = {
        "name": "flow_vla",
        "horizon": 16,
        "action_patch": 1,
        "max_prefix": 6,
        "num_denoise_steps": 5,
    }
    policy |= {"width": 64, "layers": 2, "text_layers": 0, "critic_width": 64}
    sft = {"name": "sft", "steps_per_iteration": 200, "batch_size": 128, "lr": 1e-3, "ema": 0.995}
    run = {
        "name": "sft",
        "out": str(FOLDER),
        "iterations": 20,
        "eval_every": 10,
        "eval_episodes": 64,
        "videos": 0,
    }
    run |= {"threads": 1, "device": "cpu", "checkpoint_every": 5}
    data = {"path": str(FOLDER / "demos")}
    config = resolve(
        {"env": {"name": "mujoco"}, "policy": policy, "algorithm": sft, "run": run, "data": data},
        OVERRIDES,
    )
    if not finished(config.run.folder):
        complete(config)
    return str(config.run.folder)


def swerve(number: int) -> Any:
    """A point a quarter further on the way to the ball, beside it: on which side nobody can tell from what is seen."""

    def goal(view: Any) -> np.ndarray:
        way = view.goal - START
        side = np.sign(np.sin(1e6 * number * view.goal[:, 0]))[:, None] * [-0.05, 0.05, 0.0]
        across = way[:, [1, 0, 2]] / np.maximum(
            np.linalg.norm(way[:, :2], axis=1, keepdims=True), 0.02
        )
        return START + number / 4 * way + side * across

    return goal


def mean(values: list[Any]) -> float:
    return float(np.mean(values)) if values else 0.0


def row(
    rig: ConnectedRobot,
    policy: CheckpointPolicy,
    mode: str,
    delay: float,
    speed: float,
    episodes: int,
    file: Path,
) -> dict[str, Any]:
    """All episodes of one mode at one delay."""
    told, hz = policy.metadata, policy.metadata["control_hz"] * speed
    execution = ExecutorConfig(told["horizon"], told["action_dim"], hz, mode.split()[0])
    solved, waits, starved, jumps, delays, squares, peak = 0, [], [], [], [], [], 0.0
    turns, inside = [], []
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
        starved.append(counts.starved)
        jumps += counts.jumps
        delays += counts.delays
        messages = read(file)
        actions = np.array([m["action"][:-1] for m in messages["/action"]])
        steps = np.linalg.norm(np.diff(actions, axis=0), axis=1)
        first = np.isin(np.arange(1, len(actions)), counts.switches)
        turns, inside = turns + steps[first].tolist(), inside + steps[~first].tolist()
        gaps = np.diff([m["stamp"] for m in messages["/action"]])
        waits.append(float((gaps - 1 / hz).clip(min=0.0).sum()))
        squares += [
            float(np.mean(np.square(m["ddq"]))) for m in messages["/command"] if m["mode"] == "run"
        ]
        peak = max(peak, *episode.peak.values())
    return {
        "mode": mode,
        "delay_ms": round(delay * 1e3),
        "success": round(solved / episodes, 3),
        "interval": wilson(solved, episodes),
        "episodes": episodes,
        "wait": {"mean": round(mean(waits), 4), "max": round(max(waits), 4)},
        "starved_steps": round(mean(starved), 2),
        "delay_actions": round(mean(delays), 2),
        "jump": {
            "mean": round(float(np.mean(jumps or [0])), 3),
            "p95": round(float(np.percentile(jumps or [0], 95)), 3),
        },
        "turn": round(mean(turns), 3),
        "inside": round(mean(inside), 3),
        "acceleration": round(mean(squares) ** 0.5, 3),
        "peak_of_limits": round(peak, 4),
    }


if __name__ == "__main__":
    main()
