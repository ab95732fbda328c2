"""Every algorithm from one imitation checkpoint: success against env steps and against minutes, three seeds each.

    python benchmarks/algorithms.py                                  # both tasks, all algorithms, three seeds
    python benchmarks/algorithms.py --tasks maniskill_pickcube --algorithms ppo grpo --seeds 0

Each run has one thread and ends after ``--env-steps`` or ``--minutes`` of training, whichever is
first. Runs go to ``runs/bench/algorithms`` and can be interrupted and resumed; what is finished
goes into ``benchmarks/algorithms.json`` and ``docs/images/algorithms.png``. Success is of the noise-free policy on
initial states never trained on. The interval is of the interquartile mean over seeds of the RL; all
of them start from one checkpoint.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from figures import draw_json
from shared import HERE, complete, gathered, write

from embodyrl.config import compose, resolve
from embodyrl.functional.intervals import bootstrap_iqm
from embodyrl.training.run_folder import finished

OUT = Path("runs/bench/algorithms")
EVALUATIONS = 5


@dataclass(frozen=True)
class Task:
    """An env, how it is demonstrated, and the preset NAME_sft that imitates the demonstrations."""

    title: str
    collect: tuple[str, ...]
    policy: dict[str, Any]
    shared: dict[str, Any] = field(default_factory=dict)


TASKS = {
    "mujoco_pick": Task(
        "Quickstart: pick up the named block, pixels",
        (
            "mujoco",
            "env.task=pick",
            "env.max_blocks=2",
            "env.num_envs=64",
            "--episodes",
            "100",
            "--noise",
            "0.15",
        ),
        {},
    ),
    "maniskill_pickcube": Task(
        "ManiSkill PickCube-v1, state",
        (
            "maniskill",
            "env.task=PickCube-v1",
            "env.obs=state",
            "env.num_envs=16",
            "--episodes",
            "32",
            "--noise",
            "0.2",
        ),
        {"horizon": 4, "action_patch": 4},
    ),
}
ON_POLICY = {"lr": 2e-4, "epochs": 3}
PPO = {"name": "ppo", "critic_epochs": 20, **ON_POLICY}
OFF_POLICY = {
    "num_chunks": 4,
    "capacity": 20_000,
    "warmup_chunks": 2048,
    "utd": 0.1,
    "batch_size": 128,
    "entropy_backup": False,
    "save_replay": False,
}
FOUND = {"critic": "found"}
HIDDEN = {"critic": "privileged"}
"""The simulator's state, which no preset reads: an upper bound."""
LEARNED_NOISE = {"transition": "flow_noise", "noise_min": 0.1, "noise_max": 0.5}
# Without demonstrations in its loss the actor runs off after critics that have learned for 300
# steps alone.
SAC = {**OFF_POLICY, "critic_warmup": 1000, "alpha": 1e-3, "lr": 5e-5, "entropy": "path"}
HELD = {"critic_warmup": 300, "lr": 1e-4, "bc_coef": 1.0}


@dataclass(frozen=True)
class Algorithm:
    """Settings of one line of the figure; ``steps`` is roughly what an iteration takes of the env."""

    title: str
    algorithm: dict[str, Any]
    steps: int
    policy: dict[str, Any] = field(default_factory=dict)
    demos: bool = False
    seen: bool = False  # the critic reads no hidden state; the policy's settings say what it sees

    def group(self, task: str) -> str:
        """Under which the runs of a task stand in the JSON, and in which part of the figure."""
        return f"{task}_seen" if self.seen else task


ALGORITHMS = {
    "ppo": Algorithm("PPO, Flow-SDE", PPO, 4900),
    "ppo_one": Algorithm("PPO, Flow-SDE, one step", PPO, 4900, {"trained_steps": "one"}),
    "ppo_noise": Algorithm(
        "PPO, Flow-Noise", {**PPO, "entropy_coef": 0.005}, 4900, {"transition": "flow_noise"}
    ),
    "ppo_cps": Algorithm("PPO, Flow-CPS", PPO, 4900, {"transition": "flow_cps"}),
    "fpo": Algorithm("FPO", {**PPO, "name": "fpo"}, 4900),
    "grpo": Algorithm("GRPO", {"name": "grpo", **ON_POLICY}, 4000),
    "nft": Algorithm("NFT", {"name": "nft", "lr": 2e-4}, 2000),
    "sac_flow": Algorithm(
        "SAC-Flow, with demonstrations",
        {"name": "sac_flow", **SAC, **HELD, "random_warmup": False, "critic_norm": "layer"},
        1280,
        LEARNED_NOISE,
        demos=True,
    ),
    "rlpd": Algorithm("RLPD", {"name": "rlpd", **SAC, **HELD}, 1280, LEARNED_NOISE, demos=True),
    "rlpd_free": Algorithm(
        "RLPD without imitation",
        {"name": "rlpd", **SAC, "bc_coef": 0.0},
        1280,
        LEARNED_NOISE,
        demos=True,
    ),
    "wsrl": Algorithm("WSRL", {"name": "wsrl", **SAC}, 1280, LEARNED_NOISE),
    "dsrl": Algorithm(
        "DSRL", {"name": "dsrl", **OFF_POLICY, "alpha": 0.01}, 1280, {"steer_width": 128}
    ),
    # No hidden state: critics see what hindsight finds in pictures, or what the policy sees.
    "pa_rl": Algorithm(
        "PA-RL",
        {"name": "pa_rl", "ema": 0.0, "critic_utd": 0.6, "bc_coef": 0.1, "save_replay": False},
        1280,
        {"critic": "shared", "chooser_width": 256, "proposals": 16},
        demos=True,
        seen=True,
    ),
    "sac_flow_found": Algorithm(
        "SAC-Flow, with demonstrations",
        {"name": "sac_flow", **SAC, **HELD, "random_warmup": False, "critic_norm": "layer"},
        1280,
        {**LEARNED_NOISE, **FOUND},
        demos=True,
        seen=True,
    ),
    "wsrl_found": Algorithm(
        "WSRL", {"name": "wsrl", **SAC}, 1280, {**LEARNED_NOISE, **FOUND}, demos=True, seen=True
    ),
    "rlpd_found": Algorithm(
        "RLPD",
        {"name": "rlpd", **SAC, **HELD, "shared_critic": False},
        1280,
        {**LEARNED_NOISE, **FOUND},
        demos=True,
        seen=True,
    ),
    "dsrl_found": Algorithm(
        "DSRL",
        {"name": "dsrl", **OFF_POLICY, "alpha": 0.01},
        1280,
        {"steer_width": 128, **FOUND},
        demos=True,
        seen=True,
    ),
    "ppo_found": Algorithm("PPO, Flow-SDE", PPO, 4900, FOUND, demos=True, seen=True),
    "ppo_shared": Algorithm(
        "PPO, Flow-SDE, critic on the policy's features", PPO, 4900, {"critic": "shared"}, seen=True
    ),
    "fpo_found": Algorithm("FPO", {**PPO, "name": "fpo"}, 4900, FOUND, demos=True, seen=True),
}


