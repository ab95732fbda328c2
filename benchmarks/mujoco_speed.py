"""Steps per second of the MuJoCo tasks: ours, the raw simulator (the floor), and AsyncVectorEnv over the same env.

    python benchmarks/mujoco_speed.py --out benchmarks/mujoco_speed.json

All run in turn in one process tree, several times; the medians are written, and ours as a multiple
of AsyncVectorEnv's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import gymnasium
import mujoco
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv
from mujoco import rollout

from embodyrl.cli.bench import bench_env
from embodyrl.sims.gymnasium.bridge import as_gymnasium
from embodyrl.sims.mujoco.env import SUBSTEPS, MujocoConfig, MujocoEnv
from embodyrl.storage.provenance import git_commit, hardware, versions

CHUNK = 5


class One(gymnasium.Env):
    """One env behind gymnasium's single-env interface, one action per step, as AsyncVectorEnv wants it."""

    def __init__(self, renderer: str) -> None:
        torch.set_num_threads(1)
        self.inner = as_gymnasium(
            MujocoEnv(MujocoConfig(num_envs=1, renderer=renderer, num_threads=1, max_blocks=2))
        )
        self.observation_space = self.inner.single_observation_space
        self.action_space = self.inner.single_action_space

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        """Starts an episode."""
        obs, _ = self.inner.reset(seed=seed)
        return {k: v[0] for k, v in obs.items()}, {}

    def step(self, action: np.ndarray) -> tuple:
        """One action; pixels are drawn for it, because the interface gives no way to do without."""
        obs, reward, terminated, truncated, _ = self.inner.step(action[None])
        return (
            {k: v[0] for k, v in obs.items()},
            float(reward[0]),
            bool(terminated[0]),
            bool(truncated[0]),
            {},
        )


def floor(num_envs: int, threads: int, repeats: int) -> float:
    """Control steps per second of ``mujoco.rollout`` alone: the same model and substeps, no control, no observation."""
    env = MujocoEnv(MujocoConfig(num_envs=num_envs, renderer="none", max_blocks=2))
    env.reset(seed=0)
    state, datas = env._state.copy(), [mujoco.MjData(env.model) for _ in range(threads)]
    rates = []
    with rollout.Rollout(nthread=threads) as pool:
        for _ in range(repeats + 1):
            began = time.perf_counter()
            for _ in range(20):
                out, _ = pool.rollout([env.model] * num_envs, datas, state, nstep=SUBSTEPS)
                state = out[:, -1]
            rates.append(20 * num_envs / (time.perf_counter() - began))
    env.close()
    return statistics.median(rates[1:])


def asynchronous(num_envs: int, renderer: str, repeats: int) -> float:
    """Env steps per second of gymnasium's AsyncVectorEnv."""
    envs = AsyncVectorEnv([lambda: One(renderer)] * num_envs, shared_memory=True, context="spawn")
    rng = np.random.default_rng(0)
    envs.reset(seed=0)
    rates = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        for _ in range(40):
            envs.step(rng.uniform(-1, 1, (num_envs, 4)).astype(np.float32))
        rates.append(40 * num_envs / (time.perf_counter() - began))
    envs.close()
    return statistics.median(rates[1:])


def main() -> None:
    """Measures and writes JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--async-envs", type=int, default=4, help="processes of half a GB each")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    n, repeats = arguments.num_envs, arguments.repeats
    result: dict = {"num_envs": n, "chunk": CHUNK, "async_envs": arguments.async_envs}
    for name, renderer in (("state", "none"), ("pixels", "warp")):
        ours = bench_env(
            MujocoConfig(num_envs=n, renderer=renderer, max_blocks=2),
            chunk=CHUNK,
            num_chunks=16,
            repeats=repeats,
        )
        theirs = asynchronous(arguments.async_envs, renderer, repeats)
        rate = ours["env_steps_per_s"]["median"]
        result[name] = {"ours": rate, "async_vector_env": theirs, "ratio": rate / theirs}
    threads = len(os.sched_getaffinity(0))
    result["raw_rollout"] = floor(n, threads, repeats)
    result["share_of_raw"] = result["state"]["ours"] / result["raw_rollout"]
    result |= {"commit": git_commit(), "versions": versions(), "hardware": hardware()}
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
