"""Control steps per second of LIBERO here and in its own OffScreenRenderEnv, with and without two 128x128 cameras.

Run: python benchmarks/libero_speed.py [--workers 2] [--chunks 6]; prints one JSON object.
"""

import argparse
import json
import os
import time

import torch

from embodyrl.sims.libero import suites
from embodyrl.sims.libero.env import LiberoConfig, LiberoEnv

HORIZON = 8


def measure_env(chunks, cameras, workers, num_envs):
    start = time.perf_counter()
    env = LiberoEnv(LiberoConfig(num_envs=num_envs, split="eval", task_ids=(0,), cameras=cameras, num_workers=workers))
    actions = torch.rand(num_envs, HORIZON, 7, generator=torch.Generator().manual_seed(0)) * 0.4 - 0.2
    env.reset()
    env.step(actions)
    build = time.perf_counter() - start
    start = time.perf_counter()
    env.reset()
    reset = (time.perf_counter() - start) / num_envs
    start = time.perf_counter()
    for _ in range(chunks):
        env.step(actions)
    rate = chunks * HORIZON * num_envs / (time.perf_counter() - start)
    env.close()
    return {"steps_per_s": round(rate, 1), "first_chunk_s": round(build, 1), "reset_s": round(reset, 2)}


def measure_plain(steps, cameras):
    from libero.libero.envs import OffScreenRenderEnv

    task = suites.load_suite("libero_spatial")[0]
    start = time.perf_counter()
    kwargs = {"camera_heights": 128, "camera_widths": 128} if cameras else {"use_camera_obs": False}
    with suites.quiet():
        env = OffScreenRenderEnv(bddl_file_name=str(task.bddl_file), **kwargs)
    build = time.perf_counter() - start
    start = time.perf_counter()
    env.reset()
    env.set_init_state(suites.official_states(task)[0])
    reset = time.perf_counter() - start
    action = [0.1] * 7
    env.step(action)
    start = time.perf_counter()
    for _ in range(steps):
        env.step(action)
    rate = steps / (time.perf_counter() - start)
    env.close()
    return {"steps_per_s": round(rate, 1), "build_s": round(build, 1), "reset_s": round(reset, 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=6)
    args = parser.parse_args()
    os.environ.setdefault("MUJOCO_GL", "egl")
    out = {}
    for name, cameras in (("state", ()), ("two_cameras", ("agentview", "wrist"))):
        out[f"{name}_1_process"] = measure_env(args.chunks, cameras, 1, 1)
        out[f"{name}_{args.workers}_workers"] = measure_env(args.chunks, cameras, args.workers, args.workers)
        out[f"{name}_offscreen_render_env"] = measure_plain(8 if cameras else 30, bool(cameras))
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
