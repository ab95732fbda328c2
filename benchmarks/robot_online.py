"""Learning on the simulated arm behind its safety filter, with a scripted person who takes over, and without one.

    python benchmarks/robot_online.py --seeds 0 1 2 --out benchmarks/robot_online.json
    python benchmarks/robot_online.py --task pick --init runs/sft --data data/pick --iterations 800

RLPD with an imitation term: from states and a few of the expert's demonstrations, or with
``--init`` from pixels and an imitated policy (preset ``robot_pick_rlpd``). Each row is a point of a
run: chunks that a person moved, minutes of the arm's own time, minutes of the wall, and the
successes of the policy alone on held-out initial states. The simulated arm's time goes by as fast
as the machine can; the code is what drives a real one. The person lets the policy act
``--patience`` times in each episode and then ends it; the control is the same run without them.
HIL-SERL (arXiv:2410.21845) reports nearly perfect policies after 1 to 2.5 hours on real arms. Runs
go to ``runs/bench/robot_online`` and can be interrupted and resumed. Draws
``docs/images/robot_online.png``.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from figures import draw_json
from shared import complete

from embodyrl.config import Config, compose, resolve
from embodyrl.data.collect import collect_dataset
from embodyrl.functional.intervals import wilson
from embodyrl.sims.mujoco.config import MujocoConfig as TaskConfig
from embodyrl.storage.loggers import read_metrics
from embodyrl.storage.provenance import git_commit, hardware, versions

OUT = Path("runs/bench/robot_online")
SPEED, HZ = 0.25, 25.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default="reach")
    parser.add_argument(
        "--init", default="", help="a checkpoint that sees; without one a policy from states"
    )
    parser.add_argument(
        "--data", default="", help="demonstrations (default: the expert's, --demos of them)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--demos", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--eval-every", type=int, default=15)
    parser.add_argument("--eval-episodes", type=int, default=32)
    parser.add_argument("--patience", type=int, default=20)
    parser.add_argument("--alone", type=int, default=1, help="0 leaves the control out")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    load, rows = os.getloadavg()[0], []
    out = OUT / f"{a.task}_{'pixels' if a.init else 'states'}"
    if not a.data:
        a.data = str(out / "demos")
        if not Path(a.data).exists():
            task = TaskConfig(task=a.task, cameras=(), renderer="none", num_envs=1)
            collect_dataset(task, a.data, num_episodes=a.demos)
    for seed in a.seeds:
        for corrector in (a.patience, 0) if a.alone else (a.patience,):
            run = {
                "seed": seed,
                "iterations": a.iterations,
                "eval_every": a.eval_every,
                "videos": 0,
                "out": str(out),
            }
            run |= {
                "eval_episodes": a.eval_episodes,
                "threads": 1,
                "device": "cpu",
                "name": f"{seed}_{'person' if corrector else 'alone'}",
            }
            config = (from_pixels if a.init else from_states)(a, corrector, run)
            complete(config)
            for row in points(config):
                rows.append(row)
                print(json.dumps(row), flush=True)
    result = {
        "settings": {k: v for k, v in vars(a).items() if k not in ("out", "data")},
        "rows": rows,
    }
    result |= {"load": [load, os.getloadavg()[0]], "commit": git_commit()}
    result |= {"hardware": hardware(), "versions": versions()}
    if a.out:
        a.out.write_text(json.dumps(result, indent=1) + "\n")
        draw_json(a.out, "online")


def from_states(a: argparse.Namespace, corrector: int, run: dict[str, Any]) -> Config:
    """A small policy that starts from nothing, and sees the scene's state."""
    env = {
        "name": "robot",
        "task": a.task,
        "cameras": [],
        "renderer": "none",
        "speed": SPEED,
        "corrector": corrector,
    }
    policy = {
        "name": "flow_mlp",
        "horizon": 5,
        "transition": "flow_noise",
        "noise_min": 0.1,
        "noise_max": 0.5,
    }
    algorithm = {
        "name": "rlpd",
        "num_chunks": 16,
        "capacity": 20_000,
        "warmup_chunks": 64,
        "batch_size": 64,
    }
    algorithm |= {
        "utd": 2.0,
        "policy_delay": 2,
        "num_critics": 4,
        "critic_width": 128,
        "entropy_backup": False,
    }
    algorithm |= {"critic_warmup": 100, "alpha": 0.001}
    return resolve(
        {"env": env, "policy": policy, "algorithm": algorithm, "run": run, "data": {"path": a.data}}
    )


def from_pixels(a: argparse.Namespace, corrector: int, run: dict[str, Any]) -> Config:
    """An imitated policy that sees pictures, improved as the preset does it."""
    env = [f"env.task={a.task}", f"env.speed={SPEED}", f"env.corrector={corrector}"]
    settings = [f"run.{name}={value}" for name, value in run.items()]
    return compose(
        "robot_pick_rlpd", [*env, *settings, f"run.init_checkpoint={a.init}", f"data.path={a.data}"]
    )


def points(config: Config) -> list[dict[str, Any]]:
    """A run as its evaluations."""
    folder = config.run.folder
    metrics, rows = read_metrics(folder / "metrics.jsonl"), []
    commit = json.loads((folder / "meta.json").read_text())["commit"]
    person = bool(config.env.corrector)  # type: ignore[attr-defined]
    for file in (folder / "evals").glob("*.json"):
        found = json.loads(file.read_text())
        human = sum(
            row["human_chunks"]
            for row in metrics
            if row["iteration"] <= found["iteration"] and person
        )
        row = {
            "seed": config.run.seed,
            "person": person,
            "iteration": found["iteration"],
            "human_chunks": int(human),
        }
        row |= {"commit": commit}
        row |= {
            "arm_minutes": round(found["env_steps"] / (SPEED * HZ) / 60, 2),
            "minutes": round(found["minutes"], 2),
        }
        solved, played = sum(e["success"] for e in found["episodes"]), len(found["episodes"])
        rows.append(
            row | {"success": round(solved / played, 3), "interval": wilson(solved, played)}
        )
    return sorted(rows, key=lambda row: row["iteration"])


if __name__ == "__main__":
    main()
