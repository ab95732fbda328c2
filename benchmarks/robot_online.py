"""Learning on the simulated arm behind its safety filter, with a scripted person who takes over, and without one.

    python benchmarks/robot_online.py --seeds 0 1 2 --out benchmarks/robot_online.json

RLPD from states, from a few of the expert's demonstrations. Each row is a point of a run: chunks that a person moved,
minutes of the arm's own time, minutes of the wall, and the successes of the policy alone on held-out initial states.
The person lets the policy act ``--patience`` times in each episode and then ends it; the control is the same run
without them. HIL-SERL (arXiv:2410.21845) reports nearly perfect policies after 1 to 2.5 hours on real arms.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from embodyrl.config import resolve
from embodyrl.data.collect import collect_dataset
from embodyrl.loggers import read_metrics
from embodyrl.provenance import git_commit, hardware, versions
from embodyrl.runner import train
from embodyrl.sims.mujoco.config import Config as TaskConfig
from embodyrl.stats import wilson

SPEED, HZ = 0.5, 25.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="reach")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--demos", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--eval-episodes", type=int, default=32)
    parser.add_argument("--patience", type=int, default=20)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    load, rows = os.getloadavg()[0], []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "demos"
        task = TaskConfig(task=a.task, cameras=(), renderer="none", num_envs=1)
        collect_dataset(task, data, num_episodes=a.demos)
        for seed in a.seeds:
            for corrector in (a.patience, 0):
                for row in points(a, seed, corrector, data, Path(folder) / f"{seed}_{corrector}"):
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    result = {"settings": {k: v for k, v in vars(a).items() if k != "out"}, "rows": rows}
    result |= {"load": [load, os.getloadavg()[0]], "commit": git_commit()}
    result |= {"hardware": hardware(), "versions": versions()}
    if a.out:
        a.out.write_text(json.dumps(result, indent=1) + "\n")


def points(a: argparse.Namespace, seed: int, corrector: int, data: Path, out: Path) -> list[dict[str, Any]]:
    """One run, as its evaluations."""
    env = {"name": "robot", "task": a.task, "cameras": [], "renderer": "none", "speed": SPEED, "corrector": corrector}
    policy = {"name": "flow_mlp", "horizon": 5, "transition": "flow_noise", "noise_min": 0.1, "noise_max": 0.5}
    algorithm = {"name": "rlpd", "num_chunks": 16, "capacity": 20_000, "warmup_chunks": 64, "batch_size": 64}
    algorithm |= {"utd": 2.0, "policy_delay": 2, "num_critics": 4, "critic_width": 128, "entropy_backup": False}
    run = {"seed": seed, "iterations": a.iterations, "eval_every": a.eval_every, "eval_episodes": a.eval_episodes}
    run |= {"videos": 0, "threads": 1, "device": "cpu", "checkpoint_every": a.iterations, "out": str(out)}
    sections = {"env": env, "policy": policy, "algorithm": algorithm, "run": run, "data": {"path": str(data)}}
    folder = train(resolve(sections))
    metrics, rows = read_metrics(folder / "metrics.jsonl"), []
    for file in sorted((folder / "evals").glob("*.json")):
        found = json.loads(file.read_text())
        human = sum(row["human_chunks"] for row in metrics if row["iteration"] <= found["iteration"] and corrector)
        row = {"seed": seed, "person": bool(corrector), "iteration": found["iteration"], "human_chunks": int(human)}
        row |= {"arm_minutes": round(found["env_steps"] / (SPEED * HZ) / 60, 2), "minutes": round(found["minutes"], 2)}
        solved, played = sum(e["success"] for e in found["episodes"]), len(found["episodes"])
        rows.append(row | {"success": round(solved / played, 3), "interval": wilson(solved, played)})
    rows.sort(key=lambda row: row["iteration"])
    return rows


if __name__ == "__main__":
    main()
