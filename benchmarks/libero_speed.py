"""Control steps per second of LIBERO: both backends, LIBERO's own env, LeRobot's, RLinf's, and bare MuJoCo.

    pip install --no-deps --target RLINF rlinf==0.3.0 gym==0.26.2 gym_notices     (and ray, which the extra scale has)
    python benchmarks/libero_speed.py --rlinf RLINF --out benchmarks/libero_speed.json

Chunks of 8 actions, with and without two 128x128 cameras. The others draw at every step: their
interfaces give no way to do without, and LeRobot's and RLinf's have no episodes without pictures.
LIBERO's own env and LeRobot's run in gymnasium's AsyncVectorEnv, RLinf's in its own processes. How
busy the machine was beforehand is written beside the numbers.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import mujoco
import numpy as np
import psutil
import torch
from gymnasium.vector import AsyncVectorEnv

from embodyrl.sims.libero import suites
from embodyrl.sims.libero.config import LiberoConfig
from embodyrl.sims.libero.env import make_env
from embodyrl.storage.provenance import git_commit, hardware, versions

HORIZON, SIZE = 8, 128
CAMERAS = ("agentview", "wrist")


class One(gymnasium.Env):
    """LIBERO's ``OffScreenRenderEnv`` as gymnasium wants it."""

    def __init__(self, suite: str, cameras: bool) -> None:
        torch.set_num_threads(1)
        from libero.libero.envs import OffScreenRenderEnv

        self._task = suites.load_suite(suite)[0]
        kwargs = (
            {"camera_heights": SIZE, "camera_widths": SIZE}
            if cameras
            else {"use_camera_obs": False}
        )
        with suites.quiet():
            self._env = OffScreenRenderEnv(bddl_file_name=str(self._task.bddl_file), **kwargs)
        names = (
            {"agentview": "agentview_image", "wrist": "robot0_eye_in_hand_image"} if cameras else {}
        )
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


def ours(
    suite: str, backend: str, cameras: bool, num_envs: int, workers: int, repeats: int
) -> dict[str, float]:
    start = time.perf_counter()
    env = make_env(
        LiberoConfig(
            num_envs=num_envs, split="eval", suite=suite, task_ids=(0,), cameras=CAMERAS if cameras else (),
            image_size=SIZE, backend=backend, num_workers=workers,
        )
    )  # fmt: skip
    env.reset()
    ready = time.perf_counter() - start
    actions = (
        torch.rand(num_envs, HORIZON, 7, generator=torch.Generator().manual_seed(0)) * 0.4 - 0.2
    )
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


def lerobot_env(suite: str) -> gymnasium.Env:
    """LeRobot's LIBERO env; without official states, which it would read as a pickle that the package does not have."""
    torch.set_num_threads(1)
    from lerobot.envs.libero import LiberoEnv as LeRobotEnv

    with suites.quiet():
        tasks: Any = suites.libero().get_benchmark_dict()[suite]()
        return LeRobotEnv(
            tasks, 0, suite, obs_type="pixels_agent_pos", observation_width=SIZE, observation_height=SIZE,
            init_states=False,
        )  # fmt: skip


def rlinf(suite: str, num_envs: int, repeats: int, folder: Path) -> dict[str, float]:
    """RLinf's LiberoEnv with one worker process per env, as its recipes run it."""
    sys.path.append(str(folder))  # also where the processes that it starts look
    from omegaconf import OmegaConf
    from rlinf.envs.libero.libero_env import LiberoEnv as RLinfEnv

    cfg = OmegaConf.create(
        {
            "seed": 0, "group_size": 1, "task_suite_name": suite, "task_id_filter": [0], "max_episode_steps": 10**6,
            "use_fixed_reset_state_ids": True, "use_ordered_reset_state_ids": False, "reset_gripper_open": True,
            "ignore_terminations": False, "auto_reset": False, "use_rel_reward": False, "reward_coef": 1.0,
            "video_cfg": {}, "init_params": {"camera_heights": SIZE, "camera_widths": SIZE},
        }
    )  # fmt: skip
    env = RLinfEnv(cfg, num_envs, seed_offset=0, total_num_processes=1, worker_info=None)
    env.reset()
    actions = torch.full((num_envs, HORIZON, 7), 0.1)
    rate = timed(lambda: env.chunk_step(actions), HORIZON * num_envs, repeats)
    env.env.close()
    return {"steps_per_s": rate}


