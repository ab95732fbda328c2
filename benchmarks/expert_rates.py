"""How often the experts of OGBench, MetaWorld and LIBERO solve each task.

The initial states are those that training never sees; LIBERO's are the official ones.

    python benchmarks/expert_rates.py                    # all, into benchmarks/expert_rates.json
    python benchmarks/expert_rates.py cube-single mt10   # some; the others stay in the file
    python benchmarks/expert_rates.py libero_goal:3,5 --episodes 10     # two tasks of a suite

LIBERO's tasks are written one by one: name those that a measurement that stopped has left.

An expert below a few dozen percent is a poor start for imitation.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from embodyrl.build import make_env
from embodyrl.env import EnvConfig
from embodyrl.functional.intervals import wilson
from embodyrl.sims.libero.config import LiberoConfig
from embodyrl.sims.libero.suites import load_suite
from embodyrl.sims.metaworld.config import MetaWorldConfig
from embodyrl.sims.metaworld.tasks import SUITES
from embodyrl.sims.ogbench.config import OGBenchConfig
from embodyrl.sims.ogbench.scenes import SCENES
from embodyrl.storage.provenance import git_commit, hardware, versions

OUT = Path(__file__).with_suffix(".json")
CHUNK = 10
LIBERO = ("libero_spatial", "libero_object", "libero_goal", "libero_10")


def rates(config: EnvConfig, episodes: int) -> dict[str, dict[str, float]]:
    """Task -> episodes, how many were solved, and the mean number of actions of those."""
    env = make_env(config)
    n = env.spec.num_envs
    tasks = env.spec.tasks
    assert n % len(tasks) == 0  # every env keeps its task, so that its simulation is built once
    expert = env.make_expert()
    found = {task: {"episodes": 0, "solved": 0, "steps": 0.0} for task in tasks}
    for number in range(episodes * len(tasks) // n):
        env.reset(init=[number * n + k for k in range(n)])
        expert.reset()
        steps = torch.zeros(n, dtype=torch.long)
        running = torch.ones(n, dtype=torch.bool)
        while running.any():
            step, _ = env.rollout(expert.act, CHUNK)
            steps += step.valid.sum(1)
            for k in (step.done & running).nonzero().flatten().tolist():
                row = found[tasks[k % len(tasks)]]
                row["episodes"] += 1
                row["solved"] += int(step.success[k])
                row["steps"] += float(steps[k]) if step.success[k] else 0.0
            running &= ~step.done
    env.close()
    for row in found.values():
        row["steps"] = round(row["steps"] / max(1, row["solved"]), 1)
    return found


def libero_rates(suite: str, task: int, episodes: int) -> dict[str, Any]:
    """Number of a task in its suite -> its name, ``rates`` and Wilson's 95% interval."""
    config = LiberoConfig(
        suite=suite, task_ids=(task,), split="eval", num_envs=episodes, cameras=()
    )
    [(name, row)] = rates(config, episodes).items()
    interval = wilson(int(row["solved"]), int(row["episodes"]))
    return {str(task): {"task": name, **row, "wilson": [round(x, 3) for x in interval]}}


def save(result: dict[str, Any]) -> None:
    """Writes what has been measured so far."""
    about = {"commit": git_commit(), "versions": versions(), "hardware": hardware()}
    OUT.write_text(json.dumps(result | about, indent=1))


def main() -> None:
    """Measures and writes JSON after each scene and each task."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=[*SCENES, "mt50", *LIBERO])
    parser.add_argument("--episodes", type=int, default=20, help="of each task")
    arguments = parser.parse_args()
    result: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {}
    for name in arguments.names:
        suite, _, numbers = name.partition(":")
        if suite.startswith("libero_"):
            every = range(len(load_suite(suite)))
            for task in map(int, numbers.split(",")) if numbers else every:
                measured = libero_rates(suite, task, arguments.episodes)
                result.setdefault(suite, {}).update(measured)
                save(result)
                print(measured, flush=True)
        elif name in SCENES:
            for expert in ("markov", "plan"):
                config = OGBenchConfig(task=name, expert=expert, split="eval", num_envs=5)
                key = f"ogbench {expert}"
                result.setdefault(key, {}).update(rates(config, arguments.episodes))
        else:
            for task in SUITES[name]:
                config = MetaWorldConfig(task=task, split="eval", num_envs=1)
                result.setdefault("metaworld", {}).update(rates(config, arguments.episodes))
        save(result)
        print(f"{name} done", flush=True)


if __name__ == "__main__":
    main()
