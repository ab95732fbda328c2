"""PA-RL from recorded episodes alone, and then online: does it help, and does it dip?

    python benchmarks/post_train.py maniskill_pickcube_pa_rl      the imitation policies, first
    python benchmarks/pa_rl_offline.py --seeds 0 1 2

The imitation policy of each seed of that benchmark plays 1,000 episodes of PickCube-v1, failures
included. PA-RL learns from these without an env step, and then goes on in the env. Runs go to
``runs/bench/pa_rl_offline/SEED``; an interrupted one goes on. The result is
``benchmarks/pa_rl_offline.json``. Success is on 256 initial states never trained on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from post_train import embodyrl, spent
from shared import evaluations, write

from embodyrl.functional.intervals import bootstrap_iqm, wilson
from embodyrl.training.run_folder import finished

START = "maniskill_pickcube_pa_rl"
EPISODES = 1000


def run(seed: int) -> Path:
    """One seed, or what is left of it; returns its folder."""
    start = Path("runs/bench") / START / str(seed) / "sft"
    if not finished(start):
        raise SystemExit(
            f"{start} is not there: run `python benchmarks/post_train.py {START} --seeds {seed}` first."
        )
    folder = Path("runs/bench/pa_rl_offline") / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    given = [f"run.out={folder}", f"run.seed={seed}", f"env.seed={seed}"]
    if not (folder / "tried").exists():
        acts = ("--policy", str(start), "--keep-failures", "--episodes", str(EPISODES))
        embodyrl(
            folder,
            "collect",
            "maniskill_pickcube_sft",
            *acts,
            *("--seed", str(seed), "--out", str(folder / "tried")),
        )
    if not finished(folder / "offline"):
        words = (
            "run.name=offline",
            f"run.init_checkpoint={start}",
            f"data.path={folder / 'tried'}",
        )
        embodyrl(folder, "train", f"{START}_offline", *given, *words)
    if not finished(folder / "online"):
        words = ("run.name=online", f"run.init_checkpoint={folder / 'offline'}")
        embodyrl(folder, "train", START, *given, *words, "run.iterations=50", "run.eval_every=5")
    return folder


def rates(folder: Path) -> list[dict[str, Any]]:
    """The looks of a run, with their 95% intervals."""
    return [
        {
            **{key: row[key] for key in ("iteration", "env_steps", "successes", "episodes")},
            "interval": wilson(row["successes"], row["episodes"]),
        }
        for row in evaluations(folder)
    ]


def read(folder: Path, seed: int) -> dict[str, Any]:
    """What one seed came to."""
    # The imitation policy on the same states: the first look of the run that starts from it.
    start = rates(Path("runs/bench") / START / str(seed) / "rl")[0]
    offline, online = rates(folder / "offline"), rates(folder / "online")
    share = [look["successes"] / look["episodes"] for look in (start, *online)]
    return {
        "seed": seed,
        "start": start,
        "commit": json.loads((folder / "online" / "meta.json").read_text())["commit"],
        "offline": offline,
        "online": online,
        "rise_offline": share[1] - share[0],
        "deepest_dip_online": min(0.0, min(share[2:]) - share[1]),
        "rise_online": share[-1] - share[1],
        "minutes": spent(folder),
    }


def main() -> None:
    """Runs all seeds, and writes the JSON after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    seeds = []
    for seed in arguments.seeds:
        seeds.append(read(run(seed), seed))
        keys = ("rise_offline", "deepest_dip_online", "rise_online")
        result = {
            "start": START,
            "recorded_episodes": EPISODES,
            "iqm": {key: bootstrap_iqm([s[key] for s in seeds]) for key in keys},
            "seeds": seeds,
        }
        write("pa_rl_offline", result)
        print(seed, {key: round(seeds[-1][key], 3) for key in keys}, flush=True)


if __name__ == "__main__":
    main()
