"""Where to spend rollouts, and what holds the policy: options of PPO and GRPO, from one checkpoint a task.

    python benchmarks/rollout_options.py                                   # both tasks, all variants, three seeds
    python benchmarks/rollout_options.py --tasks maniskill_pickcube --variants ppo ppo_starts --seeds 0

The checkpoints and demonstrations are those of ``algorithms.py``. Every run has one thread and as
many iterations as take about ``--env-steps``. Runs go to ``runs/bench/rollout_options`` and can be
interrupted; what is finished goes into ``benchmarks/rollout_options.json``. The looks on the way are
on ``LOOKS`` held-out states; what a run leaves is scored on ``FRESH`` others, because
``run.keep=best`` chooses by the looks. The interval is of the interquartile mean over seeds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from algorithms import ALGORITHMS, TASKS, imitate
from algorithms import folder as start
from shared import complete, gathered, write

from embodyrl.config import Config, compose, resolve
from embodyrl.functional.intervals import bootstrap_iqm, wilson
from embodyrl.storage.atomic_files import write_json
from embodyrl.storage.plain_data import ANYTHING, read_json
from embodyrl.training.evaluate import evaluate_checkpoint
from embodyrl.training.run_folder import finished

OUT = Path("runs/bench/rollout_options")
EVALUATIONS = 5
LOOKS = 128
FRESH = 256
STEPS = {"ppo": 4_500, "grpo": 2_700}
"""Env steps that an iteration takes, roughly; successes end episodes early."""
STARTS = {"run": {"start_sampling": "difficulty"}}
BC = {"algorithm": {"bc_coef": 0.3}}
FOLLOWS = {"algorithm": {"bc_coef": 0.3, "bc_schedule": "success"}}
UNSOLVED = {"algorithm": {"bc_coef": 0.3, "bc_schedule": "unsolved"}}
REFERENCE = {"algorithm": {"reference_coef": 0.3}}
BEST = {"run": {"keep": "best"}}
GROWS = {"run": {"first_length": 0.5}}

OPTIONS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "": ("", {}),
    "_starts": (", starts by success", STARTS),
    "_grows": (", growing episodes", GROWS),
    "_bc": (", imitation", BC),
    "_bc_success": (", imitation by success", FOLLOWS),
    "_bc_unsolved": (", imitation of what is never solved", UNSOLVED),
    "_reference": (", near the reference", REFERENCE),
    "_best": (", best look kept", BEST),
    "_thoughts": (", up to three thoughts", {"policy": {"thoughts": 3}}),
}
TREE = {"branches": [2, 2, 2], "branch_chunks": [2, 4]}
GRPO_OPTIONS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "_tree": (", groups as trees", {"algorithm": TREE}),
    "_flow_balance": (", flow balance", {"algorithm": {"objective": "flow_balance"}}),
    "_replay": (
        ", starts by success, successes again",
        {**STARTS, "algorithm": {"replay_successes": 128}},
    ),
    "_as_needed": (", groups as needed", {"algorithm": {"draw_groups": "as_needed"}}),
    "_ahead": (", groups drawn ahead", {"algorithm": {"draw_groups": "ahead"}}),
    "_single": (
        ", single episodes",
        {"algorithm": {"baseline": "tracked", "group_size": 1}},
    ),
    "_median": (
        ", median of nine",
        {"algorithm": {"baseline": "median", "group_size": 9, "num_episodes": 72}},
    ),
}
VARIANTS = {f"ppo{key}": (f"PPO{title}", given) for key, (title, given) in OPTIONS.items()} | {
    f"grpo{key}": (f"GRPO{title}", given)
    for key, (title, given) in (OPTIONS | GRPO_OPTIONS).items()
}


def config(task: str, name: str, seed: int, env_steps: int) -> Config:
    """Of one run."""
    algorithm = ALGORITHMS[name.partition("_")[0]]
    given = VARIANTS[name][1]
    every = max(1, round(env_steps / STEPS[algorithm.algorithm["name"]] / EVALUATIONS))
    sft = compose(f"{task}_sft")
    env = {key: getattr(sft.env, key) for key in ("name", "task", "num_envs")} | {"seed": seed}
    env |= {"max_blocks": 2} if task == "mujoco_pick" else {"obs": "state"}
    run = {
        "name": f"{name}_{seed}",
        "out": str(OUT / task),
        "seed": seed,
        "init_checkpoint": str(start(task) / "sft"),
        "iterations": every * EVALUATIONS,
        "eval_every": every,
        "eval_episodes": LOOKS,
        "checkpoint_every": every,
        "keep_checkpoints": 1,
        "videos": 0,
        "device": "cpu",
        "threads": 1,
    }
    sections = {
        "env": env,
        "policy": {"name": "flow_vla", "critic": "shared", **TASKS[task].policy}
        | given.get("policy", {}),
        "algorithm": algorithm.algorithm | given.get("algorithm", {}),
        "run": run | given.get("run", {}),
    }
    if "bc_coef" in given.get("algorithm", {}):
        sections["data"] = {"path": str(start(task) / "demos")}
    return resolve(sections)


def fresh_score(folder: Path) -> dict[str, Any]:
    """Successes of what a run leaves, on held-out states that no look was on."""
    path = folder / "fresh.json"
    if not path.exists():
        found = evaluate_checkpoint(str(folder), episodes=LOOKS + FRESH)
        rows = found["results"][LOOKS:]
        solved = sum(row["success"] for row in rows)
        low, high = wilson(solved, len(rows))
        counts = {"successes": solved, "episodes": len(rows)}
        write_json(path, {**counts, "interval": [low, high]})
    return read_json(path, {...: ANYTHING}, "Delete it; it is measured anew.")


def summarise(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The JSON of all runs that are finished."""
    folders = {}
    for path in sorted(OUT.glob("*/*_[0-9]*")):
        name, seed = path.name.rsplit("_", 1)
        folders[f"{path.parent.name}/{name}/{seed}"] = path
    runs = gathered("rollout_options", settings, folders)
    for key, path in folders.items():
        if finished(path):
            runs[key]["fresh"] = fresh_score(path)
    tasks: dict[str, dict[str, Any]] = {}
    for task in TASKS:
        for name, (title, _) in VARIANTS.items():
            own = [run for key, run in runs.items() if key.startswith(f"{task}/{name}/")]
            if own:
                looks = [run["evaluations"] for run in own]
                fresh = [run["fresh"]["successes"] / run["fresh"]["episodes"] for run in own]
                tasks.setdefault(task, {})[name] = {
                    "title": title,
                    "seeds": len(own),
                    "before": bootstrap_iqm([c[0]["success"] for c in looks]),
                    "after": bootstrap_iqm(fresh),
                    "half_way": bootstrap_iqm([c[len(c) // 2]["success"] for c in looks]),
                    "env_steps": [c[-1]["env_steps"] for c in looks],
                    "minutes": [c[-1]["minutes"] for c in looks],
                }
    write("rollout_options", {"settings": settings, "tasks": tasks, "runs": runs})
    return tasks


def main() -> None:
    """Runs what is not finished, and writes the JSON after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--env-steps", type=int, default=75_000)
    a = parser.parse_args()
    settings = {"env_steps": a.env_steps, "looks": LOOKS, "fresh": FRESH}
    for task in a.tasks:
        imitate(task)
    for seed in a.seeds:  # a first seed of everything, then more
        for task in a.tasks:
            for name in a.variants:
                complete(config(task, name, seed, a.env_steps))
                summarise(settings)
    for task, variants in summarise(settings).items():
        for name, entry in variants.items():
            print(task, name, entry["before"], entry["after"], entry["env_steps"], entry["minutes"])


if __name__ == "__main__":
    main()
