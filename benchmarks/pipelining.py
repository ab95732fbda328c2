"""Whether rollouts in two threads (``run.workers=2`` without Ray) are faster than in one, on the cores at hand.

    python benchmarks/pipelining.py --out benchmarks/pipelining.json

The same envs and policy in one shard and in two: while one simulates and draws, the policy acts in the other. Both are
measured in turn, several times; the medians are written. Run it on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from embodyrl.build import Envs, build_algorithm
from embodyrl.config import compose
from embodyrl.provenance import git_commit, hardware, versions
from embodyrl.scale.shards import Rollouts, local_rollouts

ENVS = {
    "mujoco_pixels": ("mujoco_pick_ppo",),
    "mujoco_state": ("mujoco_pick_ppo", "env.renderer=none", "env.cameras=[]"),
    "libero_pixels": ("mujoco_pick_ppo", "env.name=libero", "env.suite=libero_object", "env.task_ids=[0]"),
}


def measure(preset: str, overrides: list[str], repeats: int) -> dict[str, Any]:
    """Env steps per second by number of shards."""
    pools: dict[int, tuple[Rollouts, Any]] = {}
    rates: dict[int, list[float]] = {1: [], 2: []}
    for workers in rates:
        config = compose(preset, [*overrides, f"run.workers={workers}", "run.init_checkpoint=", "run.device=cpu"])
        envs = Envs(config)
        algorithm = build_algorithm(config, envs, torch.device("cpu"))
        envs.close()
        pools[workers] = local_rollouts(config), algorithm
    for iteration in range(repeats + 1):
        for workers, (rollouts, algorithm) in pools.items():
            generator, began = torch.Generator(), time.perf_counter()
            batch = rollouts.collect(
                algorithm, iteration, generator=generator, device=torch.device("cpu"), between=lambda: None
            )
            if iteration:  # the first builds scenes and warms up
                rates[workers].append(batch.env_steps / (time.perf_counter() - began))
    for rollouts, _ in pools.values():
        rollouts.close()
    one, two = (statistics.median(rates[workers]) for workers in (1, 2))
    return {"steps_per_s": {"1 shard": one, "2 shards": two}, "times": two / one, "all": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", choices=sorted(ENVS), default=list(ENVS))
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out: dict[str, Any] = {"num_envs": args.num_envs, "chunks": args.chunks, "load_before": os.getloadavg()[0]}
    for name in args.envs:
        preset, *overrides = ENVS[name]
        overrides += [f"env.num_envs={args.num_envs}", f"algorithm.num_chunks={args.chunks}"]
        out[name] = measure(preset, overrides, args.repeats)
        print(name, json.dumps(out[name]), flush=True)
    out |= {"load_after": os.getloadavg()[0], "commit": git_commit(), "versions": versions(), "hardware": hardware()}
    if args.out:
        args.out.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
