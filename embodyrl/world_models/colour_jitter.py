"""The same episodes in other lights, so that a world model does not depend on how the day was (``styles`` in training).

Sword (docs/world_models.md) repaints its training videos with a generative model; here every copy
of an episode has one gain and one offset of each colour, drawn anew, which costs no memory: the
pictures are repainted when they are read.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from embodyrl.world_models.clips import Clips

BRIGHTER = 0.25
TINTED = 0.15
LIFTED = 0.08
"""The most by which brightness and each colour differ, as factors, and what is added, as a share of the range."""


def restyled(clips: Clips, copies: int, seed: int) -> Clips:
    """The clips, and after them ``copies`` times the same ones, each episode in a light of its own.

    Args:
        clips: without latents; frame t of copy k is frame ``k * len(clips) + t``.
        copies: 1 or more.
        seed: of the lights.
    """
    n = len(clips)
    times = copies + 1
    episode = torch.zeros(n, dtype=torch.long)
    episode[clips.starts] = 1
    episode = episode.cumsum(0) - 1
    colours = torch.cat(
        [_plain(len(clips.starts)), *(_lights(len(clips.starts), seed, k) for k in range(copies))]
    )
    shift = n * torch.arange(times).repeat_interleave(n)
    changed = {
        field.name: value.repeat(times, *[1] * (value.ndim - 1))
        for field in dataclasses.fields(clips)
        if isinstance(value := getattr(clips, field.name), Tensor)
    }
    changed["start"] = changed["start"] + shift
    changed["end"] = changed["end"] + shift
    number = episode.repeat(times) + len(clips.starts) * torch.arange(times).repeat_interleave(n)
    return dataclasses.replace(
        clips, **changed, picture=torch.arange(n).repeat(times), colours=colours[number]
    )


def _plain(count: int) -> Tensor:
    """(count, 2, 3): a gain of 1 and an offset of 0."""
    return torch.stack([torch.ones(count, 3), torch.zeros(count, 3)], dim=1)


def _lights(count: int, seed: int, copy: int) -> Tensor:
    draw = (
        2 * torch.rand(count, 7, generator=torch.Generator().manual_seed(1_000_003 * seed + copy))
        - 1
    )
    gain = (1 + BRIGHTER * draw[:, :1]) * (1 + TINTED * draw[:, 1:4])
    return torch.stack([gain, LIFTED * draw[:, 4:]], dim=1)
