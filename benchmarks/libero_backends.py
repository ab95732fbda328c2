"""What LIBERO's backends are to a policy: whether it scores the same in each, and how long its training takes in each.

    python benchmarks/libero_backends.py score runs/bench/libero_object/0/sft --backends native
    robosuite python benchmarks/libero_backends.py time runs/bench/libero_object/0/sft --iterations
    3

``score`` evaluates one checkpoint on the same official initial states in each backend: successes
with their intervals, and in how many states two backends agree. ``time`` runs a few iterations of
the preset ``libero_object_ppo`` in each, from the policy that imitation left, and writes the median
minutes of one. ``minutes_to_success`` is that times the iterations after which the run of
``libero_object.json`` had reached its final success: an extrapolation, which holds because both
backends' physics are equal; what learning from OpenGL's pictures instead of the ray caster's
changes is not in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from embodyrl.config import compose
from embodyrl.storage.loggers import read_metrics
from embodyrl.storage.provenance import git_commit, hardware, versions
from embodyrl.training.evaluate import evaluate_checkpoint
from embodyrl.training.runner import train

BENCHMARKED = Path(__file__).with_name("libero_object.json")
WORKERS = {
    "native": 1,
    "warp": 1,
    "robosuite": os.cpu_count() or 1,
}  # native has threads, warp its device


def score(run: str, backends: list[str], overrides: list[str], episodes: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    solved: dict[str, dict[int, bool]] = {}
    for backend in backends:
        where = [f"env.backend={backend}", f"env.num_workers={WORKERS[backend]}"]
        result = evaluate_checkpoint(run, [*where, *overrides], episodes=episodes)
        solved[backend] = {episode["init"]: episode["success"] for episode in result["results"]}
        out[backend] = {
            key: result[key]
            for key in ("episodes", "successes", "success_rate", "interval", "tasks")
        }
        print(backend, json.dumps(out[backend]), flush=True)
    first = solved[backends[0]]
    for backend in backends[1:]:
        same = sum(first[init] == success for init, success in solved[backend].items())
        out[backend][f"states_as_in_{backends[0]}"] = same
        low, high = out[backends[0]]["interval"]
        out[backend]["within_its_interval"] = low <= out[backend]["success_rate"] <= high
    return out


def iterations_to_success() -> int:
    """Of the benchmarked run, until it had the success that it ended with."""
    evals = json.loads(BENCHMARKED.read_text())["seeds"][0]["evals"]
    return next(e["iteration"] for e in evals if e["successes"] >= evals[-1]["successes"])


def time_training(
    start: str, backend: str, iterations: int, overrides: list[str]
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"env.backend={backend}", f"env.num_workers={WORKERS[backend]}", f"run.out={folder}",
            f"run.init_checkpoint={start}", f"run.iterations={iterations + 1}", "run.eval_every=0",
            "run.eval_before=false", "run.eval_episodes=1", "run.checkpoint_every=1000", "run.videos=0",
            "policy.critic=privileged",
        ]  # fmt: skip
        rows = read_metrics(
            train(compose("libero_object_ppo", [*settings, *overrides])) / "metrics.jsonl"
        )
    # Each row's time less the one before: the first iteration also builds scenes and compiles.
    each = [b["minutes"] - a["minutes"] for a, b in itertools.pairwise(rows)]
    median = statistics.median(each)
    return {
        "minutes_per_iteration": median,
        "all": each,
        "rollout_minutes": statistics.median(row["rollout_seconds"] / 60 for row in rows[1:]),
        "env_steps_per_iteration": rows[-1]["env_steps"] - rows[-2]["env_steps"],
        "minutes_to_success": median * iterations_to_success(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("score", "time"))
    parser.add_argument("run", help="a run's folder or a checkpoint: to score, or to start from")
    parser.add_argument(
        "--backends", nargs="+", choices=sorted(WORKERS), default=["native", "robosuite"]
    )
    parser.add_argument("--episodes", type=int, default=90)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument(
        "--overrides", nargs="*", default=[], help="of the config, e.g. env.num_envs=8"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    a = parser.parse_args()
    found = json.loads(a.out.read_text()) if a.out.exists() else {}
    if a.part == "score":
        found["score"] = score(a.run, a.backends, a.overrides, a.episodes)
    else:
        found["time"] = {"load_before": os.getloadavg()[0]}
        for backend in a.backends:
            found["time"][backend] = time_training(a.run, backend, a.iterations, a.overrides)
            print(backend, json.dumps(found["time"][backend]), flush=True)
    found |= {"commit": git_commit(), "versions": versions(), "hardware": hardware()}
    a.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
