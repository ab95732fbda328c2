"""What the state model is trained to do.

state_loss      a full state and one action -> the next full state; is the task solved, and will it be?
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from embodyrl.world_models.clips import Clips
from embodyrl.world_models.model import WorldModel

PROSPECT_NOISE = 0.05
"""Noise on the states that prospects are learned from, in standard deviations of the data."""


def state_loss(
    model: WorldModel,
    clips: Clips,
    words: Tensor,
    rows: Tensor,
    unroll: int,
    noise: float,
    judge_noise: float,
    generator: torch.Generator,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the state model, on B frames that have a next one.

    The state model starts from full states that it predicted itself, over up to ``unroll`` actions
    (pushforward, arXiv:2202.03376), with added noise. It is to reach the true next state from
    there, so that errors do not grow from action to action (arXiv:2002.09405).

    Args:
        model: to be trained.
        clips: with the simulator's state.
        words: (sentences, E).
        rows: (B,) frames.
        unroll: the most actions of the pushforward.
        noise: the most noise on the states it starts from, in standard deviations of the data.
        judge_noise: noise on the states that success is learned from, in the same unit. It keeps
            regions between the data from counting as solved.
        generator: of all that is random.
    """
    assert model.state is not None
    device = model.device
    current = full_state(clips, rows, device)
    after = full_state(clips, rows + 1, device)
    # Start from predicted states, with noise.
    start = _pushforward_state(model, clips, rows, unroll, generator) if unroll else current
    if noise:
        size = noise * torch.rand((len(current), 1), generator=generator)
        gaussian = torch.randn(current.shape, generator=generator)
        start = start + (size * gaussian).to(device) * model.state.std
    # One action to the true next state.
    dynamics = model.state.loss(start, current, clips.actions[rows].to(device), after)
    # Success, learned from noisy states; every judge has a loss of its own.
    if judge_noise:
        gaussian = torch.randn(after.shape, generator=generator).to(device)
        after = after + judge_noise * gaussian * model.state.std
    logits = model.state.verdicts(after, words[clips.sentence[rows]].to(device))
    solved = clips.solved[rows + 1].float().to(device).expand_as(logits)
    success = len(logits) * F.binary_cross_entropy_with_logits(logits, solved)
    losses = {"state": dynamics, "state_success": success}
    if len(model.state.prospects):
        losses["prospect"] = _prospect_loss(model, clips, words, rows + 1, generator)
    return torch.stack(list(losses.values())).sum(), losses


def _prospect_loss(
    model: WorldModel, clips: Clips, words: Tensor, rows: Tensor, generator: torch.Generator
) -> Tensor:
    """The loss of: from here the episode was solved. It is learned from noisy states, too."""
    assert model.state is not None and clips.succeeded is not None
    device = model.device
    state = full_state(clips, rows, device)
    gaussian = torch.randn(state.shape, generator=generator).to(device)
    state = state + PROSPECT_NOISE * gaussian * model.state.std
    logits = model.state.prospect_logits(state, words[clips.sentence[rows]].to(device))
    succeeded = clips.succeeded[rows].float().to(device).expand_as(logits)
    return len(logits) * F.binary_cross_entropy_with_logits(logits, succeeded)


def _pushforward_state(
    model: WorldModel, clips: Clips, rows: Tensor, unroll: int, generator: torch.Generator
) -> Tensor:
    """The states at ``rows`` as predicted from up to ``unroll`` actions before."""
    assert model.state is not None
    back = int(torch.randint(unroll + 1, (1,), generator=generator))
    if not back:
        return full_state(clips, rows, model.device)
    first = torch.maximum(clips.start[rows], rows - back)
    actions = clips.chunk(first, back).to(model.device)
    count = (rows - first).to(model.device)
    with torch.no_grad():
        predicted, _ = model.state.roll(full_state(clips, first, model.device), actions, count)
    return predicted


def full_state(clips: Clips, rows: Tensor, device: torch.device) -> Tensor:
    """(B, P + S) of frames whose state is known."""
    known = clips.full_state(rows)
    assert known is not None
    return known.to(device)
