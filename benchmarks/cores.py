"""What a second core gains in the gradient steps of the quickstart's SAC-Flow.

    python benchmarks/cores.py --run runs/quickstart --out benchmarks/cores.json

Two steps of the critics and one of the actor, after the quickstart's imitation, beside its
demonstrations. ``wall``: seconds with one and with two of PyTorch's threads, in turn. ``critical
path``: the pieces one after the other, each by the CPU time of its thread; the longest of those
that may run side by side counts. That is what two idle cores would take, and other programs on the
machine change it little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import embodyrl.algorithms.sac_flow
from embodyrl.algorithms.optim import Means
from embodyrl.config import compose
from embodyrl.rollouts.collect import Player
from embodyrl.rollouts.seeding import seeded
from embodyrl.storage.provenance import git_commit, hardware, versions
from embodyrl.training.load_demos import load_demos
from embodyrl.training.setup import Envs, build_algorithm


class Timed:
    """Stands in for ``side_by_side``: adds up what the shorter pieces would have hidden."""

    def __init__(self) -> None:
        self.hidden = 0.0

    def __call__(self, pieces: Sequence[Callable[[], Any]], device: Any = "cpu") -> list[Any]:
        results, seconds = [], []
        for piece in pieces:
            began = time.thread_time()
            results.append(piece())
            seconds.append(time.thread_time() - began)
        self.hidden += sum(seconds) - max(seconds)
        return results


def measure(run: Path, repeats: int) -> dict[str, Any]:
    settings = [
        f"run.init_checkpoint={run / 'sft'}", f"data.path={run / 'demos'}", "algorithm.warmup_chunks=256",
        "algorithm.critic_warmup=0", "algorithm.utd=0.01", "run.device=cpu",
    ]  # fmt: skip
    config = compose("mujoco_pick_sac_flow", settings)
    envs = Envs(config)
    algorithm: Any = build_algorithm(config, envs, torch.device("cpu"))
    algorithm.add_demos(load_demos(config, algorithm, envs.spec))
    generator = seeded(0, 0)
    batch = Player(envs.train).collect(algorithm, 0, generator=generator)
    algorithm.update(batch, progress=0.0, generator=generator)

    def cycle(clock: Callable[[], float]) -> float:
        algorithm.gradient_steps = algorithm.config.policy_delay
        began = clock()
        algorithm._gradient_steps(algorithm.config.policy_delay, generator, Means())
        return clock() - began

    # With threads, in turn.
    wall: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(repeats):
        for threads, found in wall.items():
            torch.set_num_threads(threads)
            found.append(cycle(time.perf_counter))
    # One after the other.
    torch.set_num_threads(1)
    plain = embodyrl.algorithms.sac_flow.side_by_side
    whole, path = [], []
    for _ in range(repeats):
        embodyrl.algorithms.sac_flow.side_by_side = timed = Timed()
        whole.append(cycle(time.thread_time))
        path.append(whole[-1] - timed.hidden)
    embodyrl.algorithms.sac_flow.side_by_side = plain
    envs.close()
    one, two = (statistics.median(wall[n]) for n in (1, 2))
    work, longest = statistics.median(whole), statistics.median(path)
    return {
        "wall": {"1 thread": one, "2 threads": two, "times": one / two, "all": wall},
        "critical path": {"all pieces": work, "longest": longest, "times": work / longest},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, default=Path("runs/quickstart"), help="its folder")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out: dict[str, Any] = {"load_before": os.getloadavg()[0]}
    out |= measure(args.run, args.repeats)
    out |= {
        "load_after": os.getloadavg()[0],
        "commit": git_commit(),
        "versions": versions(),
        "hardware": hardware(),
    }
    print(json.dumps(out))
    if args.out:
        args.out.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