def asynchronous(
    make: Callable[[], gymnasium.Env], num_envs: int, repeats: int
) -> dict[str, float]:
    envs = AsyncVectorEnv([make] * num_envs, context="spawn")
    envs.reset()
    actions = np.full((num_envs, 7), 0.1, np.float32)
    rate = timed(lambda: [envs.step(actions) for _ in range(HORIZON)], HORIZON * num_envs, repeats)
    envs.close()
    return {"steps_per_s": rate}


def bare(suite: str, num_envs: int, repeats: int) -> dict[str, float]:
    """``mj_step`` alone in threads: the same model, states and physics steps, the last torques held."""
    env = make_env(
        LiberoConfig(num_envs=num_envs, split="eval", suite=suite, task_ids=(0,), cameras=())
    )
    env.reset()
    scenes = [env.scene(k) for k in range(num_envs)]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:

        def step() -> None:
            list(
                pool.map(
                    lambda s: mujoco.mj_step(s.model, s.data, HORIZON * s.blueprint.substeps),
                    scenes,
                )
            )

        rate = timed(step, HORIZON * num_envs, repeats)
    env.close()
    return {"steps_per_s": rate}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", default="libero_spatial")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes of all but native"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rlinf", type=Path, help="folder that rlinf and gym are installed in")
    parser.add_argument(
        "--only", nargs="*", default=[], help="measure these alone, e.g. native rlinf"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("MUJOCO_GL", "egl")
    threads = torch.get_num_threads()
    busy = psutil.cpu_percent(interval=5)
    out: dict[str, Any] = {
        "suite": args.suite,
        "horizon": HORIZON,
        "num_envs": args.num_envs,
        "workers": args.workers,
    }
    out["cores_busy_with_other_work_beforehand"] = round(busy / 100 * (os.cpu_count() or 1), 2)
    for name, cameras in (("two_cameras", True), ("state", False)):
        measures = {
            "native": lambda c=cameras: ours(
                args.suite, "native", c, args.num_envs, 1, args.repeats
            ),
            "native_1_env": lambda c=cameras: ours(args.suite, "native", c, 1, 1, args.repeats),
            "robosuite": lambda c=cameras: ours(
                args.suite, "robosuite", c, args.workers, args.workers, args.repeats
            ),
            "offscreen_render_env": lambda c=cameras: plain(args.suite, c, args.repeats),
            "async_vector_env": lambda c=cameras: asynchronous(
                functools.partial(One, args.suite, c), args.workers, args.repeats
            ),
        }
        if cameras:
            lerobot = functools.partial(lerobot_env, args.suite)
            measures["lerobot"] = lambda make=lerobot: asynchronous(
                make, args.workers, args.repeats
            )
            if args.rlinf:
                measures["rlinf"] = lambda: rlinf(
                    args.suite, args.workers, args.repeats, args.rlinf
                )
        else:
            measures["bare_mj_step"] = lambda: bare(args.suite, args.num_envs, args.repeats)
        rows = {}
        for row, measure in measures.items():
            if args.only and row not in args.only:
                continue
            torch.set_num_threads(threads)  # the others' envs, as processes run them, set one
            rows[row] = measure()
            print(name, row, json.dumps(rows[row]), flush=True)
        out[name] = rows
    out |= {"commit": git_commit(), "versions": versions(), "hardware": hardware()}
    print(json.dumps(out, indent=1))
    if args.out:
        args.out.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
