"""The same episodes in other lights, so that a world model does not depend on the day's light.

This is ``styles`` of the training config. Sword (docs/world_models.md) repaints its training
videos with a generative model. Here every copy of an episode draws one gain and one offset for
each colour. That costs no memory: the pictures are repainted when they are read.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from embodyrl.world_models.clips import Clips

MAX_BRIGHTNESS = 0.25
"""The most by which the brightness of all colours differs, as a share of it."""
MAX_TINT = 0.15
"""The most by which one colour differs besides, as a share of it."""
MAX_OFFSET = 0.08
"""The most that is added to a colour, as a share of its range."""


def jitter_colours(clips: Clips, copies: int, seed: int) -> Clips:
    """The clips, and after them ``copies`` times the same ones, each episode in its own light.

    Args:
        clips: without latents; frame t of copy k is frame ``k * len(clips) + t``.
        copies: 1 or more.
        seed: of the lights.
    """
    frames = len(clips)
    episodes = len(clips.starts)
    times = copies + 1
    # Repeat every tensor; episodes of the copies start and end behind the originals.
    changed = {
        field.name: value.repeat(times, *[1] * (value.ndim - 1))
        for field in dataclasses.fields(clips)
        if isinstance(value := getattr(clips, field.name), Tensor)
    }
    copy_of_frame = torch.arange(times).repeat_interleave(frames)
    changed["start"] = changed["start"] + frames * copy_of_frame
    changed["end"] = changed["end"] + frames * copy_of_frame
    # Every episode of every copy has a light; the originals keep theirs.
    lights = [_unchanged(episodes), *(_random_lights(episodes, seed, k) for k in range(copies))]
    begins = torch.zeros(frames, dtype=torch.long)
    begins[clips.starts] = 1
    episode = begins.cumsum(0) - 1
    light = episode.repeat(times) + episodes * copy_of_frame
    return dataclasses.replace(
        clips,
        **changed,
        picture=torch.arange(frames).repeat(times),
        colours=torch.cat(lights)[light],
    )


def _unchanged(count: int) -> Tensor:
    """(count, 2, 3): a gain of 1 and an offset of 0."""
    return torch.stack([torch.ones(count, 3), torch.zeros(count, 3)], dim=1)


def _random_lights(count: int, seed: int, copy: int) -> Tensor:
    """(count, 2, 3): gains and offsets of red, green and blue."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + copy)
    draw = 2 * torch.rand(count, 7, generator=generator) - 1
    gain = (1 + MAX_BRIGHTNESS * draw[:, :1]) * (1 + MAX_TINT * draw[:, 1:4])
    return torch.stack([gain, MAX_OFFSET * draw[:, 4:]], dim=1)
