"""What a person's time is worth: help in rounds (`embodyrl improve`), and whole demonstrations.

    python benchmarks/robot_improve.py --seeds 0 1 2 --out benchmarks/robot_improve.json

A weak policy that sees states (``--demos`` of the expert's demonstrations), on the simulated arm
behind its safety filter, and a scripted person with the same seconds in each round of

    correct        HG-DAgger: they take over when an episode takes long, and finish it
    rac            RaC: they have the arm go back for a second of motion first
    demonstrate    they move the arm from the start: the same data set, the same learner, no policy

Each row is the policy that is served after a round: success of it alone on held-out initial states
that no look has used, and what it has cost so far in person-seconds, minutes of the arm's own time,
interventions, rewinds, and minutes of the wall. ``--skill`` and ``--reaction`` are the person's.
Runs go to ``runs/bench/robot_improve`` and can be interrupted and resumed. Draws
``docs/images/robot_improve.png``.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from figures import draw_json
from imagination import embodyrl

from embodyrl.functional.intervals import wilson
from embodyrl.storage.provenance import git_commit, hardware, versions

OUT = Path("runs/bench/robot_improve")
VARIANTS = {
    "correct": ["helper.rewind=0"],
    "rac": ["helper.rewind=1"],
    "demonstrate": ["helper.patience=0", "helper.rewind=0"],
}
"""What the person does in each."""
STATES = ["env.cameras=[]", "env.renderer=none"]
PRESET = """env: {{name: mujoco, task: {task}, cameras: [], renderer: none, num_envs: 16}}
policy: {{name: flow_mlp, horizon: 5}}
algorithm: {{name: sft, batch_size: 128, steps_per_iteration: 200}}
run: {{iterations: 5, eval_every: 0, eval_episodes: 16, videos: 0, threads: 1}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default="pick")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--demos", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--person-seconds", type=float, default=40.0, help="in each round")
    parser.add_argument("--look", type=int, default=16)
    parser.add_argument("--eval-episodes", type=int, default=64)
    parser.add_argument("--skill", type=float, default=0.9)
    parser.add_argument("--reaction", type=float, default=1.0)
    parser.add_argument("--patience", type=float, default=0.6)
    parser.add_argument(
        "--gives-up", type=float, default=5.0, help="s of moving the arm; a whole episode takes 2"
    )
    parser.add_argument(
        "--start-noise", type=float, default=0.3, help="of what acts, see policy.start_noise"
    )
    parser.add_argument("--iterations", type=int, default=120, help="of learning, in each round")
    parser.add_argument("--ema", type=float, default=0.999, help="decay of averaged weights")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    load = os.getloadavg()[0]
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in a.variants}
    for seed in a.seeds:
        for variant in a.variants:
            runs[variant] += improve(a, variant, seed)
    settings = {k: v for k, v in vars(a).items() if k != "out"}
    result = {"settings": settings, "runs": runs, "load": [load, os.getloadavg()[0]]}
    result |= {"commit": git_commit(), "hardware": hardware(), "versions": versions()}
    if a.out:
        a.out.write_text(json.dumps(result, indent=1) + "\n")
        draw_json(a.out, "improve")


def start(a: argparse.Namespace, folder: Path, seed: int) -> tuple[Path, Path]:
    """The demonstrations and the weak policy of a seed, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    preset = folder / "states.yaml"
    preset.write_text(PRESET.format(task=a.task))
    demos, run = folder / "demos", folder / "start"
    if not demos.exists():
        how = ("--episodes", str(a.demos), "--seed", str(seed), "--out", str(demos))
        embodyrl(folder, "demos", "collect", "mujoco", f"env.task={a.task}", *STATES, *how)
    given = (f"run.out={folder}", "run.name=start", f"run.seed={seed}", f"data.path={demos}")
    embodyrl(folder, "start", "train", str(preset), *given)
    return demos, run


def improve(a: argparse.Namespace, variant: str, seed: int) -> list[dict[str, Any]]:
    """The rounds of a variant as rows, each with the success of what is served after it."""
    folder = OUT / a.task / str(seed)
    demos, policy = start(a, folder, seed)
    out = folder / variant
    helper = [f"helper.skill={a.skill}", f"helper.patience={a.patience}"]
    helper += [f"helper.gives_up={a.gives_up}"]
    # Nobody reacts to anything who demonstrates.
    helper += [f"helper.reaction={0.0 if variant == 'demonstrate' else a.reaction}"]
    options = {
        "--demos": demos,
        "--helper": "scripted",
        "--latency": 0.05,
        "--rounds": a.rounds,
        "--person-seconds": a.person_seconds,
        "--look": a.look,
        "--seed": seed,
        "--out": out,
    }
    words = [str(word) for option in options.items() for word in option]
    learner = [f"run.iterations={a.iterations}", f"algorithm.ema={a.ema}", "run.threads=1"]
    settings = [*helper, *VARIANTS[variant], *learner, f"policy.start_noise={a.start_noise}"]
    embodyrl(folder, variant, "improve", str(policy), *words, *settings)
    rounds = json.loads((out / "improve.json").read_text())["rounds"]
    # What is served after each round, and what it has cost.
    cost = {"person_seconds": 0.0, "arm_minutes": 0.0, "minutes": 0.0}
    cost |= {"interventions": 0, "rewinds": 0}
    served = str(policy)
    rows = [score(a, folder, served) | {"seed": seed, "iteration": 0, **cost}]
    for number, found in enumerate(rounds.values(), 1):
        helped, look = found["helped"], found["look"]
        cost["person_seconds"] += helped["person_seconds"]
        cost["arm_minutes"] += (helped["robot_seconds"] + look["robot_seconds"]) / 60
        cost["minutes"] += sum(found["seconds"].values()) / 60
        cost["interventions"] += helped["interventions"]
        cost["rewinds"] += helped["rewinds"]
        served = found["learned"] if look["keeps"] else served
        row = score(a, folder, served) | {"seed": seed, "iteration": number, **cost}
        rows.append({key: round(x, 3) if isinstance(x, float) else x for key, x in row.items()})
        print(variant, seed, json.dumps(rows[-1]), flush=True)
    return rows


def score(a: argparse.Namespace, folder: Path, policy: str) -> dict[str, Any]:
    """Success of a policy alone on held-out states, unless it has been scored."""
    name = "_".join(Path(policy).parts[-3:])
    logs = folder / "scores" / name
    if not (logs / "done").exists():
        options = ["--episodes", str(a.eval_episodes), "--latency", "0.05", "--out", str(logs)]
        acts = f"policy.start_noise={a.start_noise}"
        embodyrl(folder, f"score {name}", "deploy", policy, *options, acts)
        (logs / "done").touch()
    found = json.loads((logs / "result.json").read_text())
    solved, played = found["successes"], found["episodes"]
    return {"success": solved / played, "episodes": played, "interval": wilson(solved, played)}


if __name__ == "__main__":
    main()
