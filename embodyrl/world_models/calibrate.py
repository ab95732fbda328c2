"""Limits and thresholds of a world model, fitted on replays of held-out episodes in dreams.

calibrate_success_head     when a dream counts as solved
disagreement_limit         how far two samples of a next moment may differ
spread_limit               how far the networks of the state model may differ
fit_action_error_limit     how far pictures may be from showing the commanded actions
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.functional.held_out import auroc
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.dream import disagreement
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.reflectors.base import successes
from embodyrl.world_models.reflectors.calibration import Calibration, fit_calibration
from embodyrl.world_models.reflectors.metrics import f1
from embodyrl.world_models.replay import (
    actions_from,
    dreams_at,
    frames_after_chunks,
    replay,
    replay_action_error,
    replay_success,
    solved_after,
)

# ---- Success. ----


def calibrate_success_head(
    model: WorldModel, clips: Clips, starts: Tensor, max_false_positives: float
) -> tuple[Calibration, dict[str, Any]]:
    """Fits what turns the success head's probabilities in dreams into a verdict.

    A low threshold would make up for a dream's errors by calling solved what is only nearly
    solved, and a policy would learn to exploit that. So the threshold must also be right in the
    real moments of the same episodes.

    Args:
        model: the world model.
        clips: with latents.
        starts: (E,) first frames of held-out episodes; their actions are dreamt again.
        max_false_positives: the greatest share of failing episodes that may count as a success in
            a dream; and of all episodes that may count as solved in a real moment before they are.

    Returns:
        The calibration, and how these dreams come out under it (see ``outcomes``).

    Raises:
        UserError: no threshold keeps ``max_false_positives``.
    """
    # Fit the calibration on the dreams, episode after episode.
    prob, lasted = replay_success(model, clips, starts)
    label = solved_after(clips, starts, model.horizon, len(prob)) & lasted
    episode = torch.arange(len(starts)).expand_as(prob)
    kept = lasted.T.flatten()
    columns = [x.T.flatten()[kept].numpy() for x in (prob, label, episode)]
    calibration = fit_calibration(*columns, max_false_positive_rate=max_false_positives, hits=1)
    # Raise the threshold to what the real moments ask for.
    unsolved = (label.cumsum(0) == 0) & lasted
    lowest = _lowest_threshold(model, clips, starts, unsolved, calibration, max_false_positives)
    surest_success = float(calibration.apply(prob[lasted & label]).nan_to_num(0.0).amax())
    if lowest > surest_success:
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
    """The lowest threshold that real moments allow.

    Below it more than ``share`` of the episodes would count as solved in a real moment that is
    ``unsolved`` (chunks, E).
    """
    rows = frames_after_chunks(clips, starts, model.horizon, len(unsolved))
    real = [model.success_probability(dreams_at(model, clips, row)) for row in rows]
    prob = calibration.apply(torch.stack(real).cpu())
    surest = prob.where(unsolved, 0.0).amax(0).sort(descending=True).values
    allowed = math.floor(share * len(surest))
    return math.nextafter(float(surest[allowed]), 1.0) if allowed < len(surest) else 0.0


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
    highest = torch.where(lasted, prob, 0.0).nan_to_num(0.0).amax(0)
    return {
        "episodes": len(truth),
        "solved": float(truth.float().mean()),
        "imagined": float(hit.float().mean()),
        "f1": f1(hit.numpy(), truth.numpy()),
        "auroc": auroc(highest.numpy(), truth.numpy()),
        "false_terminations": float(hit[~truth].float().mean()) if (~truth).any() else None,
    }


# ---- Doubt. ----


@torch.no_grad()
def disagreement_limit(
    model: WorldModel, clips: Clips, starts: Tensor, seed: int = 0, quantile: float = 0.99
) -> float:
    """How far two samples of a next moment differ in all but 1% of the held-out chunks."""
    generator = torch.Generator().manual_seed(seed)
    dreams, lasted = replay(model, clips, starts)
    found = []
    for number, dream in enumerate(dreams[:-1], start=1):
        rows = torch.minimum(starts + number * model.horizon, clips.end[starts] - 1)
        actions, count = actions_from(model, clips, rows, clips.end[starts])
        noises = [
            torch.randn(dream.latent.shape, generator=generator).to(model.device) for _ in range(2)
        ]
        first, second = (model.imagine(dream, actions, count, sample=noise) for noise in noises)
        found.append(disagreement(first, second)[lasted[number].to(model.device)])
    return float(torch.cat(found).quantile(quantile))


def spread_limit(model: WorldModel, clips: Clips, starts: Tensor, quantile: float = 0.9) -> float:
    """How far the state model's networks differ at most, before success, in 9 of 10 successes."""
    dreams, lasted = replay(model, clips, starts)
    spreads = torch.stack([dream.spread for dream in dreams if dream.spread is not None]).cpu()
    return _peak_before_success(model, clips, starts, spreads, lasted, quantile)


@torch.no_grad()
def fit_action_error_limit(
    model: WorldModel, clips: Clips, starts: Tensor, quantile: float = 0.9
) -> float:
    """Fits the inverse dynamics' limits on held-out moves (``InverseDynamics.fit_limits``).

    Returns:
        The largest action error of a dream before success that 9 of 10 held-out successes stay
        below.
    """
    assert model.inverse is not None and clips.latents is not None
    # The real chunks of all episodes, one episode after the other.
    chunks = range(0, int((clips.end[starts] - starts).max()) - 1, model.horizon)
    rows = torch.stack([starts + first for first in chunks], dim=1).flatten()
    numbers = torch.arange(len(chunks)).repeat(len(starts))
    exists = rows < clips.end[starts].repeat_interleave(len(chunks)) - 1
    rows = rows[exists]
    follows = numbers[exists] > 0
    # What is usual of them.
    actions, count = actions_from(model, clips, rows, clips.end[rows])
    before = clips.latents[rows].to(model.device).float()
    after = clips.latents[rows + count.cpu()].to(model.device).float()
    model.inverse.fit_limits(before, after, actions, count, follows.to(model.device))
    # How far dreams of the same actions are from showing them.
    error, lasted = replay_action_error(model, clips, starts)
    return _peak_before_success(model, clips, starts, error, lasted, quantile)


def _peak_before_success(
    model: WorldModel, clips: Clips, starts: Tensor, values: Tensor, lasted: Tensor, quantile: float
) -> float:
    """A quantile over held-out successes of the largest value (chunks, E) until they are solved.

    Failures do not count, for they end in moments that no policy needs to reach; without a success
    they do.
    """
    solved = solved_after(clips, starts, model.horizon, len(values)) & lasted
    before = (solved.cumsum(0) - solved.int() == 0) & lasted
    peak = torch.where(before, values, 0.0).amax(0)
    successful = solved.any(0) if solved.any() else slice(None)
    return float(peak[successful].quantile(quantile))
