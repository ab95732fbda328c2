"""When a dream counts as solved: a threshold fitted on held-out episodes, whose actions are dreamt again."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.word_embeddings import embed_sentences
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.dream import Dream, disagreement
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.nets.backbone import CONTEXT
from embodyrl.world_models.reflectors.base import successes
from embodyrl.world_models.reflectors.calibration import Calibration, fit
from embodyrl.world_models.reflectors.metrics import auroc, f1


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
        The dreams after each chunk, and (chunks, E) bool: whether the recorded actions lasted until
        then.
    """
    device = model.device
    source = starts if actions_of is None else actions_of
    dream = stand(model, clips, starts)
    dreams = []
    lasted = []
    for first in range(0, int((clips.end[source] - source).max()) - 1, model.horizon):
        count = (clips.end[source] - 1 - source - first).clamp(0, model.horizon)
        rows = torch.minimum(source + first, clips.end[source] - 1)
        new = model.imagine(
            dream, clips.chunk(rows, model.horizon).to(device), count.clamp(min=1).to(device)
        )
        going = (count > 0).to(device)
        dream = dream.where(going, new)
        dreams.append(dream)
        lasted.append(count > 0)
    return dreams, torch.stack(lasted)


def fit_calibration(
    model: WorldModel, clips: Clips, starts: Tensor, max_false_positives: float
) -> tuple[Calibration, dict[str, Any]]:
    """What makes of the success head's probabilities in dreams a verdict.

    A threshold that makes up for a dream's errors, by calling solved what is only nearly so, is
    what a policy learns to exploit. So it is no lower than the real moments of the same episodes
    ask for.

    Args:
        model: the world model.
        clips: with latents.
        starts: (E,) first frames of held-out episodes; their actions are dreamt again.
        max_false_positives: the greatest share of failing episodes that may be taken for a success
            in a dream; and of all of them that may be so really, before they are solved.

    Returns:
        The calibration, and how these dreams come out under it (see ``outcomes``).
    """
    prob, lasted = probabilities(model, clips, starts)
    label = solved_after(clips, starts, model.horizon, len(prob)) & lasted
    episode = torch.arange(len(starts)).expand_as(prob)
    kept = lasted.T.flatten()
    columns = [x.T.flatten()[kept].numpy() for x in (prob, label, episode)]
    calibration = fit(*columns, max_false_positive_rate=max_false_positives, hits=1)
    unsolved = (label.cumsum(0) == 0) & lasted
    lowest = _lowest_threshold(model, clips, starts, unsolved, calibration, max_false_positives)
    if lowest > float(calibration.apply(prob[lasted & label]).nan_to_num(0.0).amax()):
        raise UserError(
            f"In more than {max_false_positives:.1%} of the held-out episodes the success head is "
            "as sure of a real moment before success as of any success that is dreamt. Train it "
            "on more episodes, failures among them."
        )
    calibration = dataclasses.replace(calibration, threshold=max(calibration.threshold, lowest))
    return calibration, outcomes(calibration, prob, lasted, label.any(0))


@torch.no_grad()
def _lowest_threshold(
    model: WorldModel,
    clips: Clips,
    starts: Tensor,
    unsolved: Tensor,
    calibration: Calibration,
    share: float,
) -> float:
    """Below it more than that share of the episodes would count as solved in a real moment that is ``unsolved``."""
    rows = after_chunks(clips, starts, model.horizon, len(unsolved))
    real = torch.stack([model.solved(stand(model, clips, row)) for row in rows]).cpu()
    sure = calibration.apply(real).where(unsolved, 0.0).amax(0).sort(descending=True).values
    allowed = math.floor(share * len(sure))
    return math.nextafter(float(sure[allowed]), 1.0) if allowed < len(sure) else 0.0


def outcomes(
    calibration: Calibration, prob: Tensor, lasted: Tensor, truth: Tensor
) -> dict[str, Any]:
    """Whether dreams come out as the episodes did.

    Args:
        calibration: of the success head.
        prob: (chunks, E) its probabilities.
        lasted: (chunks, E) bool, where there was a chunk.
        truth: (E,) bool, whether the episode was solved.
    """
    hit, _ = successes(prob.T, calibration, torch.zeros(len(truth), dtype=torch.long))
    hit = (hit.T & lasted).any(0)
    peak = torch.where(lasted, prob, 0.0).nan_to_num(0.0).amax(0)
    return {
        "episodes": len(truth),
        "solved": float(truth.float().mean()),
        "imagined": float(hit.float().mean()),
        "f1": f1(hit.numpy(), truth.numpy()),
        "auroc": auroc(peak.numpy(), truth.numpy()),
        "false_terminations": float(hit[~truth].float().mean()) if (~truth).any() else None,
    }


