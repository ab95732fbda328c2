"""What the average of the actor's weights is worth: PA-RL on StackCube with it and without.

    python benchmarks/weight_average.py --start runs/bench/maniskill_stackcube_pa_rl/0/sft

Both runs have seed 0 and start from the same imitation policy. Interrupted, it goes on. Writes
``benchmarks/weight_average.json``: successes of 256 held-out states by env steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from shared import evaluations, write

RUNS = Path("runs/bench/weight_average")
EMA = {"averaged": "0.98", "not averaged": "0"}
LENGTH = ("run.iterations=50", "run.eval_every=25", "run.videos=0", "run.seed=0", "env.seed=0")


def main() -> None:
    """Runs both, then writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", required=True, help="the imitation run")
    start = parser.parse_args().start
    result = {}
    for name, ema in EMA.items():
        folder = RUNS / name.replace(" ", "_")
        command = [
            sys.executable,
            "-m",
            "embodyrl.cli",
            "train",
            "maniskill_stackcube_pa_rl",
            *LENGTH,
        ]
        command += [f"run.init_checkpoint={start}", f"algorithm.ema={ema}", f"run.out={folder}"]
        subprocess.run([*command, "run.name=rl"], check=True)
        commit = json.loads((folder / "rl" / "meta.json").read_text())["commit"]
        result[name] = {"ema": float(ema), "commit": commit, "evals": evaluations(folder / "rl")}
    write("weight_average", result)


if __name__ == "__main__":
    main()
