"""Dreams recorded episodes again: from their first frames, by the actions that were recorded."""

from __future__ import annotations

import torch
from torch import Tensor

from embodyrl.word_embeddings import embed_sentences
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.dream import Dream
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.nets.backbone import CONTEXT


@torch.no_grad()
def replay(
    model: WorldModel, clips: Clips, starts: Tensor, actions_of: Tensor | None = None
) -> tuple[list[Dream], Tensor]:
    """Dreams episodes again, chunk after chunk (open loop).

    Args:
        model: the world model.
        clips: with latents.
        starts: (E,) first frames.
        actions_of: (E,) first frames of the episodes whose actions are taken; None means their own.

    Returns:
        The dreams after each chunk, and (chunks, E) bool: whether the recorded actions lasted until
        then.
    """
    device = model.device
    source = starts if actions_of is None else actions_of
    end = clips.end[source]
    dream = dreams_at(model, clips, starts)
    dreams = []
    lasted = []
    for first in range(0, int((end - source).max()) - 1, model.horizon):
        # The recorded actions from here on; none where the record has ended.
        rows = torch.minimum(source + first, end - 1)
        actions = clips.chunk(rows, model.horizon).to(device)
        count = (end - 1 - source - first).clamp(0, model.horizon)
        # A dream whose record has ended stays where it is.
        new = model.imagine(dream, actions, count.clamp(min=1).to(device))
        dream = dream.where((count > 0).to(device), new)
        dreams.append(dream)
        lasted.append(count > 0)
    return dreams, torch.stack(lasted)


@torch.no_grad()
def replay_success(
    model: WorldModel, clips: Clips, starts: Tensor, actions_of: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(chunks, E) probability of success after each chunk of ``replay``, and where there was one.

    See ``trusted_success``.
    """
    dreams, lasted = replay(model, clips, starts, actions_of)
    return trusted_success(model, dreams), lasted


def trusted_success(model: WorldModel, dreams: list[Dream]) -> Tensor:
    """(chunks, E) the success head's probability after each chunk.

    It is NaN, which counts as no success, once the state model's networks have disagreed.
    """
    disagreed = torch.stack([model.ensemble_disagrees(dream) for dream in dreams]).cumsum(0) > 0
    prob = torch.stack([model.success_probability(dream) for dream in dreams])
    return prob.masked_fill(disagreed, torch.nan).cpu()


@torch.no_grad()
def replay_action_error(
    model: WorldModel, clips: Clips, starts: Tensor, compared_with: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(chunks, E) how far the pictures of replayed episodes are from showing their actions.

    Args:
        model: the world model.
        clips: with latents.
        starts: (E,) first frames.
        compared_with: (E,) first frames of the episodes whose actions the pictures are compared
            with; None means their own.

    Returns:
        The error (``WorldModel.action_error``), and (chunks, E) bool, where there was a chunk.
    """
    dreams, lasted = replay(model, clips, starts)
    source = starts if compared_with is None else compared_with
    errors = []
    for number, dream in enumerate(dreams):
        rows = torch.minimum(source + number * model.horizon, clips.end[source] - 2)
        actions, count = actions_from(model, clips, rows, clips.end[source])
        errors.append(model.action_error(dream, actions, count).cpu())
    return torch.stack(errors), lasted


def actions_from(
    model: WorldModel, clips: Clips, rows: Tensor, end: Tensor
) -> tuple[Tensor, Tensor]:
    """The chunks of actions from ``rows`` on, and how many of them there are before ``end``."""
    count = (end - 1 - rows).clamp(1, model.horizon)
    return clips.chunk(rows, model.horizon).to(model.device), count.to(model.device)


def solved_after(clips: Clips, starts: Tensor, horizon: int, chunks: int) -> Tensor:
    """(chunks, E) bool: the real episode is solved in the frame after each chunk."""
    return clips.solved[frames_after_chunks(clips, starts, horizon, chunks)]


def frames_after_chunks(clips: Clips, starts: Tensor, horizon: int, chunks: int) -> Tensor:
    """(chunks, E) the real frame after each chunk, or the last one of an episode that is over."""
    after = starts + horizon * torch.arange(1, chunks + 1)[:, None]
    return torch.minimum(after, clips.end[starts] - 1)


def dreams_at(model: WorldModel, clips: Clips, rows: Tensor) -> Dream:
    """Dreams that start at these real frames, as if an episode began there."""
    assert clips.latents is not None
    device = model.device
    context = clips.latents[rows].to(device).float()[:, None].expand(-1, CONTEXT, -1, -1, -1, -1)
    words = embed_sentences(clips.sentences).to(device)[clips.sentence[rows]]
    state = None if clips.privileged is None else clips.privileged[rows].to(device)
    return model.begin(context, clips.proprio[rows].to(device), words, state)
