"""Throughput by workers: the same envs per worker on 1, 2, ... Ray workers, in turns.

    python benchmarks/scale.py                       1 and 2 workers
    python benchmarks/scale.py --workers 1 2 4 8 16  on a larger machine
    python benchmarks/scale.py --lag 1               learner and workers at once

Weak scaling: every worker has --envs envs, so perfect scaling is W times the env steps per second
of one worker. The first iteration of a run, which builds envs and policies, is left out. Writes
scale.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path

from embodyrl.config import compose
from embodyrl.distributed.ray_pool import ray_rollouts
from embodyrl.storage.loggers import read_metrics
from embodyrl.storage.provenance import git_commit, hardware, versions
from embodyrl.training.runner import train


def one_run(preset: str, workers: int, args: argparse.Namespace, repeat: int) -> list[float]:
    """Env steps per second of each iteration but the first."""
    with tempfile.TemporaryDirectory() as out:
        overrides = [
            f"env.num_envs={workers * args.envs}", f"run.workers={workers}", f"run.max_lag={args.lag}",
            f"run.iterations={args.iterations}", f"run.seed={repeat}", f"run.out={out}", "run.threads=1",
            "run.eval_episodes=1", "run.eval_every=0", "run.eval_before=false", "run.videos=0",
            f"run.checkpoint_every={args.iterations}", "run.init_checkpoint=", *args.overrides,
        ]  # fmt: skip
        if args.lag:
            overrides.append("algorithm.behaviour_cap=5")
        config = compose(preset, overrides)
        folder = train(config, rollouts=partial(ray_rollouts, config, cpus=args.cpus))
        rows = read_metrics(folder / "metrics.jsonl")
        if args.lag:
            return [row["env_steps_per_second"] for row in rows[1:]]
        # What workers do, without the learner's update.
        return [(b["env_steps"] - a["env_steps"]) / b["rollout_seconds"] for a, b in pairwise(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="mujoco_pick_ppo")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--envs", type=int, default=32, help="per worker")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lag", type=int, default=0)
    parser.add_argument("--cpus", type=float, default=1.0, help="that a worker reserves")
    parser.add_argument("--out", default=str(Path(__file__).with_suffix(".json")))
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    seen: dict[int, list[float]] = {w: [] for w in args.workers}
    for repeat in range(args.repeats):
        for workers in args.workers:
            seen[workers] += one_run(args.preset, workers, args, repeat)
    medians = {w: statistics.median(values) for w, values in seen.items()}
    base = min(args.workers)
    result = {
        "what": "env steps per second of the rollouts"
        if not args.lag
        else "env steps per second, updates included",
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "env_steps_per_second": seen,
        "median": medians,
        "efficiency": {w: medians[w] / medians[base] / (w / base) for w in medians},
        "load_at_the_end": os.getloadavg()[0],
        "commit": git_commit(),
        "versions": versions(),
        "hardware": hardware(),
    }
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    for w, rate in medians.items():
        print(f"{w} workers: {rate:,.0f} env steps/s, efficiency {result['efficiency'][w]:.0%}")


if __name__ == "__main__":
    main()
