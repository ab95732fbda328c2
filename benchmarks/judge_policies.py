"""Judging policies without acting: how well do recorded episodes, and a dream, order ten policies?

    python benchmarks/judge_policies.py --tasks pick push pickcube --seeds 0 1 2
    python benchmarks/judge_policies.py --tasks pick --seeds 0 --policies 6 --dream

Each task and seed: demonstrations, and ten policies that see states, of few and many demonstrations,
early and late in imitation, and along PPO. Two of them are logged, failures included; then
``embodyrl judge`` says from these episodes alone, and with ``--dream`` from a world model that
learned from the same episodes, which is better. The truth is success on held-out initial states.

Runs go to ``runs/bench/judge_policies/TASK/SEED``, and an interrupted benchmark goes on. The result
is ``benchmarks/judge_policies.json``: estimates and truth of every policy, and for each way to
estimate Spearman's and Kendall's correlation, MMRV and the regret of its choice.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from imagination import embodyrl
from shared import HERE, scored, write

from embodyrl.functional.intervals import bootstrap_iqm
from embodyrl.functional.ranking import ranking_errors
from embodyrl.training.run_folder import finished

OUT = Path("runs/bench/judge_policies")
MUJOCO = "{{name: mujoco, task: {task}, cameras: [{cameras}], renderer: {renderer}, num_envs: 16}}"
TASKS = {
    "pick": MUJOCO.format(task="pick", cameras="", renderer="none"),
    "push": MUJOCO.format(task="push", cameras="", renderer="none"),
    "pickcube": "{name: maniskill, task: PickCube-v1, obs: state, num_envs: 16}",
}
"""The env of each."""
PRESET = """env: {env}
policy: {{name: flow_mlp, horizon: {horizon}, start_noise: 0.3}}
algorithm: {algorithm}
run: {{eval_every: 0, eval_before: false, eval_episodes: 64, videos: 0, threads: 1}}
"""
HORIZON = {"pick": 5, "push": 5, "pickcube": 4}
SFT = "{name: sft, batch_size: 128, steps_per_iteration: 200, ema: 0.99}"
PPO = "{name: ppo, num_chunks: 20, epochs: 3, critic_epochs: 20, lr: 2.0e-4}"
RL_STEPS = (10, 20, 40)
"""Iterations of PPO after which its policy is judged."""


@dataclass(frozen=True)
class Imitated:
    """A policy of so many demonstrations, after so many iterations of 200 gradient steps."""

    demos: int
    iterations: int

    @property
    def name(self) -> str:
        """Of its run."""
        return f"sft_{self.demos}_{self.iterations}"


# In the order in which they are taken where --policies asks for fewer.
START = Imitated(20, 20)
IMITATED = [
    Imitated(5, 20), START, Imitated(100, 20), Imitated(10, 20),
    Imitated(100, 2), Imitated(40, 20), Imitated(100, 5),
]  # fmt: skip
LOGGED = (START, Imitated(100, 20))
"""What the robot has done so far."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--policies", type=int, default=len(IMITATED) + len(RL_STEPS))
    parser.add_argument("--logged", type=int, default=100, help="episodes of each logged policy")
    parser.add_argument("--eval-episodes", type=int, default=256)
    parser.add_argument("--dream", action="store_true", help="train a world model, and judge in it")
    parser.add_argument("--out", type=Path, default=OUT, help="of all runs")
    a = parser.parse_args()
    settings = {k: v for k, v in vars(a).items() if k not in ("tasks", "seeds", "out")}
    # Seeds of other days stay in the file, if their settings were the same.
    path = HERE / "judge_policies.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    found = earlier.get("tasks", {}) if earlier.get("settings") == settings else {}
    for seed in a.seeds:
        for task in a.tasks:
            found.setdefault(task, {})[str(seed)] = judge(a, task, seed)
            print(task, seed, json.dumps(found[task][str(seed)]["ranking"]), flush=True)
            write("judge_policies", {"settings": settings, "tasks": found, "iqm": summary(found)})


