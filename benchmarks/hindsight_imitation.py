"""What imitation gains by telling where episodes lead (``algorithm.hindsight_coef``), from pictures.

    python benchmarks/hindsight_imitation.py --seeds 0 1 2

The same demonstrations, seeds and gradient steps, with and without the second loss. Demonstrations
are those of ``post_train.py``, in ``runs/bench/TASK/SEED``, where the policies go too. The result is
``benchmarks/hindsight_imitation.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from post_train import JOBS, embodyrl
from shared import HERE, scored, write

from embodyrl.functional.intervals import bootstrap_iqm
from embodyrl.training.run_folder import finished

TASKS = ("mujoco_pick_pa_rl", "mujoco_push_pa_rl")
"""Names of jobs of ``post_train.py``."""
WEIGHTS = (0.0, 0.3)


def train(task: str, seed: int, weight: float) -> Path:
    """One imitation policy, or what is left of it; returns its folder."""
    folder = Path("runs/bench") / task / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    job = JOBS[task]
    if not (folder / "demos").exists():
        given = ("--seed", str(seed), "--out", str(folder / "demos"))
        embodyrl(folder, "collect", *job.collect, *given)
    name = f"sft_hindsight_{weight}"
    if not finished(folder / name):
        where = [f"run.out={folder}", f"run.name={name}", f"data.path={folder / 'demos'}"]
        given = [f"run.seed={seed}", f"env.seed={seed}", f"algorithm.hindsight_coef={weight}"]
        embodyrl(folder, "train", job.sft, *where, *given)
    return folder / name


def score(run: Path) -> list[float]:
    """Successes, episodes and interval of a run."""
    return scored(run, run / "score.json", "--episodes", "256")


def main() -> None:
    """Trains and scores what is left, and writes the JSON after each seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    path = HERE / "hindsight_imitation.json"
    tasks: dict[str, Any] = json.loads(path.read_text())["tasks"] if path.exists() else {}
    for task in arguments.tasks:
        for seed in arguments.seeds:
            rows = tasks.setdefault(task, {"seeds": {}})
            rows["seeds"][str(seed)] = {
                str(weight): score(train(task, seed, weight)) for weight in WEIGHTS
            }
            for weight in WEIGHTS:
                found = [row[str(weight)] for row in rows["seeds"].values()]
                rates = [row[0] / row[1] for row in found]
                rows.setdefault("iqm", {})[str(weight)] = bootstrap_iqm(rates)
            write("hindsight_imitation", {"tasks": tasks})
            print(task, seed, rows["seeds"][str(seed)], flush=True)


if __name__ == "__main__":
    main()
