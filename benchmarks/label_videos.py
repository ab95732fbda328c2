"""What films without actions are worth, once their actions are named.

    python benchmarks/label_videos.py --seeds 0 1 2

The quickstart's task from pixels. Each seed has ten demonstrations, and ninety films whose actions
were taken away. ``embodyrl data label`` names these, and imitation learns from the ten alone, from the
ten and the films with named actions, and from a hundred demonstrations with true actions, which is the
most that could be reached. Success is on 256 held-out states. Everything is kept in
``runs/bench/label_videos/SEED``; the result is ``benchmarks/label_videos.json``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from shared import HERE, scored, write

from embodyrl.functional.intervals import bootstrap_iqm
from embodyrl.storage.atomic_files import replacing_folder
from embodyrl.training.run_folder import finished

OUT = Path("runs/bench/label_videos")
ENV = ("mujoco", "env.task=pick", "env.max_blocks=2", "--noise", "0.15")
WAYS = {"own": (), "named": ("named",), "true": ("films",)}
"""Way -> data sets beside the ten demonstrations."""


def embodyrl(*words: str, capture: bool = False) -> str:
    """What a command prints, where that is asked for; its failure ends the benchmark."""
    done = subprocess.run(
        [sys.executable, "-m", "embodyrl.cli", *words],
        check=True, text=True, stdout=subprocess.PIPE if capture else None,
    )  # fmt: skip
    return done.stdout or ""


def without_actions(path: Path, out: Path) -> None:
    """A copy of a data set whose actions are gone."""
    with replacing_folder(out) as folder:
        shutil.copytree(path, folder, dirs_exist_ok=True)
        for file in folder.glob("data/*/*.parquet"):
            table = pq.read_table(file).drop_columns(["action"])
            pq.write_table(table.replace_schema_metadata({}), file)
        info = folder / "meta" / "info.json"
        content = json.loads(info.read_text())
        del content["features"]["action"]
        info.write_text(json.dumps(content))


def run(seed: int, iterations: int) -> dict[str, Any]:
    """One seed, or what is left of it."""
    folder = OUT / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, first in (("own", 10, seed), ("films", 90, 1000 + seed)):
        if not (folder / name).exists():
            given = ("--episodes", str(count), "--seed", str(first), "--out", str(folder / name))
            embodyrl("collect", *ENV, *given)
    if not (folder / "bare").exists():
        without_actions(folder / "films", folder / "bare")
    labels = folder / "labels.json"
    if not (folder / "named").exists():
        words = (str(folder / "bare"), "--like", str(folder / "own"), "--least", "-1")
        said = embodyrl(
            "data", "label", *words, "--out", str(folder / "named"), "--json", capture=True
        )
        labels.write_text(said)
    result: dict[str, Any] = {"seed": seed, "labels": json.loads(labels.read_text())}
    for way, more in WAYS.items():
        if not finished(folder / way):
            data = [
                f"data.path={folder / 'own'}",
                f"data.more=[{','.join(str(folder / m) for m in more)}]",
            ]
            given = [f"run.out={folder}", f"run.name={way}", f"run.seed={seed}", f"env.seed={seed}"]
            given += [
                f"run.iterations={iterations}",
                "algorithm.hindsight_coef=0.3",
                "run.threads=1",
            ]
            embodyrl("train", "mujoco_pick_sft", *data, *given)
        result[way] = scored(folder / way, folder / f"{way}.json", "--episodes", "256")
    return result


def main() -> None:
    """Runs all seeds, and writes the JSON after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=12, help="of imitation, 50 steps each")
    a = parser.parse_args()
    path = HERE / "label_videos.json"
    known = (
        {row["seed"]: row for row in json.loads(path.read_text())["seeds"]} if path.exists() else {}
    )
    for seed in a.seeds:
        known[seed] = run(seed, a.iterations)
        rows = [known[k] for k in sorted(known)]
        iqm = {way: bootstrap_iqm([row[way][0] / row[way][1] for row in rows]) for way in WAYS}
        write("label_videos", {"settings": {"iterations": a.iterations}, "seeds": rows, "iqm": iqm})
        print(seed, {way: known[seed][way] for way in WAYS}, flush=True)


if __name__ == "__main__":
    main()