def folder(task: str) -> Path:
    """Everything of a task."""
    return OUT / task


def imitate(task: str) -> None:
    """The demonstrations and the checkpoint that every algorithm starts from."""
    demos, out = folder(task) / "demos", folder(task)
    if not demos.exists():
        command = [
            sys.executable,
            "-m",
            "embodyrl.cli",
            "collect",
            *TASKS[task].collect,
            "--seed",
            "0",
        ]
        subprocess.run([*command, "--out", str(demos)], check=True)
    if not finished(out / "sft"):  # nor if a later version would have asked for more
        complete(
            compose(
                f"{task}_sft",
                [f"run.out={out}", "run.name=sft", f"data.path={demos}", "run.threads=1"],
            )
        )


def run(task: str, name: str, seed: int, env_steps: int, minutes: float) -> None:
    """One algorithm with one seed, or what is left of it."""
    a, sft = ALGORITHMS[name], compose(f"{task}_sft")
    every = max(1, round(env_steps / a.steps / EVALUATIONS))
    env = {key: getattr(sft.env, key) for key in ("name", "task", "num_envs")} | {"seed": seed}
    env |= {"max_blocks": 2} if task == "mujoco_pick" else {"obs": "state"}
    complete(
        resolve(
            {
                "env": env,
                "policy": {
                    "name": "flow_vla",
                    **({} if a.seen else HIDDEN),
                    **TASKS[task].policy,
                    **a.policy,
                },
                "algorithm": a.algorithm,
                "run": {
                    "name": f"{name}_{seed}",
                    "out": str(folder(task)),
                    "seed": seed,
                    "init_checkpoint": str(folder(task) / "sft"),
                    "iterations": every * EVALUATIONS,
                    "minutes": minutes,
                    "eval_every": every,
                    "eval_episodes": 256,
                    "checkpoint_every": every,
                    "keep_checkpoints": 1,
                    "videos": 0,
                    "device": "cpu",
                    "threads": 1,
                },
                **({"data": {"path": str(folder(task) / "demos")}} if a.demos else {}),
            }
        )
    )


def summarise(settings: dict) -> dict:
    """JSON and figure of all runs that are finished."""
    folders = {}
    for path in sorted(OUT.glob("*/*_[0-9]*")):
        name, seed = path.name.rsplit("_", 1)
        folders[f"{ALGORITHMS[name].group(path.parent.name)}/{name}/{seed}"] = path
    runs = gathered("algorithms", settings, folders)
    tasks: dict[str, dict] = {}
    for task in TASKS:
        for name, algorithm in ALGORITHMS.items():
            group = algorithm.group(task)
            curves = [
                run["evaluations"]
                for key, run in runs.items()
                if key.startswith(f"{group}/{name}/")
            ]
            if not curves:
                continue
            tasks.setdefault(group, {})[name] = {
                "title": algorithm.title,
                "seeds": len(curves),
                "before": bootstrap_iqm([c[0]["success"] for c in curves]),
                "after": bootstrap_iqm([c[-1]["success"] for c in curves]),
                "env_steps": [c[-1]["env_steps"] for c in curves],
                "minutes": [c[-1]["minutes"] for c in curves],
            }
    write("algorithms", {"settings": settings, "tasks": tasks, "runs": runs})
    if tasks:
        draw_json(HERE / "algorithms.json", "algorithms")
    return tasks


def main() -> None:
    """Runs what is not finished, then writes JSON and figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument(
        "--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS)
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--env-steps", type=int, default=200_000)
    parser.add_argument("--minutes", type=float, default=4.0, help="of training, at most")
    a = parser.parse_args()
    settings = {"env_steps": a.env_steps, "minutes": a.minutes}
    for task in a.tasks:
        imitate(task)
    for seed in a.seeds:  # a first seed of everything, then more
        for task in a.tasks:
            for name in a.algorithms:
                if not finished(folder(task) / f"{name}_{seed}"):
                    run(task, name, seed, a.env_steps, a.minutes)
                    summarise(settings)
    for task, algorithms in summarise(settings).items():
        for name, entry in algorithms.items():
            print(task, name, entry["before"], entry["after"], entry["env_steps"], entry["minutes"])


if __name__ == "__main__":
    main()
