"""LIBERO's pictures: mujoco-warp's ray caster beside OpenGL's, of the same states: PSNR, and both side by side.

    MUJOCO_GL=egl python benchmarks/libero_pictures.py --picture docs/images/libero_pictures.png

OpenGL's are those that LIBERO's own env gives, pixel for pixel (a test). A task's first run builds
it (10 to 20 s).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import torch
from PIL import Image

from embodyrl.sims.libero.config import LiberoConfig
from embodyrl.sims.libero.env import make_env
from embodyrl.sims.libero.native import Simulation
from embodyrl.sims.libero.render import CAMERAS, scene_renderer
from embodyrl.storage.provenance import git_commit, hardware, versions

TASKS = (
    ("libero_spatial", 0),
    ("libero_object", 0),
    ("libero_goal", 0),
    ("libero_10", 0),
    ("libero_10", 2),
)
SIZE, STEPS = 128, 16


def opengl(scene: Simulation) -> dict[str, np.ndarray]:
    """The pictures of a simulation as OpenGL draws them."""
    model = mujoco.MjModel.from_xml_string(scene.blueprint.xml)
    data, bodies = mujoco.MjData(model), scene.blueprint.fixtures
    model.body_pos[bodies], model.body_quat[bodies] = (
        scene.fixture_poses[:, :3],
        scene.fixture_poses[:, 3:],
    )
    for site, lit in zip(scene.blueprint.burners, scene.glowing(), strict=True):
        model.site(site).rgba[3] = float(lit)
    data.qpos[:] = scene.seen_qpos
    mujoco.mj_kinematics(model, data)
    mujoco.mj_comPos(model, data)
    mujoco.mj_camlight(model, data)
    renderer = scene_renderer(model, SIZE, torch.device("cpu"))
    renderer.option.sitegroup[:] = 0  # robosuite hides its markers
    pictures = {name: renderer.draw(data, camera).copy() for name, camera in CAMERAS.items()}
    renderer.close()
    return pictures


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return round(float(10 * np.log10(255**2 / ((a.astype(float) - b) ** 2).mean())), 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tasks", type=int, default=len(TASKS), help="the first so many of the list"
    )
    parser.add_argument("--picture", type=Path, help="upper row ours, lower row OpenGL's")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    columns = []
    for suite, number in TASKS[: args.tasks]:
        config = LiberoConfig(
            num_envs=1, split="eval", suite=suite, task_ids=(number,), cameras=tuple(CAMERAS)
        )
        env = make_env(config)
        env.reset(init=[0])
        step = env.step(torch.rand(1, STEPS, 7, generator=torch.Generator().manual_seed(0)) * 2 - 1)
        ours = {name: step.obs.images[name][0].numpy() for name in CAMERAS}
        theirs = opengl(env.scene(0))  # type: ignore[arg-type]
        rows.append(
            {
                "suite": suite,
                "task": env.tasks[0].name,
                **{f"psnr_{c}": psnr(ours[c], theirs[c]) for c in CAMERAS},
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        columns += [np.concatenate([ours[c], theirs[c]]) for c in CAMERAS]
        env.close()
    about = {"commit": git_commit(), "versions": versions(), "hardware": hardware()}
    args.out.write_text(json.dumps({"size": SIZE, "tasks": rows} | about, indent=1) + "\n")
    if args.picture:
        Image.fromarray(np.concatenate(columns, axis=1)).quantize(256).save(
            args.picture, optimize=True
        )


if __name__ == "__main__":
    main()
