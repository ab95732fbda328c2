"""What a world model is trained to do: reconstruct a frame, and say what a chunk of actions makes of one.

codec_loss      frames -> latents -> frames
state_loss      a body and one action -> the body after it
inverse_loss    two moments -> the actions between them
dynamics_loss   a moment and 1 to H actions -> the moment after them, and whether the task is solved then
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from embodyrl.world_models.clips import Clips
from embodyrl.world_models.dream import Dream
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.nets.backbone import FlowMap
from embodyrl.world_models.nets.codec import brightness

OFF_BACKGROUND = 0.08
BACKGROUND_WEIGHT = 9.0
"""A pixel that differs so much from the background counts so much more, on average: see ``colour_weights``."""
BINS = 8
EVEN = 0.9
"""Parts of each colour's range, and how much of a colour's frequency is taken to be that of all others."""
MASK_WEIGHT = 0.02
"""Of telling where the background is hidden, beside the pictures themselves."""
CHANGED = 0.5
CHANGE_WEIGHT = 5.0
"""A latent cell that changes so much over the chunk counts so much more."""


def codec_loss(model: WorldModel, clips: Clips, rows: Tensor, colours: Tensor) -> Tensor:
    """Weighted error of the reconstruction of B frames, in units of brightness; ``colours`` from ``colour_weights``."""
    frames = clips.frames(rows).to(model.device)
    target = brightness(frames)
    off = _off_background(model, frames)
    painted, hides = model.codec.paint(model.codec.encode(frames))
    error = painted - target
    weight = torch.where(off, BACKGROUND_WEIGHT * colours.to(model.device)[_colour(frames)], 1.0)
    # Where all of the background is shown nothing else has a gradient, so what is hidden is also
    # learned by itself.
    masked = F.binary_cross_entropy_with_logits(hides, off.float())
    return (weight[:, :, None] * (error.square() + 0.1 * error.abs())).mean() + MASK_WEIGHT * masked


def colour_weights(model: WorldModel, clips: Clips, rows: Tensor) -> Float[Tensor, " colours"]:
    """How much a pixel that is not background counts by its colour; 1 on average.

    A block is few pixels where a robot is many, so rare colours count more (class rebalancing,
    arXiv:1603.08511).
    """
    frames = clips.frames(rows[:: max(1, len(rows) // 500)]).to(model.device)
    shown = _colour(frames)[_off_background(model, frames)]
    share = torch.bincount(shown, minlength=BINS**3).double().cpu() / max(1, len(shown))
    weight = 1.0 / ((1.0 - EVEN) * share + EVEN / BINS**3)
    return (weight / (weight * share).sum().clamp_min(1e-9)).float()


def _off_background(model: WorldModel, frames: Tensor) -> Bool[Tensor, "b v h w"]:
    return (brightness(frames) - model.codec.background).abs().amax(2) > OFF_BACKGROUND


def _colour(frames: UInt8[Tensor, "b v h w 3"]) -> Int[Tensor, "b v h w"]:
    red, green, blue = (frames.long() * BINS // 256).unbind(-1)
    return (red * BINS + green) * BINS + blue


def dynamics_loss(
    model: WorldModel,
    clips: Clips,
    words: Tensor,
    rows: Tensor,
    count: Tensor,
    before: Tensor,
    unroll: int,
    context_noise: float,
    generator: torch.Generator,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the last of ``unroll`` chunks that start at ``rows``.

    Args:
        model: to be trained.
        clips: with latents.
        words: (sentences, E).
        rows: (B,) frames with at least ``unroll * count`` frames of their episode after them.
        count: (B,) actions of every chunk.
        before: (B,) how many frames back the previous one lies.
        unroll: chunks; all but the last are imagined without gradient.
        context_noise: the most noise on the context, of which half of the clips have some.
        generator: of that noise.

    Returns:
        The loss, and its parts: error of the latent, of the proprio, and of the success head.
    """
    device = model.device
    first = clips.start[rows]
    index = torch.stack([first, torch.maximum(first, rows - before), rows], dim=1)
    context = _latents(clips, index, device)
    some = torch.rand(len(rows), generator=generator) < 0.5
    noise = context_noise * some * torch.rand(len(rows), generator=generator)
    context = context + (
        noise.view(-1, *[1] * 5) * torch.randn(context.shape, generator=generator)
    ).to(device)
    said = words[clips.sentence[rows]].to(device)
    dream = Dream(context, _proprio(model, clips, rows), said, _true(model, clips, rows))
    level = noise.to(device)
    sent = count.to(device)
    with torch.no_grad():
        for _ in range(unroll - 1):
            dream = model.imagine(
                dream,
                clips.chunk(rows, model.horizon).to(device),
                sent,
                level,
                body=_true(model, clips, rows + count),
            )
            rows = rows + count
            level = torch.zeros_like(level)
    current = _latents(clips, rows, device)
    target = _latents(clips, rows + count, device)
    proprio = _proprio(model, clips, rows + count)
    actions = clips.chunk(rows, model.horizon).to(device)
    body = _true(model, clips, rows + count)
    sampled = noisy_change(target - dream.latent, generator) if model.stochastic else ()
    wanted = target
    if sampled and isinstance(model.backbone, FlowMap):
        given = (dream.context, dream.proprio, actions, sent, level, target - dream.latent)
        *sampled, change = model.backbone.shortcuts(*given, *sampled, generator)
        wanted = dream.latent + change
    dream = model.after(dream, *model.change(dream, actions, sent, level, body, *sampled), body)
    changed = ((target - current).abs().amax(2, keepdim=True) > CHANGED).float()
    picture = ((1.0 + (CHANGE_WEIGHT - 1.0) * changed) * (dream.latent - wanted).square()).mean()
    moved = (dream.proprio - proprio).square().mean()
    # The head sees what was imagined and what was real, and leaves the dynamics alone.
    latent = torch.cat([dream.latent.detach(), target])
    state = torch.cat([dream.proprio.detach(), proprio])
    logit = model.success(latent, state, dream.words.repeat(2, 1)).float()
    solved = clips.solved[rows + count].float().to(device).repeat(2)
    judged = F.binary_cross_entropy_with_logits(logit, solved)
    return picture + moved + judged, {"picture": picture, "proprio": moved, "success": judged}


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

    It starts from bodies to which it has come by itself in up to ``unroll`` actions (pushforward,
    arXiv:2202.03376), and which are off by up to ``noise`` of the data's standard deviations
    besides. From there it is to come to the true body, so that errors do not grow from action to
    action (arXiv:2002.09405). What is solved is learned from bodies that are off by ``judge_noise``
    of them, so that no corner between the data counts as solved.
    """
    assert model.state is not None
    device = model.device
    body = _body(clips, rows, device)
    after = _body(clips, rows + 1, device)
    seen = body
    if unroll and (back := int(torch.randint(unroll + 1, (1,), generator=generator))):
        first = torch.maximum(clips.start[rows], rows - back)
        actions = clips.chunk(first, back).to(device)
        count = (rows - first).to(device)
        with torch.no_grad():
            seen, _ = model.state.roll(_body(clips, first, device), actions, count)
    if noise:
        size = noise * torch.rand((len(body), 1), generator=generator)
        seen = (
            seen
            + (size * torch.randn(body.shape, generator=generator)).to(device) * model.state.std
        )
    moved = model.state.loss(seen, body, clips.actions[rows].to(device), after)
    said = words[clips.sentence[rows]].to(device)
    if judge_noise:
        after = (
            after
            + judge_noise
            * torch.randn(after.shape, generator=generator).to(device)
            * model.state.std
        )
    logits = model.state.verdicts(after, said)
    solved = clips.solved[rows + 1].float().to(device).expand_as(logits)
    judged = len(logits) * F.binary_cross_entropy_with_logits(
        logits, solved
    )  # each judge for itself
    return moved + judged, {"state": moved, "state_success": judged}


def inverse_loss(model: WorldModel, clips: Clips, rows: Tensor, count: Tensor) -> Tensor:
    """The loss of the inverse dynamics, on B real chunks of ``count`` actions that start at ``rows``."""
    assert model.inverse is not None
    device = model.device
    pair = _latents(clips, rows, device), _latents(clips, rows + count, device)
    return model.inverse.loss(*pair, clips.chunk(rows, model.horizon).to(device), count.to(device))


def noisy_change(change: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """For half of the rows a point on the way from noise to ``change`` and its time; zeros where the mean is learnt."""
    draws = torch.rand(2, len(change), generator=generator).to(change.device)
    time = draws[0].clamp_min(1e-3) * (draws[1] < 0.5)
    noise = torch.randn(change.shape, generator=generator).to(change.device)
    t = time.view(-1, *[1] * (change.ndim - 1))
    return ((1 - t) * change + t * noise) * (t > 0), time


def draw_clips(
    clips: Clips, allowed: Tensor, size: int, horizon: int, unroll: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, counts and distances back of ``size`` random clips from ``allowed`` frames; most chunks are whole ones."""

    def counts(n: int) -> Tensor:
        some = torch.randint(1, horizon + 1, (n,), generator=generator)
        return torch.where(torch.rand(n, generator=generator) < 0.7, horizon, some)

    rows = counted = torch.empty(0, dtype=torch.long)
    while len(rows) < size:
        new = allowed[torch.randint(len(allowed), (4 * size,), generator=generator)]
        count = counts(len(new))
        fits = new + count * unroll < clips.end[new]
        rows = torch.cat([rows, new[fits]])
        counted = torch.cat([counted, count[fits]])
    return rows[:size], counted[:size], counts(size)


def _latents(clips: Clips, index: Tensor, device: torch.device) -> Tensor:
    assert clips.latents is not None
    return clips.latents[index].to(device).float()


def _body(clips: Clips, rows: Tensor, device: torch.device) -> Tensor:
    body = clips.body(rows)
    assert body is not None
    return body.to(device)


def _true(model: WorldModel, clips: Clips, rows: Tensor) -> Tensor | None:
    """The real body: in training the pictures follow that."""
    return None if model.state is None else _body(clips, rows, model.device)


def _proprio(model: WorldModel, clips: Clips, rows: Tensor) -> Tensor:
    return (clips.proprio[rows].to(model.device) - model.proprio_mean) / model.proprio_std
