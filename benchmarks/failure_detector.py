"""How well failure detectors know that a policy will fail, and how early; nothing but imitation is trained.

    python benchmarks/failure_detector.py --seeds 0 1 2

Each seed of each task: demonstrations and imitation; episodes of that policy without exploration noise,
of which the successes fit and calibrate a detector of each kind for 5% false alarms; others, on
which it is tested. ``clock`` knows the time alone: what another kind detects beyond it, it has
seen. On the pick task also episodes under a moved camera and another light, where the promise of
the calibration does not hold. ``--doubt`` adds the doubt of a world model, which is trained for it.
Every piece is kept in ``runs/failure_detector/TASK/SEED``, so the same command goes on. The result
is ``benchmarks/failure_detector.json``.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dream_chooser import TINY_SFT, TINY_WORLD, asked
from imagination import embodyrl
from shared import HERE, write

from embodyrl.functional.intervals import format_rate


@dataclass(frozen=True)
class Task:
    """A task: its preset of imitation, its demonstrations, and other scenes to test in."""

    preset: str
    demos: int
    noise: float
    shifts: tuple[str, ...] = ()


TASKS = {
    "mujoco_pick": Task("mujoco_pick_sft", 100, 0.15, ("ood_camera", "ood_lighting")),
    "maniskill_pushcube_rgb": Task("maniskill_pushcube_rgb_sft", 50, 0.15),
}
KINDS = ("float", "nearest", "stac", "clock")
PLAN = ("policy.horizon=10", "policy.execute=5")
"""Plans must overlap for STAC."""
FULL = {"played": 360, "later": 240, "shifted": 64, "rate": "0.05"}
TINY = {"demos": 6, "played": 4, "later": 4, "shifted": 2, "rate": "0.5"}


def collect(folder: Path, name: str, preset: str, count: int, *how: str) -> Path:
    """A data set, unless it is there."""
    if not (folder / name).exists():
        given = ("--episodes", str(count), "--out", str(folder / name))
        embodyrl(folder, name, "collect", preset, *how, *given)
    return folder / name


def run(folder: Path, name: str, seed: int, size: dict[str, Any], doubt: bool) -> dict[str, Any]:
    """One seed of a task, or what is left of it."""
    folder.mkdir(parents=True, exist_ok=True)
    task = TASKS[name]
    tiny = size is TINY
    # The policy, by imitation.
    careful = ("--noise", str(task.noise), "--seed", str(seed))
    demos = collect(folder, "demos", task.preset, size.get("demos", task.demos), *careful)
    sft = folder / "sft"
    common = [f"run.out={folder}", f"run.seed={seed}", f"env.seed={seed}", "run.name=sft", *PLAN]
    small = TINY_SFT if tiny else []
    embodyrl(folder, "sft", "train", task.preset, *common, f"data.path={demos}", *small)
    # What it does. A tiny policy solves nothing, so there the demonstrations stand for successes.
    own = ("--policy", str(sft), "--noise-free", "--keep-failures")
    played = collect(folder, "played", task.preset, size["played"], *own, "--seed", str(100 + seed))
    later = collect(folder, "later", task.preset, size["later"], *own, "--seed", str(200 + seed))
    shifted = {
        split: collect(
            folder, split, task.preset, size["shifted"], f"env.split={split}", *own, "--seed", "0"
        )
        for split in task.shifts
    }
    kinds: dict[str, list[str]] = {kind: [] for kind in KINDS}
    if doubt:
        world = folder / "world"
        settings = [f"data=[{demos},{played}]", f"out={world}", f"seed={seed}", "found=true"]
        settings += ["judges=3", "max_false_positives=1.0", *(TINY_WORLD if tiny else [])]
        embodyrl(folder, "world", "world", "train", *settings)
        kinds["doubt"] = ["--dream", str(world / "model")]
    # The detectors.
    result: dict[str, Any] = {"task": name, "seed": seed}
    for kind, more in kinds.items():
        detector = str(folder / kind)
        known = str(demos if tiny else played)
        how = ("--out", detector, "--kind", kind, "--false-alarms", size["rate"], *more)
        fitted = asked(folder, f"fit_{kind}", "detector", "fit", str(sft), known, *how)
        result[kind] = {
            "fitted": fitted["fitted"],
            "calibrated": fitted["calibrated"],
            "test": asked(folder, f"test_{kind}", "detector", "test", detector, str(later)),
            "shifted": {
                split: asked(folder, f"{split}_{kind}", "detector", "test", detector, str(data))
                for split, data in shifted.items()
            },
        }
    return result | {"minutes": json.loads((folder / "minutes.json").read_text())}


def show(row: dict[str, Any]) -> None:
    """One seed of a task in a few lines."""
    for kind in (kind for kind in (*KINDS, "doubt") if kind in row):
        test = row[kind]["test"]
        found, wrong = test["detected"], test["false_alarms"]
        half = test["by_time"][4]
        print(
            f"{row['task']} {row['seed']}, {kind}: detected {format_rate(found['k'], found['n'])}, "
            f"by half of the time {format_rate(half['k'], half['n'])}, "
            f"false alarms {format_rate(wrong['k'], wrong['n'])}"
        )


def main() -> None:
    """Runs seeds, and writes the JSON after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["mujoco_pick"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--doubt", action="store_true", help="also train a world model, and ask it")
    parser.add_argument("--out", type=Path, default=Path("runs/failure_detector"))
    text = "so small that it means nothing; nothing is published"
    parser.add_argument("--tiny", action="store_true", help=text)
    a = parser.parse_args()
    path = HERE / "failure_detector.json"
    rows = json.loads(path.read_text())["runs"] if path.exists() else []
    known = {(row["task"], row["seed"]): row for row in rows}
    for task in a.tasks:
        for seed in a.seeds:
            folder = a.out / task / str(seed)
            done = run(folder, task, seed, TINY if a.tiny else FULL, a.doubt)
            known[task, seed] = done
            show(done)
            if not a.tiny:
                write("failure_detector", {"runs": [known[key] for key in sorted(known)]})


if __name__ == "__main__":
    main()
