"""What a second core gains in the quickstart's SAC-Flow.

    python benchmarks/cores.py --run runs/quickstart --out benchmarks/cores.json

``wall``: two steps of the critics and one of the actor, after the quickstart's imitation, beside its
demonstrations; seconds with one and with two of PyTorch's threads, in turn. ``critical path``: the
same pieces one after the other, each by the CPU time of its thread; the longest of those that may
run side by side counts. ``iterations``: the command ``train`` held to one core and to two, seconds
of its last iterations.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
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

HIDDEN = "policy.critic=privileged"
"""What was measured first: the quickstart of that day, whose critics read the simulator's state."""


class Timed:
    """Stands in for ``side_by_side``: adds up what the shorter pieces would have hidden."""

    def __init__(self) -> None:
        self.hidden = 0.0

    def __call__(self, pieces: Sequence[Callable[[], Any]], device: Any = "cpu") -> list[Any]:
        results = []
        seconds = []
        for piece in pieces:
            began = time.thread_time()
            results.append(piece())
            seconds.append(time.thread_time() - began)
        self.hidden += sum(seconds) - max(seconds)
        return results


def measure(run: Path, repeats: int) -> dict[str, Any]:
    settings = [
        f"run.init_checkpoint={run / 'sft'}", f"data.path={run / 'demos'}", "algorithm.warmup_chunks=256",
        "algorithm.critic_warmup=0", "algorithm.utd=0.01", "run.device=cpu", HIDDEN,
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
    whole = []
    path = []
    for _ in range(repeats):
        embodyrl.algorithms.sac_flow.side_by_side = timed = Timed()
        whole.append(cycle(time.thread_time))
        path.append(whole[-1] - timed.hidden)
    embodyrl.algorithms.sac_flow.side_by_side = plain
    envs.close()
    one, two = (statistics.median(wall[n]) for n in (1, 2))
    work = statistics.median(whole)
    longest = statistics.median(path)
    return {
        "wall": {"1 thread": one, "2 threads": two, "times": one / two, "all": wall},
        "critical path": {"all pieces": work, "longest": longest, "times": work / longest},
    }


def iterations(run: Path, count: int, folder: Path, warm: int = 6) -> dict[str, Any]:
    """Seconds of the iterations after the first ``warm`` ones, on one core and on two."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("This needs two cores.")
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    seconds = {}
    for n in (1, 2):
        command = [
            sys.executable, "-m", "embodyrl.cli", "train", "mujoco_pick_sac_flow", f"run.init_checkpoint={run / 'sft'}",
            f"data.path={run / 'demos'}", f"run.out={folder}", f"run.name=cores_{n}", f"run.iterations={count}",
            "run.eval_every=0", "run.eval_before=false", f"run.checkpoint_every={count}", "run.videos=0",
            "run.device=cpu", HIDDEN,
        ]  # fmt: skip
        hold = functools.partial(os.sched_setaffinity, 0, cores[:n])
        subprocess.run(command, check=True, env=environment, preexec_fn=hold)
        lines = (folder / f"cores_{n}" / "metrics.jsonl").read_text().splitlines()
        minutes = [json.loads(line)["minutes"] for line in lines]
        seconds[n] = 60 * (minutes[-1] - minutes[warm - 1])
    return {"1 core": seconds[1], "2 cores": seconds[2], "times": seconds[1] / seconds[2]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, default=Path("runs/quickstart"), help="its folder")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=26)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out: dict[str, Any] = {"load_before": os.getloadavg()[0]}
    out |= measure(args.run, args.repeats)
    with tempfile.TemporaryDirectory() as folder:
        out["iterations"] = iterations(args.run, args.iterations, Path(folder))
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
