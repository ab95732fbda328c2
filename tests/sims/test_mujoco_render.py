"""Pixels: what is drawn is what is there, and only what changed is drawn again."""

import os
import subprocess
import sys

import mujoco
import numpy as np
import pytest
import torch

from embodyrl.sims.mujoco import layouts, scene
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv


def project(point: np.ndarray, size: int) -> tuple[int, int]:
    """Row and column of a world point in the front camera's picture."""
    matrix = np.empty(9)
    mujoco.mju_quat2Mat(matrix, scene.look_at(scene.CAMERA_POS, scene.CAMERA_LOOK_AT))
    x, y, z = matrix.reshape(3, 3).T @ (point - scene.CAMERA_POS)
    scale = 0.5 * size / np.tan(np.radians(scene.CAMERA_FOVY) / 2)
    return int(size / 2 - scale * y / -z), int(size / 2 + scale * x / -z)


@pytest.fixture(scope="module")
def env():
    env = MujocoEnv(MujocoConfig(num_envs=20, cameras=("front",), render_batch=8))
    yield env
    env.close()


def test_blocks_appear_where_they_are_in_their_colour(env):
    obs = env.reset(init=range(20))
    image = obs.images["front"]
    assert image.shape == (20, 64, 64, 3) and image.dtype == torch.uint8
    seen = 0
    for k, layout in enumerate(env.layouts):
        for (x, y, z, _), rgb in zip(layout.blocks, layout.block_rgb, strict=False):
            if x < 0:
                continue  # parked
            row, column = project(np.array([x, y, z + scene.BLOCK_HALF]), 64)
            pixel = image[k, row, column].numpy() / 255.0
            seen += int(
                np.argmax([pixel @ c / np.linalg.norm(c) for c in layouts.PALETTE.values()])
            ) == int(np.argmax([rgb @ c / np.linalg.norm(c) for c in layouts.PALETTE.values()]))
            seen_pixels = (image[k].numpy() / 255.0 - pixel) ** 2
            assert (seen_pixels.sum(-1) < 0.05).sum() >= 12, "a block should be several pixels wide"
    blocks = sum(int((layout.blocks[:, 0] > 0).sum()) for layout in env.layouts)
    assert seen >= 0.9 * blocks  # a block may stand before another


def test_pictures_do_not_depend_on_the_batch(env):
    whole = env.reset(init=range(20)).images["front"]
    small = MujocoEnv(MujocoConfig(num_envs=3, cameras=("front",), num_threads=1))
    part = small.reset(init=[17, 4, 9]).images["front"]
    small.close()
    assert torch.equal(whole[[17, 4, 9]], part)


def test_a_partial_reset_draws_only_what_changed(env, monkeypatch):
    before = env.reset(init=range(20)).images["front"]
    drawn, render = [], env._renderer.render
    monkeypatch.setattr(
        env._renderer,
        "render",
        lambda frame, rows: drawn.append(rows.tolist()) or render(frame, rows),
    )
    after = env.reset([3, 11], init=[100, 101]).images["front"]
    assert drawn == [[3, 11]]
    same = [k for k in range(20) if k not in (3, 11)]
    assert torch.equal(before[same], after[same])
    assert not torch.equal(before[3], after[3])


def test_an_observation_is_not_overwritten_by_the_next(env):
    obs = env.reset(init=range(20))
    kept = obs.images["front"].clone()
    env.step(torch.rand(20, 5, 4) - 0.5)
    assert torch.equal(obs.images["front"], kept)


def test_each_split_changes_the_picture_in_its_own_way():
    table, horizon = {}, {}
    for split in ("train", "ood_camera", "ood_lighting", "ood_colour"):
        env = MujocoEnv(MujocoConfig(num_envs=8, split=split))
        image = env.reset(init=range(8)).images["front"].float()
        env.close()
        table[split] = image[:, -1, 0]  # a corner that shows the table alone
        sky = (image[:, :, 0] - 255 * torch.tensor(scene.BACKGROUND)).abs().amax(-1) < 2
        horizon[split] = sky.sum(1)
    assert (table["train"] == table["train"][0]).all()
    assert (table["ood_camera"] - table["train"]).abs().max() < 20
    assert table["ood_lighting"].mean() < table["train"].mean()
    assert table["ood_colour"].std(0).min() > 10
    assert {split for split in horizon if len(horizon[split].unique()) > 1} == {"ood_camera"}


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_opengl_draws_the_same_scene():
    """In a process of its own, since MuJoCo picks its OpenGL driver when it is first imported."""
    result = run_python(
        "from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv\n"
        "frames = []\n"
        "for renderer in ('warp', 'opengl'):\n"
        "    env = MujocoEnv(MujocoConfig(num_envs=3, renderer=renderer, cameras=('wrist', 'front')))\n"
        "    obs = env.reset(init=[0, 1, 2])\n"
        "    frames.append(obs.images)\n"
        "    env.close()\n"
        "for name in ('front', 'wrist'):\n"
        "    difference = (frames[0][name].float() - frames[1][name].float()).abs()\n"
        "    assert difference.mean() < 4, (name, difference.mean())\n"
        "    assert (difference.amax(-1) > 40).float().mean() < 0.05, name\n",
        MUJOCO_GL="egl",
    )
    assert result.returncode == 0, result.stderr


def test_a_missing_renderer_is_a_sentence():
    result = run_python(
        "import sys\n"
        "sys.modules['mujoco_warp'] = None\n"
        "from embodyrl.errors import MissingDependencyError\n"
        "from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv\n"
        "MujocoEnv(MujocoConfig(num_envs=1, renderer='none')).close()\n"
        "try:\n"
        "    MujocoEnv(MujocoConfig(num_envs=1))\n"
        "except MissingDependencyError as error:\n"
        "    assert 'pip install' in str(error) and 'renderer=opengl' in str(error)\n"
        "else:\n"
        "    raise SystemExit('no error')\n"
    )
    assert result.returncode == 0, result.stderr
