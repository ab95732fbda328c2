"""When a dream counts as solved: a threshold fitted on held-out episodes, whose actions are dreamt again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embodyrl.words import embed_sentences
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.measures import auroc, f1
from embodyrl.world_models.model import Dream, Judgement, WorldModel


@torch.no_grad()
def replay(
    model: WorldModel, clips: Clips, starts: Tensor, actions_of: Tensor | None = None
) -> tuple[list[Dream], Tensor]:
    """Dreams episodes again from their first frames, chunk after chunk, by the actions that were recorded.

    Args:
        model: the world model.
        clips: with latents.
        starts: (E,) first frames.
        actions_of: (E,) first frames of the episodes whose actions are taken; None means their own.

    Returns:
        The dreams after each chunk, and (chunks, E) bool: whether the recorded actions lasted until then.
    """
    assert clips.latents is not None
    device, source = model.proprio_mean.device, starts if actions_of is None else actions_of
    words = embed_sentences(clips.sentences).to(device)[clips.sentence[starts]]
    dream = model.begin(clips.latents[starts].to(device).float(), clips.proprio[starts].to(device), words)
    dreams, lasted = [], []
    for first in range(0, int((clips.end[source] - source).max()) - 1, model.horizon):
        count = (clips.end[source] - 1 - source - first).clamp(0, model.horizon)
        rows = torch.minimum(source + first, clips.end[source] - 1)
        new = model.imagine(dream, clips.chunk(rows, model.horizon).to(device), count.clamp(min=1).to(device))
        going = (count > 0).to(device)
        dream = dream.where(going, new)
        dreams.append(dream)
        lasted.append(count > 0)
    return dreams, torch.stack(lasted)


def fit_judgement(
    model: WorldModel, clips: Clips, held_out: Tensor, max_false_positives: float
) -> tuple[Judgement, dict[str, Any]]:
    """The lowest threshold at which few enough failing dreams are taken for a success.

    Args:
        model: the world model.
        clips: with latents.
        held_out: (F,) bool.
        max_false_positives: their greatest share.

    Returns:
        The judgement, and how the dreams of the held-out episodes come out under it: ``episodes``, ``solved``,
        ``true_positives``, ``false_positives``, ``f1`` and ``auroc``.
    """
    starts = clips.starts[held_out[clips.starts]]
    truth = torch.stack([clips.solved[a : clips.end[a]].any() for a in starts.tolist()])
    score = peak(model, clips, starts)
    wrong = score[~truth].sort(descending=True).values
    allowed = int(max_false_positives * len(wrong))
    threshold = max(0.5, float(wrong[allowed]) + 1e-6) if len(wrong) else 0.5
    hit = score >= threshold
    return Judgement(threshold=min(threshold, 0.99)), {
        "threshold": threshold,
        "episodes": len(truth),
        "solved": int(truth.sum()),
        "true_positives": int((hit & truth).sum()),
        "false_positives": int((hit & ~truth).sum()),
        "f1": f1(hit, truth),
        "auroc": auroc(score, truth),
    }


def peak(model: WorldModel, clips: Clips, starts: Tensor, actions_of: Tensor | None = None) -> Tensor:
    """(E,) the greatest probability of success in the dreams of ``replay``."""
    dreams, lasted = replay(model, clips, starts, actions_of)
    with torch.no_grad():
        seen = torch.stack([model.solved(dream) for dream in dreams]).cpu()
    return torch.where(lasted, seen, 0.0).amax(0)
