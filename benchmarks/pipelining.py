"""Whether overlapping is faster, on the cores at hand: rollouts with rollouts, and rollouts with learning.

    python benchmarks/pipelining.py --out benchmarks/pipelining.json

``shards``: the same envs and policy in one shard and in two (``run.workers=2`` without Ray): while
one simulates and draws, the policy acts in the other. ``lag``: whole iterations of off-policy
training, one after the other and with ``run.max_lag=1``, where the next rollout is played while the
learner learns. What is compared is measured in turn, several times; the medians are written. Run it
on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from embodyrl.config import compose
from embodyrl.storage.loggers import read_metrics
from embodyrl.storage.provenance import git_commit, hardware, versions
from embodyrl.training.runner import train
from embodyrl.training.setup import Envs, build_algorithm
from embodyrl.training.shards import ShardedRollouts, local_rollouts

HIDDEN = "policy.critic=privileged"
"""What was measured first; presets' critics read no hidden state since."""
ENVS = {
    "mujoco_pixels": ("mujoco_pick_ppo", HIDDEN),
    "mujoco_state": ("mujoco_pick_ppo", HIDDEN, "env.renderer=none", "env.cameras=[]"),
    "libero_pixels": ("libero_object_ppo", HIDDEN, "env.task_ids=[0]"),
}


def measure(preset: str, overrides: list[str], repeats: int) -> dict[str, Any]:
    """Env steps per second by number of shards."""
    pools: dict[int, tuple[ShardedRollouts, Any]] = {}
    rates: dict[int, list[float]] = {1: [], 2: []}
    for workers in rates:
        config = compose(
            preset, [*overrides, f"run.workers={workers}", "run.init_checkpoint=", "run.device=cpu"]
        )
        envs = Envs(config)
        algorithm = build_algorithm(config, envs, torch.device("cpu"))
        envs.close()
        pools[workers] = local_rollouts(config), algorithm
    for iteration in range(repeats + 1):
        for workers, (rollouts, algorithm) in pools.items():
            generator, began = torch.Generator(), time.perf_counter()
            batch = rollouts.collect(
                algorithm,
                iteration,
                generator=generator,
                device=torch.device("cpu"),
                between=lambda: None,
            )
            if iteration:  # the first builds scenes and warms up
                rates[workers].append(batch.env_steps / (time.perf_counter() - began))
    for rollouts, _ in pools.values():
        rollouts.close()
    one, two = (statistics.median(rates[workers]) for workers in (1, 2))
    return {"steps_per_s": {"1 shard": one, "2 shards": two}, "times": two / one, "all": rates}


LEARNING = (
    "run.init_checkpoint=", "data.path=", "algorithm.bc_coef=0", "algorithm.warmup_chunks=256", "run.eval_every=0",
    "run.eval_before=false", "run.eval_episodes=1", "run.checkpoint_every=1000", "run.videos=0", "run.device=cpu",
    "algorithm.critic_warmup=0", HIDDEN,
)  # fmt: skip


def seconds(lag: int, iterations: int) -> float:
    """Median of an iteration of the quickstart's SAC-Flow, rollout and learning, from nothing."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            *LEARNING,
            f"run.max_lag={lag}",
            f"run.out={folder}",
            f"run.iterations={iterations + 2}",
        ]
        rows = read_metrics(train(compose("mujoco_pick_sac_flow", settings)) / "metrics.jsonl")
    learning = rows[1:-1]  # the first fills the buffer; the last has no rollout beside it
    return statistics.median(
        60 * (b["minutes"] - a["minutes"]) for a, b in itertools.pairwise(learning)
    )


def measure_lag(repeats: int, iterations: int) -> dict[str, Any]:
    """Seconds of an iteration by lag."""
    found: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(repeats):
        for lag in found:
            found[lag].append(seconds(lag, iterations))
    none, one = (statistics.median(found[lag]) for lag in (0, 1))
    return {"seconds": {"max_lag=0": none, "max_lag=1": one}, "times": none / one, "all": found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--envs", nargs="+", choices=sorted(ENVS), default=list(ENVS))
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=12, help="of a run with a lag or without")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out: dict[str, Any] = {
        "num_envs": args.num_envs,
        "chunks": args.chunks,
        "load_before": os.getloadavg()[0],
    }
    for name in args.envs:
        preset, *overrides = ENVS[name]
        overrides += [f"env.num_envs={args.num_envs}", f"algorithm.num_chunks={args.chunks}"]
        shards = out.setdefault("shards", {})
        shards[name] = measure(preset, overrides, args.repeats)
        print(name, json.dumps(shards[name]), flush=True)
    out["lag"] = {"mujoco_pick_sac_flow": measure_lag(3, args.iterations)}
    print(json.dumps(out["lag"]), flush=True)
    out |= {
        "load_after": os.getloadavg()[0],
        "commit": git_commit(),
        "versions": versions(),
        "hardware": hardware(),
    }
    if args.out:
        args.out.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
