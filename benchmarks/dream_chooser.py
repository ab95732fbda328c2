"""What it is worth to let a dream choose, on the quickstart's pick task; no policy is trained for it.

    python benchmarks/dream_chooser.py --seeds 0 1 2

Each seed: demonstrations and imitation (as in the quickstart); 320 noisy episodes of that policy, 240
replays of its successes with a nudge; a world model of them that finds its state in pictures, and one
that reads the simulator's. Of both: the ranking of proposals in 128 held-out states
(``embodyrl world eval --rank``); success on 256 held-out states of the policy alone and of the
dream's choice among 8 proposals; the time of a choice. Every piece is kept in
``runs/dream_chooser/SEED``, so the same command goes on. The result is
``benchmarks/dream_chooser.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from imagination import embodyrl
from shared import HERE, write

from embodyrl.functional.intervals import format_rate
from embodyrl.types import Obs
from embodyrl.world_models.dream_chooser import promises
from embodyrl.world_models.model import WorldModel

STATES = {"found": ["found=true"], "read": ["found=false"]}
"""Where the state comes from -> settings of the world model."""
TASK = ("mujoco", "env.task=pick", "env.max_blocks=2")
FULL = {"demos": 100, "tried": 320, "nudged": 240, "held_out": 70, "states": 128, "episodes": 256}
TINY = {"demos": 6, "tried": 20, "nudged": 20, "held_out": 20, "states": 8, "episodes": 8}
TINY_SFT = ["run.iterations=1", "run.eval_episodes=8", "algorithm.steps_per_iteration=20"]
TINY_WORLD = [
    "codec_steps=2",
    "steps=2",
    "inverse_steps=2",
    "state_steps=200",
    "found_steps=2",
    "held_out=0.3",
]


def collect(folder: Path, name: str, count: int, *how: str) -> Path:
    """A data set, unless it is there."""
    if not (folder / name).exists():
        given = ("--episodes", str(count), "--out", str(folder / name))
        embodyrl(folder, name, "collect", *TASK, *how, *given)
    return folder / name


def asked(folder: Path, name: str, *arguments: str) -> dict[str, Any]:
    """The JSON that a command prints, unless it is there."""
    path = folder / f"{name}.json"
    if not path.exists():
        path.write_text(embodyrl(folder, name, *arguments, "--json", capture=True))
    return json.loads(path.read_text())


def run(folder: Path, seed: int, size: dict[str, int], tiny: bool) -> dict[str, Any]:
    """One seed, or what is left of it."""
    folder.mkdir(parents=True, exist_ok=True)
    # The policy, by imitation.
    demos = collect(folder, "demos", size["demos"], "--noise", "0.15", "--seed", str(seed))
    sft = folder / "sft"
    common = [f"run.out={folder}", f"run.seed={seed}", f"env.seed={seed}", "run.name=sft"]
    small = TINY_SFT if tiny else []
    embodyrl(folder, "sft", "train", "mujoco_pick_sft", *common, f"data.path={demos}", *small)
    # What it does, and how it fails.
    failing = ("--keep-failures", "--past-success", "5")
    own = (*failing, "--policy", str(sft), "--derail", "0.4")
    tried = collect(folder, "tried", size["tried"], *own, "--seed", str(100 + seed))
    # A tiny policy solves nothing, so there the demonstrations are replayed.
    again = (*failing, "--replay", str(demos if tiny else tried), "--seed", str(200 + seed))
    nudged = collect(folder, "nudged", size["nudged"], *again)
    held_out = collect(folder, "held_out", size["held_out"], *own, "--seed", str(300 + seed))
    data = f"data=[{demos},{tried},{nudged}]"
    many = ("--episodes", str(size["episodes"]))
    result: dict[str, Any] = {
        "seed": seed,
        "real_steps": {d.name: frames(d) for d in (demos, tried, nudged)},
        "alone": score(asked(folder, "alone", "eval", str(sft), *many)),
    }
    for state, settings in STATES.items():
        world = folder / f"world_{state}"
        settings = [*settings, f"seed={seed}", "judges=3", "max_false_positives=1.0"]
        settings += TINY_WORLD if tiny else []
        embodyrl(folder, world.name, "world", "train", data, f"out={world}", *settings)
        model = str(world / "model")
        ranks = ("--data", str(held_out), "--rank", str(sft), "--states", str(size["states"]))
        gate = asked(folder, f"gate_{state}", "world", "eval", model, *ranks)
        chosen = asked(folder, f"chosen_{state}", "eval", str(sft), "--dream", model, *many)
        result[state] = {
            "ranking": gate["ranking"],
            "chosen": score(chosen),
            "milliseconds": milliseconds(model),
        }
    minutes = json.loads((folder / "minutes.json").read_text())
    return result | {"minutes": minutes}


def frames(data: Path) -> int:
    """How many real steps a data set holds."""
    return int(json.loads((data / "meta" / "info.json").read_text())["total_frames"])


def score(result: dict[str, Any]) -> dict[str, Any]:
    """Of an evaluation what is published."""
    return {key: result[key] for key in ("successes", "episodes", "interval")}


def milliseconds(path: str, proposals: int = 8, times: int = 50) -> float:
    """The median time of ranking 8 proposals for one observation, on as many threads as torch takes."""
    model = WorldModel.load(path)
    spec = model.spec
    image = {
        name: torch.zeros(1, *size, 3, dtype=torch.uint8) for name, size in spec.cameras.items()
    }
    state = None if model.finder else torch.zeros(1, model.state_dim)
    obs = Obs(image, torch.zeros(1, spec.proprio_dim), [model.sentences[0]], state)
    chunks = torch.zeros(1, proposals, model.horizon, spec.action_dim)
    took = []
    for _ in range(times):
        began = time.perf_counter()
        promises(model, obs, chunks)
        took.append(1e3 * (time.perf_counter() - began))
    return statistics.median(took)


def main() -> None:
    """Runs seeds, and writes the JSON after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/dream_chooser"))
    text = "so small that it means nothing; nothing is published"
    parser.add_argument("--tiny", action="store_true", help=text)
    a = parser.parse_args()
    path = HERE / "dream_chooser.json"
    known = (
        {row["seed"]: row for row in json.loads(path.read_text())["seeds"]} if path.exists() else {}
    )
    for seed in a.seeds:
        done = run(a.out / str(seed), seed, TINY if a.tiny else FULL, a.tiny)
        known[seed] = done
        rates = {"alone": done["alone"]} | {state: done[state]["chosen"] for state in STATES}
        for name, row in rates.items():
            print(f"seed {seed}, {name}: {format_rate(row['successes'], row['episodes'])}")
        if not a.tiny:
            write("dream_chooser", {"seeds": [known[k] for k in sorted(known)]})


if __name__ == "__main__":
    main()
