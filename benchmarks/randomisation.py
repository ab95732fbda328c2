"""What randomised training does out of distribution: the quickstart's imitation with and without it.

    python benchmarks/randomisation.py --seeds 0 1 2
    python benchmarks/randomisation.py --tiny           whether it runs; writes no JSON

Each variant collects the quickstart's 100 demonstrations in its own env, imitates them, and is scored
as ``embodyrl eval RUN --ood`` does: on held-out states of the usual kind and of every other split,
which are the same for all variants. Runs go to ``runs/bench/randomisation/VARIANT/SEED``; an
interrupted one goes on. The result is ``benchmarks/randomisation.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from shared import HERE, complete, write

from embodyrl.cli.quickstart import DEMONSTRATIONS, EXPERT_NOISE
from embodyrl.config import compose
from embodyrl.data.collect import collect_dataset
from embodyrl.functional.intervals import bootstrap_iqm
from embodyrl.sims.mujoco.layouts import LOOKS, VARIATIONS
from embodyrl.training.ood import evaluate_ood

PRESET = "mujoco_pick_sft"
JITTER = "algorithm.jitter=0.2"
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "jitter": (JITTER,),
    "looks": (f"env.randomise=[{','.join(LOOKS)}]",),
    "all": (f"env.randomise=[{','.join(VARIATIONS)}]", JITTER),
}


def scores(variant: str, seed: int, tiny: bool) -> dict[str, list[int]]:
    """Split -> successes and episodes of one run, which is made or finished first."""
    folder = Path("runs/bench/randomisation") / (f"{variant}_tiny" if tiny else variant) / str(seed)
    demos = folder / "demos"
    given = [f"run.out={folder}", "run.name=sft", f"run.seed={seed}", f"env.seed={seed}"]
    given += [f"data.path={demos}", *VARIANTS[variant]]
    given += ["run.iterations=1", "algorithm.steps_per_iteration=2"] if tiny else []
    config = compose(PRESET, given)
    if not demos.exists():
        count = 8 if tiny else DEMONSTRATIONS
        collect_dataset(config.env, demos, num_episodes=count, noise=EXPERT_NOISE, seed=seed)
    complete(config)
    found = evaluate_ood(str(folder / "sft"), episodes=8 if tiny else 0)
    return {split: [of["successes"], of["episodes"]] for split, of in found.items()}


def summary(seeds: dict[str, dict[str, list[int]]]) -> dict[str, Any]:
    """Split -> interquartile mean over seeds with its bootstrap interval."""
    splits = next(iter(seeds.values()))
    return {
        split: bootstrap_iqm([of[split][0] / of[split][1] for of in seeds.values()])
        for split in splits
    }


def main() -> None:
    """Runs the variants, and writes the JSON after each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", nargs="+", choices=sorted(VARIANTS), default=[*VARIANTS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tiny", action="store_true", help="a few steps of each, and no JSON")
    arguments = parser.parse_args()
    path = HERE / "randomisation.json"
    known: dict[str, Any] = {}
    if path.exists() and not arguments.tiny:
        known = json.loads(path.read_text())["variants"]
    for variant in arguments.variants:
        for seed in arguments.seeds:
            entry = known.setdefault(variant, {"overrides": VARIANTS[variant], "seeds": {}})
            entry["seeds"][str(seed)] = scores(variant, seed, arguments.tiny)
            entry["iqm"] = summary(entry["seeds"])
            print(variant, seed, entry["seeds"][str(seed)], flush=True)
            if not arguments.tiny:
                write("randomisation", {"task": PRESET, "variants": known})


if __name__ == "__main__":
    main()
