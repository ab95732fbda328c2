"""RL guidance: success by how far a policy moves away from the one that its training began with.

    python benchmarks/guidance.py --seeds 0 1 2

Nothing is trained but what ``post_train.py quickstart`` trains, in ``runs/bench/quickstart/SEED``. Its policy
without the chooser is mixed with the imitation policy (``embodyrl eval --base --guidance``), on the
same held-out states. The result is ``benchmarks/guidance.json``.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from post_train import run
from shared import HERE, scored, write

from embodyrl.functional.intervals import bootstrap_iqm

WEIGHTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)


def main() -> None:
    """Scores what is not scored yet, and writes the JSON after each seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=256)
    arguments = parser.parse_args()
    path = HERE / "guidance.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    settings = {"episodes": arguments.episodes, "weights": [*WEIGHTS]}
    seeds: dict[str, Any] = {}
    if earlier.get("settings") == settings:
        seeds = earlier["seeds"]
    for seed in arguments.seeds:
        folder = run("quickstart", seed, [])
        common = ("--episodes", str(arguments.episodes), "--base", str(folder / "sft"))
        seeds[str(seed)] = {
            str(weight): scored(
                folder / "rl",
                folder / f"guidance_{weight}.json",
                *(*common, "--guidance", str(weight), "policy.proposals=1"),
            )
            for weight in WEIGHTS
        }
        iqm = {
            str(weight): bootstrap_iqm(
                [found[str(weight)][0] / found[str(weight)][1] for found in seeds.values()]
            )
            for weight in WEIGHTS
        }
        write("guidance", {"settings": settings, "seeds": seeds, "iqm": iqm})
        print(seed, seeds[str(seed)], flush=True)


if __name__ == "__main__":
    main()
