"""Draws held-out episodes as the cameras saw them, and below as a world model imagines them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from embodyrl.storage.atomic_files import replacing
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.replay import replay

EDGE = 96
"""The least height of a frame, in pixels."""
MARGIN = 64
"""Width of the words beside the frames, in pixels."""
GAP = 8
"""Space between episodes, in pixels."""
TITLE = 20
"""Height of the line above, in pixels."""


@torch.no_grad()
def draw_dreams(
    model: WorldModel,
    clips: Clips,
    starts: Tensor,
    path: str | Path,
    *,
    episodes: int = 6,
    columns: int = 9,
) -> None:
    """Writes a picture with two rows per episode, seen and dreamt, and one moment per column.

    The dreams are open loop, by the recorded actions.

    Args:
        model: the world model.
        clips: with latents.
        starts: (E,) first frames of episodes; the first solved and the first failing ones of them
            are drawn.
        path: of the picture; its folder is made.
        episodes: at the most.
        columns: at the most, evenly over the longest episode.
    """
    chosen = _both_outcomes(clips, starts, episodes)
    moments, frames = _seen_and_dreamt(model, clips, chosen, columns)
    _, _, h, _, w, _ = frames.shape
    scale = max(1, -(-EDGE // h))
    width = len(moments) * w * scale
    height = 2 * h * scale + GAP
    picture = Image.new("RGB", (MARGIN + width, TITLE + len(chosen) * height), "white")
    draw = ImageDraw.Draw(picture)
    # The time above every column.
    for column, moment in enumerate(moments):
        x = MARGIN + column * w * scale
        draw.text((x + 2, 4), f"{moment * model.horizon} actions", fill="black", font_size=12)
    # Two rows for every episode.
    for number, (start, rows) in enumerate(zip(chosen.tolist(), frames, strict=True)):
        y = TITLE + number * height
        strip = Image.fromarray(rows.reshape(2 * h, len(moments) * w, 3))
        strip = strip.resize((width, 2 * h * scale), Image.Resampling.NEAREST)
        picture.paste(strip, (MARGIN, y))
        outcome = "solved" if clips.solved[start : clips.end[start]].any() else "fails"
        draw.text((4, y + h * scale // 3), f"seen\n({outcome})", fill="black", font_size=12)
        draw.text((4, y + h * scale * 4 // 3), "dreamt", fill="black", font_size=12)
    with replacing(path) as unfinished:
        picture.save(unfinished, format="PNG")


def _seen_and_dreamt(
    model: WorldModel, clips: Clips, starts: Tensor, columns: int
) -> tuple[list[int], np.ndarray]:
    """The moments that are drawn, in chunks, and their frames.

    The frames are (episode, seen or dreamt, h, moment, w, 3), the cameras side by side; white where
    an episode is over.
    """
    dreams, lasted = replay(model, clips, starts)
    assert clips.latents is not None
    latents = [clips.latents[starts].float(), *(dream.latent.cpu() for dream in dreams)]
    going = torch.cat([torch.ones(1, len(starts), dtype=torch.bool), lasted])
    moments = torch.linspace(0, len(dreams), min(columns, len(latents))).round().long().tolist()
    white = torch.tensor(255, dtype=torch.uint8)
    strips = []
    for moment in moments:
        at = torch.minimum(starts + moment * model.horizon, clips.end[starts] - 1)
        dreamt = model.codec.decode(latents[moment].to(model.device)).cpu()
        pair = torch.stack([clips.frames(at), dreamt])
        cameras_joined = pair.transpose(2, 3).flatten(3, 4)
        strips.append(cameras_joined.where(going[moment][:, None, None, None], white))
    return moments, torch.stack(strips).permute(2, 1, 3, 0, 4, 5).numpy()


def _both_outcomes(clips: Clips, starts: Tensor, count: int) -> Tensor:
    """The first starts of solved and of failing episodes, half of each if there are so many."""
    solved = torch.tensor([bool(clips.solved[a : clips.end[a]].any()) for a in starts.tolist()])
    successes = starts[solved]
    failures = starts[~solved]
    num_failures = min(len(failures), max(count // 2, count - len(successes)))
    return torch.cat([successes[: count - num_failures], failures[:num_failures]])
