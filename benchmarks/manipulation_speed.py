"""Env steps per second of OGBench and MetaWorld behind the env API, and of the packages' own loops.

    python benchmarks/manipulation_speed.py --out benchmarks/manipulation_speed.json

Both step with the same random actions in one process, in turn, several times; the medians are
written. Seconds are those of the CPU, which other processes do not stretch.
``embodyrl bench ogbench env.num_workers=2`` measures several processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodyrl.build import make_env
from embodyrl.env import EnvConfig
from embodyrl.sims.metaworld.config import MetaWorldConfig
from embodyrl.sims.metaworld.simulation import make_simulation, start
from embodyrl.sims.ogbench.config import OGBenchConfig
from embodyrl.sims.ogbench.scenes import SCENES
from embodyrl.sims.ogbench.simulation import scene_class
from embodyrl.storage.provenance import git_commit, hardware, versions

CHUNK = 5
NUM_ENVS = 8


def ours(config: EnvConfig, actions: np.ndarray) -> Callable[[], float]:
    """Plays the actions (steps, A) in all envs, from one state; returns steps per second."""
    env = make_env(config)
    n = config.num_envs
    chunks = torch.from_numpy(actions).float().reshape(1, -1, CHUNK, env.spec.action_dim)
    chunks = chunks.expand(n, -1, -1, -1)

    def play() -> float:
        env.reset(init=[0] * n)
        began = time.process_time()
        steps = sum(int(env.step(chunks[:, k]).valid.sum()) for k in range(chunks.shape[1]))
        return steps / (time.process_time() - began)

    return play


def own_ogbench(task: str, actions: np.ndarray) -> Callable[[], float]:
    """The same by OGBench's own env, as its evaluation steps it."""
    scene = SCENES[task]
    env: Any = scene_class(scene.kind)(env_type=scene.env_type, terminate_at_goal=False)

    def play() -> float:
        env.reset(options={"task_id": 1}, seed=0)
        began = time.process_time()
        for action in actions:
            env.step(action)
        return len(actions) / (time.process_time() - began)

    return play


def own_metaworld(task: str, actions: np.ndarray) -> Callable[[], float]:
    """The same by MetaWorld's own env."""
    env = make_simulation(task, len(actions))

    def play() -> float:
        start(env, 0)
        began = time.process_time()
        for action in actions:
            env.step(action)
        return len(actions) / (time.process_time() - began)

    return play


def main() -> None:
    """Measures and writes JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    result: dict[str, Any] = {"num_envs": NUM_ENVS, "chunk": CHUNK}
    rows = {
        **{f"ogbench/{task}": 5 for task in ("cube-single", "cube-double", "scene", "puzzle-4x4")},
        **{f"metaworld/{task}": 4 for task in ("reach-v3", "pick-place-v3", "door-open-v3")},
    }
    for name, dims in rows.items():
        family, task = name.split("/")
        actions = rng.uniform(-1, 1, (arguments.steps, dims))
        if family == "ogbench":
            config: EnvConfig = OGBenchConfig(
                task=task, num_envs=NUM_ENVS, terminate_on_success=False
            )
            theirs = own_ogbench(task, actions)
        else:
            config = MetaWorldConfig(task=task, num_envs=NUM_ENVS, terminate_on_success=False)
            theirs = own_metaworld(task, actions)
        mine = ours(config, actions)
        mine(), theirs()  # a first time, which warms up
        pairs = [(mine(), theirs()) for _ in range(arguments.repeats)]
        a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
        result[name] = {"ours": round(a), "package": round(b), "ratio": round(a / b, 2)}
        print(name, result[name], flush=True)
    result |= {"commit": git_commit(), "versions": versions(), "hardware": hardware()}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
