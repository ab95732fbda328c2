"""A tiny world that can be computed by hand: a square that moves as it is told."""

import contextlib
import dataclasses
from pathlib import Path

import numpy as np
import torch

from embodyrl.errors import UserError
from embodyrl.types import EnvSpec
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.reflectors.calibration import Calibration
from embodyrl.world_models.train import WorldTrainConfig, train_world

T, SIZE = 16, 32
VAE = {
    "base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1,
    "latents_mean": [0.1] * 4, "latents_std": [2.0] * 4,
}  # fmt: skip
"""Of an ``AutoencoderKLWan`` that is quick to build."""
SPEC = EnvSpec("test/square", 1, 2, 2, "ee_delta_pos", 10.0, T - 1, {"front": (SIZE, SIZE)})


def squares(episodes: int, seed: int, *, state: bool = False) -> Clips:
    """A square moves by 4 pixels times the action; at the right edge the task is solved.

    With ``state`` the simulator's state is known: how far the square still is from that edge, in
    pixels.
    """
    rng = np.random.default_rng(seed)
    place, frames, proprio, actions, solved = [], [], [], [], []
    for _ in range(episodes):
        x = rng.uniform(4, SIZE - 4, size=2)
        drift = rng.uniform(-1, 1, size=2)
        for t in range(T):
            frame = np.full((SIZE, SIZE, 3), 90, np.uint8)
            row, column = (int(v) for v in x)
            frame[max(0, row - 3) : row + 3, max(0, column - 3) : column + 3] = (220, 30, 30)
            action = np.clip(drift + 0.5 * rng.standard_normal(2), -1, 1).astype(np.float32)
            frames.append(frame)
            proprio.append(x / SIZE)
            actions.append(action)
            solved.append(x[1] > SIZE - 9)
            place.append(t)
            x = np.clip(x + 4 * action, 4, SIZE - 4)
    number = torch.arange(episodes * T)
    start = number // T * T
    spec, privileged = SPEC, None
    if state:
        spec = dataclasses.replace(SPEC, privileged_dim=1)
        privileged = torch.tensor(np.array(proprio), dtype=torch.float32)[:, 1:] * -SIZE + SIZE - 9
    return Clips(
        {"front": np.stack(frames)},
        torch.tensor(np.array(proprio), dtype=torch.float32),
        torch.tensor(np.array(actions)),
        torch.tensor(np.array(solved)),
        start,
        start + T,
        torch.zeros(len(number), dtype=torch.long),
        ["push the square to the right"],
        number // T,
        spec,
        {"name": "gymnasium"},
        torch.ones(len(number), dtype=torch.long),
        privileged=privileged,
    )


def two_views() -> Clips:
    """Twelve episodes seen by two cameras, the second one upside down."""
    clips = squares(12, 0)
    front = clips.images["front"]
    cameras = {"front": (SIZE, SIZE), "side": (SIZE, SIZE)}
    images = {"front": front, "side": front[:, ::-1].copy()}
    return dataclasses.replace(
        clips, images=images, spec=dataclasses.replace(clips.spec, cameras=cameras)
    )


NEVER = Calibration(bias=-50.0, threshold=1.0)
SETTINGS = {
    "data": ("memory",), "horizon": 3, "channels": 16, "width": 32, "layers": 1,
    "latent_channels": 4, "codec_steps": 20, "steps": 30, "state_steps": 200, "inverse_steps": 60,
    "max_false_positives": 1.0,
}  # fmt: skip


def hardly_trained(config: WorldTrainConfig) -> str:
    """A model even if training complains that so few steps did not teach it what a success is."""
    with contextlib.suppress(UserError):
        train_world(config)
    return str(Path(config.out) / "model")
