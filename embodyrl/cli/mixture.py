"""``embodyrl mixture``: how often each of several data sets should be drawn."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodyrl.cli.sweep import one_by_one
from embodyrl.errors import UserError
from embodyrl.interrupt import INTERRUPTED

HELP = """examples:
  embodyrl mixture mujoco_pick_sft data.path=data/own 'data.more=[data/other]' --list
      the runs, by name: each data set alone, half and half, and each by its frames
  embodyrl mixture mujoco_pick_sft data.path=data/own 'data.more=[data/other]' run.iterations=5
      trains them, and says which data.weights to use
  embodyrl mixture mujoco_pick_sft data.path=A 'data.more=[B,C]' --seeds 0 1 2
      three data sets, three runs of each mixture
Success is fitted as a function of the weights. The mixture that promises most is trained too, and is
compared with the one by frames in other initial states. The same command goes on. The exit status is 1
if a run failed.
"""


def add_mixture_verb(verb: Any) -> None:
    """Adds ``embodyrl mixture`` to the parser."""
    text = "Finds how often each of several data sets should be drawn (data.weights)."
    sub = verb("mixture", _run, text, HELP, torch="yes")
    sub.add_argument("preset", help="a preset's name, or a YAML file")
    text = "settings of every run; data.path and data.more name the data sets"
    sub.add_argument("overrides", nargs="*", metavar="key.sub=value", help=text)
    text = "folder of the runs (default: runs/PRESET_mixture)"
    sub.add_argument("--out", default="", metavar="FOLDER", help=text)
    text = "of the runs of each mixture (default: 0)"
    sub.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="N", help=text)
    text = "held-out initial states to choose by, and as many others to confirm it (default: 128)"
    sub.add_argument("--episodes", type=int, default=128, metavar="N", help=text)
    sub.add_argument("--list", action="store_true", help="print the runs, and start none")


def _run(a: argparse.Namespace) -> int:
    from embodyrl.config import compose
    from embodyrl.storage.atomic_files import write_json
    from embodyrl.storage.paths import require_writable
    from embodyrl.training import mixture_search as search

    # What is refused before anything starts.
    for item in a.overrides:
        if item.partition("=")[0] in ("run.name", "run.out", "run.seed"):
            raise UserError(
                "The runs are named and seeded here: leave run.name, run.out and run.seed out, and "
                "give --out and --seeds."
            )
    if a.episodes < 1:
        raise UserError(f"--episodes is {a.episodes}; give at least 1, better 128.")
    if min(a.seeds) < 0 or len(set(a.seeds)) < len(a.seeds):
        raise UserError(f"--seeds is {a.seeds}; give different numbers of at least 0.")
    # 1. Which mixtures are trained.
    default = search.frame_shares(search.require_several(compose(a.preset, a.overrides)))
    out = Path(a.out or f"runs/{Path(a.preset).stem}_mixture")
    trials = search.design(default, a.seeds)
    if a.list:
        print("\n".join(str(out / trial.name) for trial in trials))
        return 0
    require_writable(out, "--out FOLDER")
    # 2. Train and score them; the first episodes are those to choose by.
    if status := _train(a, out, trials):
        return status
    scores = {trial: _solved(a, out, trial) for trial in trials}
    looks = {trial: row[: a.episodes] for trial, row in scores.items()}
    found = search.propose(looks, default)
    # 3. Train what is proposed, and compare it with the default in the other episodes.
    chosen = [search.Trial(tuple(found["weights"]), seed) for seed in a.seeds]
    if status := _train(a, out, chosen):
        return status
    scores |= {trial: _solved(a, out, trial) for trial in chosen}
    fresh = [
        [scores[trial][a.episodes :] for trial in side]
        for side in ([search.Trial(default, seed) for seed in a.seeds], chosen)
    ]
    result = {
        "preset": a.preset,
        "overrides": a.overrides,
        "seeds": a.seeds,
        "by_frames": list(default),
        "mixtures": search.mixture_table(looks),
        "proposed": found,
        "confirmed": search.confirm(*fresh),
    }
    write_json(out / "mixture.json", result)
    _print(result)
    return 0


def _train(a: argparse.Namespace, out: Path, trials: Sequence[Any]) -> int:
    """Trains what is not finished; returns the exit status where something failed."""
    from embodyrl.config import compose
    from embodyrl.training.resume_check import check_folder
    from embodyrl.training.run_folder import complete

    # A process for each run that is not finished.
    commands = {}
    for trial in trials:
        given = [*a.overrides, *trial.overrides(str(out))]
        config = compose(a.preset, given)
        check_folder(config.run.folder, config, lambda text: None)
        if not complete(config):
            commands[trial.name] = [sys.executable, "-m", "embodyrl.cli", "train", a.preset, *given]
    failed = one_by_one(commands)
    if INTERRUPTED in failed.values():
        print("Stopped; the same command goes on from there.")
        return INTERRUPTED
    return 1 if failed else 0


def _solved(a: argparse.Namespace, out: Path, trial: Any) -> list[bool]:
    from embodyrl.training.mixture_search import solved

    # Progress goes beside what is printed.
    def say(text: str) -> None:
        print(f"  {trial.name}: {text}", file=sys.stderr, flush=True)

    return solved(out / trial.name, 2 * a.episodes, say)


def _print(found: dict[str, Any]) -> None:
    from embodyrl.functional.comparison import difference_text
    from embodyrl.functional.intervals import format_rate

    print("data.weights, and the success of the runs that were trained:")
    for row in found["mixtures"]:
        by_frames = "   by their frames" if row["weights"] == found["by_frames"] else ""
        rate = format_rate(row["solved"], row["episodes"])
        print(f"  {_weights(row['weights']):<24}  {rate}{by_frames}")
    # What is proposed, and what became of it.
    proposed = found["proposed"]
    middle, low, high = proposed["predicted"]
    print(
        f"Proposed: {_weights(proposed['weights'])}, predicted {middle:.0%} [{low:.0%}, {high:.0%}]; "
        f"better than by frames with probability {proposed['better']:.2f}."
    )
    confirmed = found["confirmed"]
    said = {
        "better": f"Use data.weights={_weights(proposed['weights'])}.",
        "worse": "Leave data.weights out: by their frames is better.",
        "undecided": "No difference is shown: leave data.weights out, or give more --seeds.",
    }
    print(
        f"Trained, in {confirmed['episodes']} other states: {difference_text(confirmed)} against by "
        f"frames. {said[confirmed['verdict']]}"
    )
    if len(found["seeds"]) == 1:
        print("One run of each: of training anew this says nothing. Give --seeds 0 1 2.")


def _weights(weights: Sequence[float]) -> str:
    return f"[{','.join(f'{w:g}' for w in weights)}]"
