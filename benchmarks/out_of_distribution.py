"""What RL keeps out of distribution: imitation and what RL made of it, on every split that was never trained on.

    python benchmarks/out_of_distribution.py quickstart --seeds 0 1 2

The runs are those of ``post_train.py NAME``, which are made first where they are missing. Each policy is
scored as ``embodyrl eval RUN --ood`` does; both policies of a seed meet the same states, with the noise of
the same seed. A run's scores lie beside it, so an interrupted benchmark goes on. The result is
``benchmarks/out_of_distribution.json``, with one entry for each NAME.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from post_train import JOBS, run
from shared import HERE, write

from embodyrl.functional.intervals import bootstrap_iqm

STAGES = {"imitation": "sft", "rl": "rl"}
"""Stage -> the run's folder."""


def splits_of(policy: Path) -> dict[str, dict[str, Any]]:
    """Split -> successes, episodes, 95% interval, and how it differs."""
    path = policy.with_name(f"{policy.name}_ood.json")
    if not path.exists():
        command = [sys.executable, "-m", "embodyrl.cli", "eval", str(policy), "--ood", "--json"]
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        path.write_text(found.stdout)
    kept = ("successes", "episodes", "interval", "about")
    return {
        split: {key: score[key] for key in kept}
        for split, score in json.loads(path.read_text()).items()
    }


def summary(seeds: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Split -> stage -> interquartile mean over seeds with its bootstrap interval."""
    first = next(iter(seeds.values()))
    return {
        split: {
            stage: bootstrap_iqm(
                [of[stage][split]["successes"] / of[stage][split]["episodes"] for of in seeds.values()]
            )
            for stage in STAGES
        }
        for split in first["imitation"]
    }  # fmt: skip


def main() -> None:
    """Scores the seeds of a task, and writes the JSON after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=["quickstart", *JOBS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    path = HERE / "out_of_distribution.json"
    tasks = json.loads(path.read_text())["tasks"] if path.exists() else {}
    seeds: dict[str, Any] = {}
    for seed in arguments.seeds:
        folder = run(arguments.name, seed, [])
        seeds[str(seed)] = {
            stage: splits_of(folder / name) for stage, name in STAGES.items()
        } | {"commit": json.loads((folder / "rl" / "meta.json").read_text())["commit"]}  # fmt: skip
        tasks[arguments.name] = {"iqm": summary(seeds), "seeds": seeds}
        write("out_of_distribution", {"tasks": tasks})
        print(seed, json.dumps(tasks[arguments.name]["iqm"]), flush=True)


if __name__ == "__main__":
    main()
