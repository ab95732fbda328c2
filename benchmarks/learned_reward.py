"""RL by a learned reward alone: a reflector judges the pictures, and the simulator's reward is unseen.

    python benchmarks/learned_reward.py --seeds 0 1 2

From the quickstart's imitation policy of each seed (``post_train.py``): it plays 600 episodes, which are labelled once,
as a person would label them. A reflector learns from those, with progress. Then PA-RL trains three times with the same
seeds and steps: by the simulator's success, by the reflector's, and by the reflector's with shaping. Success is the
simulator's, of the noise-free policy on initial states never trained on; "claimed" is what the reward said in training.
Runs go to ``runs/bench``, and the result is ``benchmarks/learned_reward.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from post_train import embodyrl, imitate
from shared import evaluations, write

from embodyrl.functional.intervals import bootstrap_iqm, wilson
from embodyrl.training.run_folder import finished

JOB = "mujoco_pick_pa_rl"
EPISODES = 600
WAYS: dict[str, tuple[str, ...]] = {
    "simulator": (),
    "reflector": ("env.reflector={reflector}",),
    "reflector, progress": ("env.reflector={reflector}", "env.progress_coef=0.3"),
}


def reflector_of(folder: Path, seed: int) -> dict[str, Any]:
    """Trains the judge of a seed, or finds it; returns its scores on held-out episodes."""
    score = folder / "reflector_score.json"
    if not (folder / "judged").exists():
        own = ("--policy", str(folder / "sft"), "--episodes", str(EPISODES), "--keep-failures")
        out = ("--seed", str(seed + 200), "--out", str(folder / "judged"))
        embodyrl(folder, "collect", "mujoco_pick_sft", "env.terminate_on_success=false", *own, *out)
    if not score.exists():
        command = [sys.executable, "-m", "embodyrl.cli", "world", "reflect", "train"]
        where = [str(folder / "judged"), "--out", str(folder / "reflector"), "--json"]
        done = subprocess.run(
            [*command, *where, "--discount", "0.95", "--seed", str(seed)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        score.write_text(done.stdout)
    return json.loads(score.read_text())


def train(folder: Path, way: str, common: list[str], extra: list[str]) -> dict[str, Any]:
    """One run, or what is left of it: its evaluations, and what its reward claimed at the end."""
    name = "reward_" + way.replace(", ", "_")
    if not finished(folder / name):
        given = [text.format(reflector=folder / "reflector") for text in WAYS[way]]
        where = [f"run.name={name}", f"run.init_checkpoint={folder / 'sft'}"]
        demos = f"data.path={folder / 'demos'}"
        embodyrl(folder, "train", JOB, *common, *where, demos, *given, *extra)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    claimed = [row["train_success"] for row in rows if row.get("train_success") is not None][-10:]
    evals = evaluations(folder / name)
    last = evals[-1]
    return {
        "after": [
            last["successes"],
            last["episodes"],
            *wilson(last["successes"], last["episodes"]),
        ],
        "claimed": sum(claimed) / len(claimed),
        "env_steps": last["env_steps"],
        "evals": evals,
    }


def main() -> None:
    """Runs what is left, and writes the JSON after each seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", help="for the RL runs, e.g. run.iterations=40")
    arguments = parser.parse_args()
    seeds = []
    for seed in arguments.seeds:
        folder = Path("runs/bench") / JOB / str(seed)
        common = imitate(JOB, seed)
        score = reflector_of(folder, seed)
        ways = {way: train(folder, way, common, arguments.overrides) for way in WAYS}
        first = ways["simulator"]["evals"][0]
        before = [first["successes"], first["episodes"]]
        seeds.append({"seed": seed, "before": before, "reflector": score, "ways": ways})
        rates = {w: [s["ways"][w]["after"] for s in seeds] for w in WAYS}
        iqm = {w: bootstrap_iqm([k / n for k, n, *_ in found]) for w, found in rates.items()}
        write("learned_reward", {"iqm": iqm, "seeds": seeds})
        print(seed, {w: [*ways[w]["after"][:2], ways[w]["claimed"]] for w in WAYS}, flush=True)


if __name__ == "__main__":
    main()
