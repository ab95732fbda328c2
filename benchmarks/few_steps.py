"""Few denoising steps: what a policy loses by taking one in place of four, and what distillation gives back.

    python benchmarks/few_steps.py --seeds 0 1 2

The teachers are the quickstart's imitation policy and its policy after PA-RL, from
``post_train.py quickstart`` in ``runs/bench/quickstart/SEED``, and are trained where they are not there.
Each is scored with its own steps, with fewer steps of Euler, and after ``algorithm.name=distill``
into as many, on the same held-out states. Beside the imitation policy stands a shortcut policy, which
imitates the same demonstrations with the same settings (``policy.shortcut_steps``); its one set of
weights is scored with each number of steps. The result is ``benchmarks/few_steps.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from post_train import embodyrl, run
from shared import HERE, complete, scored, write

from embodyrl.build import load_config, load_policy, load_spec
from embodyrl.functional.intervals import bootstrap_iqm
from embodyrl.training.run_folder import finished
from embodyrl.types import Obs

TEACHERS = ("sft", "rl")
DECISIONS = 200
SHORTCUT = 8
"""The most steps that the shortcut policy learns to act in."""


def distilled(folder: Path, seed: int, teacher: str, steps: int, iterations: int) -> Path:
    """The student of a teacher, trained where it is not there; returns its run."""
    name = f"distill_{teacher}_{steps}"
    if not finished(folder / name):
        # The student has the teacher's parts: a chooser goes on choosing among its proposals.
        chooser = {
            key: value
            for key, value in vars(load_config(str(folder / teacher)).policy).items()
            if key in ("chooser_width", "proposals") and value
        }
        parts = (
            [f"policy.{k}={v}" for k, v in chooser.items()] if "chooser_width" in chooser else []
        )
        where = [f"run.out={folder}", f"run.name={name}", f"data.path={folder / 'demos'}"]
        start = [f"run.init_checkpoint={folder / teacher}", f"policy.num_denoise_steps={steps}"]
        given = [f"run.seed={seed}", f"env.seed={seed}", f"run.iterations={iterations}"]
        embodyrl(folder, "train", "mujoco_pick_distill", *where, *start, *given, *parts)
    return folder / name


def shortcut(folder: Path) -> Path:
    """The imitation policy again, as a shortcut policy, trained where it is not there; its run."""
    if not finished(folder / "shortcut"):
        given = (f"run.out={folder}", "run.name=shortcut", f"policy.shortcut_steps={SHORTCUT}")
        complete(load_config(str(folder / "sft"), given))
    return folder / "shortcut"


def milliseconds(path: Path, *overrides: str) -> float:
    """The median time of a decision of one robot, ms, on one thread."""
    config = load_config(str(path), overrides)
    spec = load_spec(str(path))
    policy: Any = load_policy(str(path), config.policy, spec, 0)
    policy.eval()
    images = {
        name: torch.zeros(1, *size, 3, dtype=torch.uint8) for name, size in spec.cameras.items()
    }
    obs = Obs(images, torch.zeros(1, spec.proprio_dim), ["pick up the red block"])
    took = []
    for i in range(DECISIONS):
        began = time.perf_counter()
        policy.sample(obs, generator=torch.Generator().manual_seed(i), mode="eval")
        took.append(1e3 * (time.perf_counter() - began))
    return statistics.median(took)


def measure(
    folder: Path, seed: int, teacher: str, episodes: int, iterations: int, steps: list[int]
) -> dict[str, dict[str, Any]]:
    """Way of acting -> successes, episodes, interval, and milliseconds of a decision."""
    given = ("--episodes", str(episodes))
    rows: dict[str, tuple[Path, tuple[str, ...]]] = {"teacher": (folder / teacher, ())}
    for k in steps:
        rows[f"euler_{k}"] = (folder / teacher, (f"policy.num_denoise_steps={k}",))
        rows[f"distilled_{k}"] = (distilled(folder, seed, teacher, k, iterations), ())
    if teacher == "sft":
        own = load_config(str(folder / teacher)).policy.num_denoise_steps
        for k in sorted({*steps, own}):
            rows[f"shortcut_{k}"] = (shortcut(folder), (f"policy.num_denoise_steps={k}",))
    return {
        name: {
            "score": scored(path, folder / f"few_{teacher}_{name}.json", *given, *overrides),
            "ms": milliseconds(path, *overrides),
        }
        for name, (path, overrides) in rows.items()
    }


def main() -> None:
    """Measures what is left, and writes the JSON after each seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=12, help="of distillation, 50 steps each")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--teachers", nargs="+", choices=TEACHERS, default=[*TEACHERS])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    path = HERE / "few_steps.json"
    names = ("episodes", "iterations", "steps")
    settings = {name: getattr(arguments, name) for name in names}
    earlier = json.loads(path.read_text()) if path.exists() else {}
    teachers: dict[str, Any] = earlier.get("teachers", {})
    if earlier.get("settings") != settings:
        teachers = {}
    for seed in arguments.seeds:
        folder = run("quickstart", seed, [])
        for teacher in arguments.teachers:
            rows = teachers.setdefault(teacher, {"seeds": {}})
            rows["seeds"][str(seed)] = measure(folder, seed, teacher, **settings)
            found = rows["seeds"].values()
            rows["iqm"] = {
                name: bootstrap_iqm([f[name]["score"][0] / f[name]["score"][1] for f in found])
                for name in next(iter(found))
            }
            write("few_steps", {"settings": settings, "teachers": teachers})
            print(teacher, seed, rows["seeds"][str(seed)], flush=True)


if __name__ == "__main__":
    main()