@torch.no_grad()
def probabilities(
    model: WorldModel, clips: Clips, starts: Tensor, actions_of: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Of success after each chunk of ``replay``, (chunks, E), see ``believed``, and where there was one."""
    dreams, lasted = replay(model, clips, starts, actions_of)
    return believed(model, dreams), lasted


def believed(model: WorldModel, dreams: list[Dream]) -> Tensor:
    """(chunks, E) the success head's probability; NaN, which is no success, from where a dream was doubted on."""
    doubted = torch.stack([model.doubted(dream) for dream in dreams]).cumsum(0) > 0
    return (
        torch.stack([model.solved(dream) for dream in dreams]).masked_fill(doubted, torch.nan).cpu()
    )


def spread_limit(model: WorldModel, clips: Clips, starts: Tensor, quantile: float = 0.9) -> float:
    """How far the nets of the state model differ at most, on the way to success, in 9 of 10 held-out successes.

    Their actions are dreamt again. Failures do not count, for they end where nobody need go;
    without a success they do.
    """
    dreams, lasted = replay(model, clips, starts)
    spreads = torch.stack([dream.spread for dream in dreams if dream.spread is not None]).cpu()
    return _peak_on_the_way(model, clips, starts, spreads, lasted, quantile)


def _peak_on_the_way(
    model: WorldModel, clips: Clips, starts: Tensor, found: Tensor, lasted: Tensor, quantile: float
) -> float:
    """What that share of the held-out successes stay below until they are solved; (chunks, E) is what was ``found``."""
    solved = solved_after(clips, starts, model.horizon, len(found)) & lasted
    before = (solved.cumsum(0) - solved.int() == 0) & lasted
    peak = torch.where(before, found, 0.0).amax(0)
    return float(peak[solved.any(0) if solved.any() else slice(None)].quantile(quantile))


@torch.no_grad()
def fit_inverse(model: WorldModel, clips: Clips, starts: Tensor, quantile: float = 0.9) -> float:
    """What is usual of held-out moves as pictures show them (``InverseDynamics.fit_limits``).

    Returns:
        How far dreams of their actions stray at most, on the way to success, in 9 of 10 held-out
        successes.
    """
    assert model.inverse is not None and clips.latents is not None
    chunks = range(0, int((clips.end[starts] - starts).max()) - 1, model.horizon)
    rows = torch.stack([starts + first for first in chunks], dim=1).flatten()
    follows = (
        torch.stack([torch.full_like(starts, first > 0) for first in chunks], dim=1)
        .flatten()
        .bool()
    )
    real = rows < clips.end[starts].repeat_interleave(len(chunks)) - 1
    rows = rows[real]
    follows = follows[real]
    actions, count = chunks_from(model, clips, rows, clips.end[rows])
    before, after = (
        clips.latents[at].to(model.device).float() for at in (rows, rows + count.cpu())
    )
    model.inverse.fit_limits(before, after, actions, count, follows.to(model.device))
    strays, lasted = strayed(model, clips, starts)
    return _peak_on_the_way(model, clips, starts, strays, lasted, quantile)


@torch.no_grad()
def strayed(
    model: WorldModel, clips: Clips, starts: Tensor, told: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(chunks, E) how far episodes that are dreamt again stray from their actions, and where there was a chunk.

    Args:
        model: the world model.
        clips: with latents.
        starts: (E,) first frames.
        told: (E,) first frames of the episodes whose actions the pictures are compared with; None
            means their own.
    """
    dreams, lasted = replay(model, clips, starts)
    told = starts if told is None else told
    found = []
    for number, dream in enumerate(dreams):
        rows = torch.minimum(told + number * model.horizon, clips.end[told] - 2)
        found.append(model.strays(dream, *chunks_from(model, clips, rows, clips.end[told])).cpu())
    return torch.stack(found), lasted


def chunks_from(
    model: WorldModel, clips: Clips, rows: Tensor, end: Tensor
) -> tuple[Tensor, Tensor]:
    """The actions from ``rows`` on, and how many of them their episodes have."""
    count = (end - 1 - rows).clamp(1, model.horizon)
    return clips.chunk(rows, model.horizon).to(model.device), count.to(model.device)


@torch.no_grad()
def doubt_limit(
    model: WorldModel, clips: Clips, starts: Tensor, seed: int = 0, quantile: float = 0.99
) -> float:
    """How far two draws of a next moment differ in all but 1% of the chunks of held-out episodes dreamt again."""
    generator = torch.Generator().manual_seed(seed)
    dreams, lasted = replay(model, clips, starts)
    found = []
    for number in range(len(dreams) - 1):
        rows = torch.minimum(starts + (number + 1) * model.horizon, clips.end[starts] - 1)
        actions = clips.chunk(rows, model.horizon).to(model.device)
        dream = dreams[number]
        count = (clips.end[starts] - 1 - rows).clamp(1, model.horizon).to(model.device)
        draws = [
            torch.randn(dream.latent.shape, generator=generator).to(model.device) for _ in range(2)
        ]
        pair = [model.imagine(dream, actions, count, sample=draw) for draw in draws]
        found.append(disagreement(*pair)[lasted[number + 1].to(model.device)])
    return float(torch.cat(found).quantile(quantile))


def solved_after(clips: Clips, starts: Tensor, horizon: int, chunks: int) -> Tensor:
    """(chunks, E) bool: the real episode is solved in the frame after each chunk, or by the end of one cut short."""
    return clips.solved[after_chunks(clips, starts, horizon, chunks)]


def after_chunks(clips: Clips, starts: Tensor, horizon: int, chunks: int) -> Tensor:
    """(chunks, E) the real frame after each chunk, or the last one of an episode that is over by then."""
    after = starts + horizon * torch.arange(1, chunks + 1)[:, None]
    return torch.minimum(after, clips.end[starts] - 1)


def stand(model: WorldModel, clips: Clips, rows: Tensor) -> Dream:
    """Dreams that stand where these real frames are."""
    assert clips.latents is not None
    device = model.device
    context = clips.latents[rows].to(device).float()[:, None].expand(-1, CONTEXT, -1, -1, -1, -1)
    words = embed_sentences(clips.sentences).to(device)[clips.sentence[rows]]
    state = None if clips.privileged is None else clips.privileged[rows].to(device)
    return model.begin(context, clips.proprio[rows].to(device), words, state)
