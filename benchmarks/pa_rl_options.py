"""What PA-RL's options do on PickCube-v1 from state.

Frozen policies, edits, residuals, RLT's small actor, gradient ascent, values after each action.

    python benchmarks/post_train.py maniskill_pickcube_pa_rl      PA-RL as it is, first
    python benchmarks/pa_rl_options.py --seeds 0 1 2

Every variant starts from the imitation policy of the same seed of that benchmark, and takes as many
env steps. Runs go to ``runs/bench/pa_rl_options/VARIANT/SEED``; an interrupted one goes on. The result
is ``benchmarks/pa_rl_options.json``. Success is on 256 initial states never trained on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from post_train import embodyrl, read
from shared import HERE, write

from embodyrl.functional.intervals import bootstrap_iqm
from embodyrl.training.run_folder import finished

BASE = "maniskill_pickcube_pa_rl"
VARIANTS = {
    "frozen": ("algorithm.actor_utd=0",),
    "frozen_edit": ("algorithm.actor_utd=0", "policy.edit_scale=0.1"),
    "edit": ("policy.edit_scale=0.1",),
    "residual": ("algorithm.actor_utd=0", "policy.edit_scale=0.1", "policy.edit_only=true"),
    "rlt": (
        "algorithm.actor_utd=0",
        "policy.chooser_sees=shared",
        "policy.edit_scale=2",
        "policy.edit_only=true",
        "algorithm.edit_bc_coef=1",
        "algorithm.edit_dropout=0.5",
    ),
    "ascent": ("policy.ascent_rate=0.01",),
    "prefixes": ("policy.chooser_prefixes=true",),
    "frozen_prefixes": ("algorithm.actor_utd=0", "policy.chooser_prefixes=true"),
}


def train(variant: str, seed: int) -> Path:
    """One run, or what is left of it; returns its folder."""
    start = Path("runs/bench") / BASE / str(seed) / "sft"
    if not finished(start):
        raise SystemExit(
            f"{start} is not there: run `python benchmarks/post_train.py {BASE} --seeds {seed}` first."
        )
    folder = Path("runs/bench/pa_rl_options") / variant / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    if not finished(folder / "rl"):
        given = [f"run.out={folder}", "run.name=rl", f"run.seed={seed}", f"env.seed={seed}"]
        embodyrl(folder, "train", BASE, *given, f"run.init_checkpoint={start}", *VARIANTS[variant])
    return folder


def main() -> None:
    """Runs the variants, and writes the JSON after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", nargs="+", choices=sorted(VARIANTS), default=[*VARIANTS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    path = HERE / "pa_rl_options.json"
    known: dict[str, Any] = json.loads(path.read_text())["variants"] if path.exists() else {}
    for variant in arguments.variants:
        seeds = []
        for seed in arguments.seeds:
            seeds.append(read(train(variant, seed), seed))
            scores = [s["after"][0] / s["after"][1] for s in seeds]
            known[variant] = {
                "overrides": VARIANTS[variant],
                "iqm": bootstrap_iqm(scores),
                "seeds": seeds,
            }
            write("pa_rl_options", {"task": BASE, "variants": known})
            print(variant, seed, seeds[-1]["after"], seeds[-1]["alone"], flush=True)


if __name__ == "__main__":
    main()
