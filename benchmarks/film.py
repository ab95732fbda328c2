"""Films two checkpoints on the same initial states, side by side, as the GIF at the top of the README.

    python benchmarks/film.py runs/quickstart/sft runs/quickstart/rl docs/images/quickstart.gif

The states are the first ones of the evaluation split, whatever the outcome. The policy sees its own
small pictures; a second env that is given the same actions draws the large ones.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from embodyrl.build import load_config, make_env, make_policy
from embodyrl.storage import checkpoint

BORDER = {True: (60, 170, 80), False: (200, 60, 50), None: (120, 120, 120)}


def film(path: str, inits: list[int], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures (T, N, size, size, 3) and, for each, whether the episode succeeded (1), failed (0) or ran (-1)."""
    config = load_config(path)
    env_config = dataclasses.replace(
        config.env, split=config.run.eval_split, num_envs=len(inits), device="cpu"
    )
    env = make_env(env_config)
    large = make_env(dataclasses.replace(env_config, image_size=size))
    policy = make_policy(config.policy, env.spec, 0)
    checkpoint.load_weights(path, policy, env.spec)
    generators = [torch.Generator().manual_seed(i) for i in inits]
    obs, shown = env.reset(init=inits), large.reset(init=inits)
    camera = next(iter(env.spec.cameras))
    state = np.full(len(inits), -1)
    frames, states = [shown.images[camera].numpy()], [state.copy()]
    while (state == -1).any():
        for action in policy.sample(obs, generator=generators, mode="eval").actions.split(1, dim=1):
            obs = env.step(action).obs
            step = large.step(action)
            state = np.where(step.success & step.done, 1, np.where(step.done, 0, state))
            frames.append(step.obs.images[camera].numpy())
            states.append(state.copy())
    env.close()
    large.close()
    return np.stack(frames), np.stack(states)


def tile(frames: np.ndarray, states: np.ndarray, t: int, columns: int) -> np.ndarray:
    """A grid of the pictures at time t, each framed by how its episode stands."""
    t = min(t, len(frames) - 1)
    cells = []
    for image, state in zip(frames[t], states[t], strict=True):
        framed = np.empty((image.shape[0] + 8, image.shape[1] + 8, 3), np.uint8)
        framed[:] = BORDER[{-1: None, 0: False, 1: True}[int(state)]]
        framed[4:-4, 4:-4] = image
        cells.append(framed)
    rows = [np.concatenate(cells[i : i + columns], axis=1) for i in range(0, len(cells), columns)]
    return np.concatenate(rows, axis=0)


def main() -> None:
    """Films both and writes the GIF."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("out", type=Path)
    parser.add_argument("--states", type=int, default=9)
    parser.add_argument("--size", type=int, default=128)
    arguments = parser.parse_args()
    inits = list(range(arguments.states))
    clips = [film(path, inits, arguments.size) for path in (arguments.before, arguments.after)]
    pictures = []
    columns = round(len(inits) ** 0.5)
    for t in range(max(len(frames) for frames, _ in clips) + 15):
        halves = [tile(frames, states, t, columns) for frames, states in clips]
        gap = np.full((halves[0].shape[0], 16, 3), 255, np.uint8)
        body = np.concatenate([halves[0], gap, halves[1]], axis=1)
        canvas = Image.new("RGB", (body.shape[1], body.shape[0] + 26), "white")
        canvas.paste(Image.fromarray(body), (0, 26))
        draw = ImageDraw.Draw(canvas)
        for x, (name, (_, states)) in zip(
            (4, halves[0].shape[1] + 20),
            zip(("imitation", "imitation + RL"), clips, strict=True),
            strict=True,
        ):
            solved = int((states[min(t, len(states) - 1)] == 1).sum())
            draw.text(
                (x, 6), f"{name}: {solved} of {len(inits)} solved", fill="black", font_size=16
            )
        pictures.append(canvas.quantize(128))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    pictures[0].save(
        arguments.out, save_all=True, append_images=pictures[1:], duration=60, loop=0, optimize=True
    )


if __name__ == "__main__":
    main()