def judge(a: argparse.Namespace, task: str, seed: int) -> dict[str, Any]:
    """Estimates, truth and ranking errors of a task and a seed."""
    folder = a.out / task / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    policies = make_policies(a, folder, task, seed)
    data = [logged(a, folder, task, seed, of, k) for k, of in enumerate(LOGGED)]
    # The truth.
    truth = {}
    for name, path in policies.items():
        file = folder / f"{name}.json"
        truth[name] = scored(path, file, "--episodes", str(a.eval_episodes))
    # What is said without acting.
    words = ["judge", *map(str, policies.values()), "--data", *map(str, data)]
    if a.dream:
        words += ["--dream", str(dream(folder, data))]
    file = folder / "judge.json"
    if not file.exists():
        file.write_text(embodyrl(folder, "judge", *words, "--json", capture=True))
    said = json.loads(file.read_text())
    rows = {row["policy"]: row for row in said["policies"]}
    real = [truth[name][0] / truth[name][1] for name in policies]
    estimates = {
        way: [rows[str(path)][way]["value"] for path in policies.values()] for way in said["ways"]
    }
    return {
        "policies": {
            name: {
                "true": truth[name],
                **{way: rows[str(path)][way] for way in said["ways"]},
            }
            for name, path in policies.items()
        },
        "logged": {key: said[key] for key in ("solved", "failed")},
        "ranking": {
            way: ranking_errors(torch.tensor(values), torch.tensor(real))
            for way, values in estimates.items()
        },
        "minutes": json.loads((folder / "minutes.json").read_text()),
    }


def make_policies(a: argparse.Namespace, folder: Path, task: str, seed: int) -> dict[str, Path]:
    """Name -> run or checkpoint of the policies, unless they are there."""
    made: dict[str, Path] = {}
    steps = RL_STEPS[: max(0, a.policies - len(IMITATED))]
    for of in IMITATED[: a.policies]:
        data = demonstrations(folder, task, seed, of.demos)
        given = [f"run.name={of.name}", f"run.iterations={of.iterations}", f"data.path={data}"]
        train(folder, task, seed, SFT, of.name, *given)
        made[of.name] = folder / of.name
    if steps:
        given = ["run.name=ppo", f"run.init_checkpoint={folder / START.name}"]
        given += [f"run.iterations={max(RL_STEPS)}", f"run.checkpoint_every={min(RL_STEPS)}"]
        train(folder, task, seed, PPO, "ppo", *given, "run.keep_checkpoints=1000")
    for k in steps:
        made[f"ppo_{k}"] = folder / "ppo" / "checkpoints" / f"step_{k:06d}"
    return made


def train(folder: Path, task: str, seed: int, algorithm: str, name: str, *given: str) -> None:
    """A run, or what is left of it."""
    if finished(folder / name):
        return
    preset = folder / f"{name}.yaml"
    text = PRESET.format(env=TASKS[task], horizon=HORIZON[task], algorithm=algorithm)
    preset.write_text(text)
    words = (f"run.out={folder}", f"run.seed={seed}", *given)
    embodyrl(folder, name, "train", str(preset), *words)


def demonstrations(folder: Path, task: str, seed: int, count: int) -> Path:
    """So many of the expert's episodes, unless they are there."""
    out = folder / f"demos_{count}"
    if not out.exists():
        how = ("--episodes", str(count), "--noise", "0.15", "--seed", str(seed))
        embodyrl(folder, "demos", "collect", *env_words(task), *how, "--out", str(out))
    return out


def logged(
    a: argparse.Namespace, folder: Path, task: str, seed: int, of: Imitated, number: int
) -> Path:
    """What a policy did, failures included, unless it is there."""
    out = folder / f"logged_{of.name}"
    if not out.exists():
        how = ("--episodes", str(a.logged), "--keep-failures", "--seed", str(100 * seed + number))
        acts = ("--policy", str(folder / of.name), *how, "--out", str(out))
        embodyrl(folder, "logged", "collect", *env_words(task), *acts)
    return out


def dream(folder: Path, data: list[Path]) -> Path:
    """A world model of the logged episodes, or what is left of its training."""
    out = folder / "world"
    paths = ",".join(map(str, data))
    embodyrl(folder, "world", "world", "train", f"data=[{paths}]", f"out={out}")
    return out / "model"


def env_words(task: str) -> list[str]:
    """The env as ``embodyrl collect`` is told of it."""
    import yaml

    settings = yaml.safe_load(TASKS[task])
    words = [f"env.{k}={json.dumps(v).strip(chr(34))}" for k, v in settings.items() if k != "name"]
    return [settings["name"], *words]


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Of each way and measure, over tasks and seeds: the interquartile mean with its interval."""
    rankings = [seed["ranking"] for task in found.values() for seed in task.values()]
    ways = {way for ranking in rankings for way in ranking}
    return {
        way: {
            name: bootstrap_iqm([ranking[way][name] for ranking in rankings if way in ranking])
            for name in rankings[0][way]
        }
        for way in sorted(ways)
    }


if __name__ == "__main__":
    main()
