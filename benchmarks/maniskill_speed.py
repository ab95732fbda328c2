"""ManiSkill: control steps and frames per second of the env, beside gymnasium's AsyncVectorEnv over the same task.

usage: python benchmarks/maniskill_speed.py [--num-envs 64] [--workers 2] [--seconds 10] [--images]
[--out FILE] All of it runs in one process tree, one part after the other, with the same random
actions; resets count as time.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np
import torch

from embodyrl.sims.maniskill.base_env import _import_mani_skill
from embodyrl.sims.maniskill.config import ManiSkillConfig
from embodyrl.sims.maniskill.env import make_env
from embodyrl.storage.provenance import git_commit, hardware, versions


def ours(
    num_envs: int, workers: int, horizon: int, seconds: float, obs: str, image_size: int = 64
) -> dict[str, float]:
    config = ManiSkillConfig(
        num_envs=num_envs, num_workers=workers, backend="cpu", obs=obs, image_size=image_size
    )
    started = time.perf_counter()
    env = make_env(config)
    env.reset()
    build = time.perf_counter() - started
    generator = torch.Generator().manual_seed(0)
    steps = chunks = 0
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        step = env.step(
            torch.rand(num_envs, horizon, env.spec.action_dim, generator=generator) * 2 - 1
        )
        steps += int(step.valid.sum())
        chunks += num_envs
        if step.done.any():
            env.reset(step.done)
    wall = time.perf_counter() - started
    env.close()
    frames = chunks * len(env.spec.cameras) / wall
    return {
        "steps_per_s": round(steps / wall, 1),
        "frames_per_s": round(frames, 1),
        "build_s": round(build, 1),
    }


def make_plain(image_size: int = 0) -> object:
    """The task as gymnasium makes it, with states, or with pictures of that size at every step."""
    import gymnasium

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    _import_mani_skill(renders=image_size > 0)
    pictures = {"sensor_configs": {"width": image_size, "height": image_size}} if image_size else {}
    env = gymnasium.make(
        "PickCube-v1", obs_mode="rgb" if image_size else "state", control_mode="pd_ee_delta_pos", reward_mode="sparse",
        sim_backend="physx_cpu", render_backend="cpu" if image_size else "none", max_episode_steps=40, **pictures,
    )  # fmt: skip
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    return CPUGymWrapper(env)


def gymnasium_async(num_envs: int, seconds: float, image_size: int = 0) -> dict[str, float]:
    import gymnasium

    started = time.perf_counter()
    env = gymnasium.vector.AsyncVectorEnv(
        [functools.partial(make_plain, image_size)] * num_envs, context="spawn"
    )
    env.reset(seed=0)
    build = time.perf_counter() - started
    rng = np.random.default_rng(0)
    steps = 0
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        env.step(rng.uniform(-1, 1, (num_envs, 4)).astype(np.float32))
        steps += num_envs
    wall = time.perf_counter() - started
    env.close()
    return {"steps_per_s": round(steps / wall, 1), "build_s": round(build, 1)}


class Results(dict[str, Any]):
    """Prints what it is given, so that a run that is cut short has said something."""

    def __setitem__(self, key: str, value: Any) -> None:
        """Keeps and prints one figure."""
        print(f"{key}: {value}", flush=True)
        super().__setitem__(key, value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--async-envs",
        type=int,
        default=4,
        help="AsyncVectorEnv takes a process and half a GB each",
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--images", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = Results(cores=os.cpu_count(), load_before=os.getloadavg()[0])
    results[f"embodyrl state, {args.num_envs} envs, {args.workers} workers, H=4"] = ours(
        args.num_envs, args.workers, 4, args.seconds, "state"
    )
    results[f"gymnasium AsyncVectorEnv state, {args.async_envs} envs"] = gymnasium_async(
        args.async_envs, args.seconds
    )
    results["embodyrl state, 1 process, 8 envs, H=4"] = ours(8, 1, 4, args.seconds, "state")
    if args.images:
        for size in (64, 128):
            results[f"embodyrl rgb {size}, 8 envs, {args.workers} workers, H=4"] = ours(
                8, args.workers, 4, args.seconds, "rgb", size
            )
            results[f"gymnasium AsyncVectorEnv rgb {size}, {args.workers} envs"] = gymnasium_async(
                args.workers, args.seconds, size
            )
    results["load_after"] = os.getloadavg()[0]
    results |= {"commit": git_commit(), "versions": versions(), "hardware": hardware()}
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
