"""Control steps per second of LIBERO: both backends, LIBERO's own env plainly and in AsyncVectorEnv, bare MuJoCo.

    python benchmarks/libero_speed.py --out benchmarks/libero_speed.json

Chunks of 8 actions, with and without two 128x128 cameras. LIBERO's own env draws at every step: its interface gives no
way to do without. How busy the machine was with other work beforehand is written beside the numbers.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import mujoco
import numpy as np
import psutil
import torch
from gymnasium.vector import AsyncVectorEnv

from embodyrl.provenance import git_commit, hardware, versions
from embodyrl.sims.libero import suites
from embodyrl.sims.libero.env import LiberoConfig, LiberoEnv

HORIZON, SIZE = 8, 128
CAMERAS = ("agentview", "wrist")


class One(gymnasium.Env):
    """LIBERO's ``OffScreenRenderEnv`` as gymnasium wants it."""

    def __init__(self, suite: str, cameras: bool) -> None:
        torch.set_num_threads(1)
        from libero.libero.envs import OffScreenRenderEnv

        self._task = suites.load_suite(suite)[0]
        kwargs = {"camera_heights": SIZE, "camera_widths": SIZE} if cameras else {"use_camera_obs": False}
        with suites.quiet():
            self._env = OffScreenRenderEnv(bddl_file_name=str(self._task.bddl_file), **kwargs)
        names = {"agentview": "agentview_image", "wrist": "robot0_eye_in_hand_image"} if cameras else {}
        self._names = names
        box = gymnasium.spaces.Box
        self.observation_space = gymnasium.spaces.Dict(
            {name: box(0, 255, (SIZE, SIZE, 3), np.uint8) for name in names}
            | {"proprio": box(-np.inf, np.inf, (5,), np.float32)}
        )
        self.action_space = box(-1, 1, (7,), np.float32)

    def _convert(self, raw: dict[str, Any]) -> dict[str, np.ndarray]:
        own = np.concatenate([raw["robot0_eef_pos"], raw["robot0_gripper_qpos"]]).astype(np.float32)
        return {name: raw[key] for name, key in self._names.items()} | {"proprio": own}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        """An official initial state."""
        self._env.reset()
        return self._convert(self._env.set_init_state(suites.official_states(self._task)[0])), {}

    def step(self, action: np.ndarray) -> tuple:
        """One control step."""
        raw, reward, done, _ = self._env.step(np.asarray(action, dtype=np.float64))
        return self._convert(raw), float(reward), bool(done), False, {}

    def close(self) -> None:
        """Frees the renderer."""
        self._env.close()


def timed(step, control_steps: int, repeats: int) -> float:
    """Median rate over repeats, after one that is not counted."""
    rates = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        step()
        rates.append(control_steps / (time.perf_counter() - start))
    return round(statistics.median(rates[1:]), 1)


def ours(suite: str, backend: str, cameras: bool, num_envs: int, workers: int, repeats: int) -> dict[str, float]:
    start = time.perf_counter()
    env = LiberoEnv(
        LiberoConfig(
            num_envs=num_envs, split="eval", suite=suite, task_ids=(0,), cameras=CAMERAS if cameras else (),
            image_size=SIZE, backend=backend, num_workers=workers,
        )
    )  # fmt: skip
    env.reset()
    ready = time.perf_counter() - start
    actions = torch.rand(num_envs, HORIZON, 7, generator=torch.Generator().manual_seed(0)) * 0.4 - 0.2
    rate = timed(lambda: env.step(actions), HORIZON * num_envs, repeats)
    start = time.perf_counter()
    env.reset()
    reset = (time.perf_counter() - start) / num_envs
    env.close()
    return {"steps_per_s": rate, "ready_s": round(ready, 1), "reset_s": round(reset, 3)}


def plain(suite: str, cameras: bool, repeats: int) -> dict[str, float]:
    env, action = One(suite, cameras), np.full(7, 0.1)
    env.reset()
    rate = timed(lambda: [env.step(action) for _ in range(HORIZON)], HORIZON, repeats)
    env.close()
    return {"steps_per_s": rate}


def asynchronous(suite: str, cameras: bool, num_envs: int, repeats: int) -> dict[str, float]:
    envs = AsyncVectorEnv([functools.partial(One, suite, cameras)] * num_envs, context="spawn")
    envs.reset()
    actions = np.full((num_envs, 7), 0.1, np.float32)
    rate = timed(lambda: [envs.step(actions) for _ in range(HORIZON)], HORIZON * num_envs, repeats)
    envs.close()
    return {"steps_per_s": rate}


def bare(suite: str, num_envs: int, repeats: int) -> dict[str, float]:
    """``mj_step`` alone in threads: the same model, states and physics steps, the last torques held."""
    env = LiberoEnv(LiberoConfig(num_envs=num_envs, split="eval", suite=suite, task_ids=(0,), cameras=()))
    env.reset()
    scenes = [env.scene(k) for k in range(num_envs)]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:

        def step() -> None:
            list(pool.map(lambda s: mujoco.mj_step(s.model, s.data, HORIZON * s.blueprint.substeps), scenes))

        rate = timed(step, HORIZON * num_envs, repeats)
    env.close()
    return {"steps_per_s": rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="libero_spatial")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes of all but native")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("MUJOCO_GL", "egl")
    busy = psutil.cpu_percent(interval=5)
    out: dict[str, Any] = {"suite": args.suite, "horizon": HORIZON, "num_envs": args.num_envs, "workers": args.workers}
    out["cores_busy_with_other_work_beforehand"] = round(busy / 100 * (os.cpu_count() or 1), 2)
    for name, cameras in (("two_cameras", True), ("state", False)):
        measures = {
            "native": lambda c=cameras: ours(args.suite, "native", c, args.num_envs, 1, args.repeats),
            "native_1_env": lambda c=cameras: ours(args.suite, "native", c, 1, 1, args.repeats),
            "robosuite": lambda c=cameras: ours(args.suite, "robosuite", c, args.workers, args.workers, args.repeats),
            "offscreen_render_env": lambda c=cameras: plain(args.suite, c, args.repeats),
            "async_vector_env": lambda c=cameras: asynchronous(args.suite, c, args.workers, args.repeats),
        }
        if not cameras:
            measures["bare_mj_step"] = lambda: bare(args.suite, args.num_envs, args.repeats)
        rows = {}
        for row, measure in measures.items():
            rows[row] = measure()
            print(name, row, json.dumps(rows[row]), flush=True)
        out[name] = rows
    out |= {"commit": git_commit(), "versions": versions(), "hardware": hardware()}
    print(json.dumps(out, indent=1))
    if args.out:
        args.out.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
