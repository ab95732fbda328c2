"""Held-out episodes as the cameras saw them, and below as a world model imagines them from their first frames."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from embodyrl.world_models.clips import Clips
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.replay import replay

EDGE = 96
MARGIN = 64
GAP = 8
"""Pixels: the least height of a frame, the width of the words beside them, the space between episodes."""


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
    """Writes a picture: an episode two rows, a moment a column, open loop by the actions that were recorded.

    Args:
        model: the world model.
        clips: with latents.
        starts: (E,) first frames of episodes, of which the first that are solved and the first that
            fail are drawn.
        path: of the picture; its folder is made.
        episodes: at the most.
        columns: at the most, evenly over the longest episode.
    """
    some = _both_kinds(clips, starts, episodes)
    dreams, lasted = replay(model, clips, some)
    assert clips.latents is not None
    latents = [clips.latents[some].float(), *(dream.latent.cpu() for dream in dreams)]
    going = torch.cat([torch.ones(1, len(some), dtype=torch.bool), lasted])
    moments = torch.linspace(0, len(dreams), min(columns, len(latents))).round().long().tolist()
    strips = []
    for moment in moments:
        at = torch.minimum(some + moment * model.horizon, clips.end[some] - 1)
        dreamt = model.codec.decode(latents[moment].to(model.device)).cpu()
        pair = (
            torch.stack([clips.frames(at), dreamt]).transpose(2, 3).flatten(3, 4)
        )  # cameras side by side
        strips.append(
            pair.where(going[moment][:, None, None, None], torch.tensor(255, dtype=torch.uint8))
        )
    canvas = (
        torch.stack(strips).permute(2, 1, 3, 0, 4, 5).numpy()
    )  # episode, seen or dreamt, row, moment, column, 3
    h = canvas.shape[2]
    w = canvas.shape[4]
    scale = max(1, -(-EDGE // h))
    height = 2 * h * scale + GAP
    width = len(moments) * w * scale
    picture = Image.new("RGB", (MARGIN + width, 20 + len(some) * height), "white")
    draw = ImageDraw.Draw(picture)
    for column, moment in enumerate(moments):
        x = MARGIN + column * w * scale
        draw.text((x + 2, 4), f"{moment * model.horizon} actions", fill="black", font_size=12)
    for number, (start, rows) in enumerate(zip(some.tolist(), canvas, strict=True)):
        y = 20 + number * height
        body = Image.fromarray(rows.reshape(2 * h, len(moments) * w, 3))
        picture.paste(body.resize((width, 2 * h * scale), Image.Resampling.NEAREST), (MARGIN, y))
        outcome = "solved" if clips.solved[start : clips.end[start]].any() else "fails"
        draw.text((4, y + h * scale // 3), f"seen\n({outcome})", fill="black", font_size=12)
        draw.text((4, y + h * scale * 4 // 3), "dreamt", fill="black", font_size=12)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)


def _both_kinds(clips: Clips, starts: Tensor, count: int) -> Tensor:
    """The first starts of either kind, half of each where there are so many."""
    solved = torch.tensor([bool(clips.solved[a : clips.end[a]].any()) for a in starts.tolist()])
    yes = starts[solved]
    no = starts[~solved]
    failing = min(len(no), max(count // 2, count - len(yes)))
    return torch.cat([yes[: count - failing], no[:failing]])
