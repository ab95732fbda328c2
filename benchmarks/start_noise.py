"""How decided should a policy be? Success of imitation policies by the noise that their flow starts from.

    python benchmarks/start_noise.py --seeds 0 1 2

Nothing is trained but imitation: the same checkpoint is scored on the same held-out states with
``policy.start_noise`` from 1 to 0. Runs go to ``runs/bench/TASK/SEED``, where ``post_train.py``
finds and leaves the same ones. The result is ``benchmarks/start_noise.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from post_train import imitate
from shared import HERE, scored, write

from embodyrl.functional.intervals import bootstrap_iqm

TASKS = ("maniskill_pickcube_pa_rl", "mujoco_pick_pa_rl")
NOISES = (1.0, 0.7, 0.5, 0.3, 0.0)


def score(folder: Path, noise: float) -> list[float]:
    """Successes, episodes and interval of a checkpoint with that noise."""
    given = ("--episodes", "256", f"policy.start_noise={noise}")
    return scored(folder / "sft", folder / f"start_noise_{noise}.json", *given)


def main() -> None:
    """Scores what is not scored yet, and writes the JSON after each seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    path = HERE / "start_noise.json"
    tasks: dict[str, Any] = json.loads(path.read_text())["tasks"] if path.exists() else {}
    for task in arguments.tasks:
        for seed in arguments.seeds:
            imitate(task, seed)
            folder = Path("runs/bench") / task / str(seed)
            rows = tasks.setdefault(task, {"seeds": {}})
            rows["seeds"][str(seed)] = {str(noise): score(folder, noise) for noise in NOISES}
            rows["iqm"] = {
                str(noise): bootstrap_iqm(
                    [
                        found[str(noise)][0] / found[str(noise)][1]
                        for found in rows["seeds"].values()
                    ]
                )
                for noise in NOISES
            }
            write("start_noise", {"tasks": tasks})
            print(task, seed, rows["seeds"][str(seed)], flush=True)


if __name__ == "__main__":
    main()
