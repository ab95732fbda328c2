"""What ``embodyrl mixture`` finds, and whether it is better than drawing every frame alike.

    python benchmarks/mixture.py --seeds 0 1 2

The pick task from states. Each seed has three data sets: few careful demonstrations, many of a noisy
expert, and many of another task (``reach``). The search trains a policy for each mixture of its design
and one for the mixture that it proposes; both that and the default are scored in initial states that
had no part in the choice. Everything is kept in ``runs/bench/mixture/SEED``, so an interrupted
benchmark goes on. The result is ``benchmarks/mixture.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from shared import HERE, write

from embodyrl.functional.intervals import bootstrap_iqm

OUT = Path("runs/bench/mixture")
ENV = ("mujoco", "env.cameras=[]", "env.renderer=none", "env.num_envs=16")
DATA = {
    "careful": ("env.task=pick", "--noise", "0.1", "--episodes", "15"),
    "noisy": ("env.task=pick", "--noise", "0.5", "--episodes", "60"),
    "other": ("env.task=reach", "--noise", "0.1", "--episodes", "60"),
}
PRESET = {
    "env": {"name": "mujoco", "task": "pick", "cameras": [], "renderer": "none", "num_envs": 16},
    "policy": {"name": "flow_mlp", "horizon": 5, "execute": 2},
    "algorithm": {"name": "sft", "batch_size": 128, "steps_per_iteration": 200, "ema": 0.999},
    "run": {"iterations": 30, "eval_every": 0, "eval_episodes": 16, "videos": 0, "threads": 1,
            "eval_before": False},
}  # fmt: skip


def embodyrl(*words: str) -> None:
    """A command; its failure ends the benchmark."""
    subprocess.run([sys.executable, "-m", "embodyrl.cli", *words], check=True)


def search(seed: int, episodes: int) -> dict[str, Any]:
    """One seed, or what is left of it."""
    folder = OUT / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, given in DATA.items():
        if not (folder / name).exists():
            embodyrl("collect", *ENV, *given, "--seed", str(seed), "--out", str(folder / name))
    preset = folder / "preset.yaml"
    preset.write_text("# Imitation from states.\n" + yaml.safe_dump(PRESET))
    first, *more = (str(folder / name) for name in DATA)
    sets = (f"data.path={first}", f"data.more=[{','.join(more)}]")
    given = ("--seeds", str(seed), "--episodes", str(episodes), "--out", str(folder / "runs"))
    began = time.monotonic()
    embodyrl("mixture", str(preset), *sets, *given)
    found = json.loads((folder / "runs" / "mixture.json").read_text())
    timer = folder / "minutes.json"  # of the first time; what is finished takes none
    if not timer.exists():
        timer.write_text(json.dumps((time.monotonic() - began) / 60))
    kept = ("by_frames", "mixtures", "proposed", "confirmed")
    return {"seed": seed, "minutes": json.loads(timer.read_text())} | {k: found[k] for k in kept}


def main() -> None:
    """Runs all seeds, and writes the JSON after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=128)
    a = parser.parse_args()
    path = HERE / "mixture.json"
    known = (
        {row["seed"]: row for row in json.loads(path.read_text())["seeds"]} if path.exists() else {}
    )
    for seed in a.seeds:
        known[seed] = search(seed, a.episodes)
        rows = [known[k] for k in sorted(known)]
        means = zip(*(row["confirmed"]["means"] for row in rows), strict=True)
        iqm = dict(zip(("by_frames", "proposed"), map(bootstrap_iqm, means), strict=True))
        write("mixture", {"data": list(DATA), "seeds": rows, "iqm": iqm})
        print(seed, known[seed]["proposed"], known[seed]["confirmed"], flush=True)


if __name__ == "__main__":
    main()
