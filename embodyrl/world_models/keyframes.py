"""Keyframes: the real moments, kept with a world model, that its dreams start from."""

from __future__ import annotations

import torch
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.model import WorldModel

MOST = 4096
"""The most first frames of episodes that are kept, and the most later moments."""


def add_keyframes(model: WorldModel, clips: Clips, held_out: Tensor, seed: int = 0) -> None:
    """Gives a model its keyframes: first frames of episodes, and as many later moments.

    Args:
        model: gets ``keyframes`` and ``sentences``.
        clips: with latents.
        held_out: (F,) bool, frames that were kept from training.
        seed: of the choice.
    """
    assert clips.latents is not None
    generator = torch.Generator().manual_seed(seed)
    # First frames, and moments with a whole chunk behind and before them that are not solved.
    first = clips.starts[torch.randperm(len(clips.starts), generator=generator)[:MOST]]
    frame = torch.arange(len(clips))
    on_the_way = (frame > clips.start) & (frame + model.horizon < clips.end) & ~clips.solved
    later = on_the_way.nonzero().flatten()
    later = later[torch.randperm(len(later), generator=generator)[:MOST]]
    rows = torch.cat([first, later]).sort().values
    # The context of each: the first frame of the episode, the one a chunk ago, and itself.
    previous = torch.maximum(clips.start[rows], rows - model.horizon)
    context = torch.stack([clips.start[rows], previous, rows], dim=1)
    model.sentences = clips.sentences
    model.keyframes = {
        "context": clips.latents[context],
        "proprio": clips.proprio[rows],
        "sentence": clips.sentence[rows],
        "init": clips.init[rows],
        "age": rows - clips.start[rows],
        "held_out": held_out[rows],
    }
    if model.state is not None and clips.privileged is not None:
        model.keyframes["privileged"] = clips.privileged[rows]


def select_keyframes(model: WorldModel, split: str, starts: str) -> dict[str, Tensor]:
    """The keyframes that dreams may start from.

    Args:
        model: with keyframes.
        split: ``train`` for those of training, ``eval`` for held-out ones.
        starts: ``first`` for first frames of episodes only, ``any`` for all.

    Raises:
        UserError: another split, or none is left.
    """
    held_out = {"train": False, "eval": True}
    if split not in held_out:
        raise UserError(f"A world model has the splits train and eval, not {split!r}.")
    chosen = model.keyframes["held_out"] == held_out[split]
    if starts == "first":
        chosen = chosen & (model.keyframes["age"] == 0)
    if not chosen.any():
        raise UserError(f"The world model has no keyframes of the split {split}.")
    return {name: value[chosen] for name, value in model.keyframes.items()}
