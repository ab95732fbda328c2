"""What the parts of a world model are trained to do.

codec_loss      frames -> latents -> the same frames
inverse_loss    two moments -> the actions between them
dynamics_loss   a moment and 1 to H actions -> the moment after them, and whether it is solved
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from embodyrl.world_models.clips import Clips
from embodyrl.world_models.dream import ChunkInputs, Dream
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.nets.backbone import FlowMap
from embodyrl.world_models.nets.codec import FrameCodec, brightness
from embodyrl.world_models.state_losses import full_state

OFF_BACKGROUND = 0.08
"""Brightness by which a pixel must differ from the background to be part of the foreground."""
BACKGROUND_WEIGHT = 9.0
"""Average weight of a foreground pixel; a background pixel has 1 (``colour_weights``)."""
BINS = 8
"""Parts of each colour's range."""
EVEN = 0.9
"""How far colour frequencies are pulled towards equal ones before they are inverted."""
MASK_WEIGHT = 0.02
"""Weight of the foreground mask beside the reconstruction error."""
CHANGED = 0.5
"""Change over the chunk from which on a latent cell counts as changed."""
CHANGE_WEIGHT = 5.0
"""Weight of a changed cell; an unchanged one has 1."""


# ---- The codec. ----


def codec_loss(model: WorldModel, clips: Clips, rows: Tensor, colours: Tensor) -> Tensor:
    """Weighted reconstruction error of B frames, in units of brightness.

    Args:
        model: to be trained.
        clips: the data.
        rows: (B,) frames.
        colours: from ``colour_weights``.
    """
    frames = clips.frames(rows).to(model.device)
    assert isinstance(model.codec, FrameCodec)  # a pretrained one is not trained
    # Autoencode.
    painted, mask_logit = model.codec.paint(model.codec.encode(frames))
    error = painted - brightness(frames)
    # Foreground pixels count more, and those of rare colours most.
    foreground = _foreground(model, frames)
    by_colour = BACKGROUND_WEIGHT * colours.to(model.device)[_colour_bin(frames)]
    weight = torch.where(foreground, by_colour, 1.0)[:, :, None]
    reconstruction = (weight * (error.square() + 0.1 * error.abs())).mean()
    # Where the decoder shows nothing but background, the colours get no gradient. So the mask is
    # also learned by itself.
    mask = F.binary_cross_entropy_with_logits(mask_logit, foreground.float())
    return reconstruction + MASK_WEIGHT * mask


def colour_weights(model: WorldModel, clips: Clips, rows: Tensor) -> Float[Tensor, " colours"]:
    """The weight of a foreground pixel by its colour; 1 on average.

    A block has few pixels where a robot has many, so rare colours count more (class rebalancing,
    arXiv:1603.08511).
    """
    frames = clips.frames(rows[:: max(1, len(rows) // 500)]).to(model.device)
    shown = _colour_bin(frames)[_foreground(model, frames)]
    share = torch.bincount(shown, minlength=BINS**3).double().cpu() / max(1, len(shown))
    weight = 1.0 / ((1.0 - EVEN) * share + EVEN / BINS**3)
    return (weight / (weight * share).sum().clamp_min(1e-9)).float()


def _foreground(model: WorldModel, frames: Tensor) -> Bool[Tensor, "b v h w"]:
    assert isinstance(model.codec, FrameCodec)
    return (brightness(frames) - model.codec.background).abs().amax(2) > OFF_BACKGROUND


def _colour_bin(frames: UInt8[Tensor, "b v h w 3"]) -> Int[Tensor, "b v h w"]:
    red, green, blue = (frames.long() * BINS // 256).unbind(-1)
    return (red * BINS + green) * BINS + blue


# ---- The dynamics and the success head. ----


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
    count_there = count.to(device)
    # Start from real moments; half of them get noise on their context.
    dream, noise = _noisy_start(model, clips, words, rows, before, context_noise, generator)
    # Pushforward: imagine all chunks but the last, so that the model starts from its own mistakes.
    with torch.no_grad():
        for _ in range(unroll - 1):
            actions = clips.chunk(rows, model.horizon).to(device)
            rows = rows + count
            truth = _full_state_if_known(model, clips, rows)
            dream = model.imagine(dream, actions, count_there, noise, full_state=truth)
            noise = torch.zeros_like(noise)
    # The real moments before and after the last chunk.
    current = _latents(clips, rows, device)
    target = _latents(clips, rows + count, device)
    proprio = _proprio(model, clips, rows + count)
    full_state = _full_state_if_known(model, clips, rows + count)
    actions = clips.chunk(rows, model.horizon).to(device)
    inputs = ChunkInputs(dream, actions, count_there, noise, full_state)
    # Predict the last chunk. A stochastic model also learns to denoise, a flow map its shortcuts.
    sampled, goal = _denoising_task(model, inputs, target, generator)
    changes = model.predict_change(inputs, *sampled)
    dream = model.apply_change(dream, *changes, full_state)
    # Latent error, in which cells that really change count more; and proprio error.
    changed = ((target - current).abs().amax(2, keepdim=True) > CHANGED).float()
    weight = 1.0 + (CHANGE_WEIGHT - 1.0) * changed
    picture_loss = (weight * (dream.latent - goal).square()).mean()
    proprio_loss = (dream.proprio - proprio).square().mean()
    # Success of the imagined and of the real moment; no gradient reaches the dynamics.
    latent = torch.cat([dream.latent.detach(), target])
    state = torch.cat([dream.proprio.detach(), proprio])
    logit = model.success(latent, state, dream.words.repeat(2, 1)).float()
    solved = clips.solved[rows + count].float().to(device).repeat(2)
    success_loss = F.binary_cross_entropy_with_logits(logit, solved)
    losses = {"picture": picture_loss, "proprio": proprio_loss, "success": success_loss}
    return picture_loss + proprio_loss + success_loss, losses


def _noisy_start(
    model: WorldModel,
    clips: Clips,
    words: Tensor,
    rows: Tensor,
    before: Tensor,
    context_noise: float,
    generator: torch.Generator,
) -> tuple[Dream, Tensor]:
    """Dreams that start at ``rows``, half of them with a noisy context; (B,) its noise level."""
    device = model.device
    first = clips.start[rows]
    moments = torch.stack([first, torch.maximum(first, rows - before), rows], dim=1)
    context = _latents(clips, moments, device)
    some = torch.rand(len(rows), generator=generator) < 0.5
    noise = context_noise * some * torch.rand(len(rows), generator=generator)
    gaussian = torch.randn(context.shape, generator=generator)
    context = context + (noise.view(-1, *[1] * 5) * gaussian).to(device)
    dream = Dream(
        context,
        _proprio(model, clips, rows),
        words[clips.sentence[rows]].to(device),
        _full_state_if_known(model, clips, rows),
    )
    return dream, noise.to(device)


def _denoising_task(
    model: WorldModel, inputs: ChunkInputs, target: Tensor, generator: torch.Generator
) -> tuple[tuple[Tensor, ...], Tensor]:
    """What the backbone is given besides its inputs, and the latents that it should reach.

    A deterministic model is given nothing and should reach ``target``. A stochastic one gets noisy
    changes and their times. A flow map also learns shortcuts, whose goals differ from ``target``.
    """
    if not model.stochastic:
        return (), target
    change = target - inputs.dream.latent
    sample, time = noisy_change(change, generator)
    if not isinstance(model.backbone, FlowMap):
        return (sample, time), target
    *sampled, goal = model.backbone.shortcut_targets(
        *inputs.of_backbone, change, sample, time, generator
    )
    return tuple(sampled), inputs.dream.latent + goal


def noisy_change(change: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The flow-matching input for a change of latents.

    Half of the rows get a random time and the point at that time on the line from ``change`` (time
    0) to noise (time 1). The others learn the mean: they get zeros, and time 0.
    """
    draws = torch.rand(2, len(change), generator=generator).to(change.device)
    time = draws[0].clamp_min(1e-3) * (draws[1] < 0.5)
    noise = torch.randn(change.shape, generator=generator).to(change.device)
    t = time.view(-1, *[1] * (change.ndim - 1))
    return ((1 - t) * change + t * noise) * (t > 0), time


# ---- The inverse dynamics. ----


def inverse_loss(model: WorldModel, clips: Clips, rows: Tensor, count: Tensor) -> Tensor:
    """The loss of the inverse dynamics, on B real chunks of ``count`` actions from ``rows`` on."""
    assert model.inverse is not None
    device = model.device
    before = _latents(clips, rows, device)
    after = _latents(clips, rows + count, device)
    actions = clips.chunk(rows, model.horizon).to(device)
    return model.inverse.loss(before, after, actions, count.to(device))


# ---- Minibatches. ----


def sample_clips(
    clips: Clips, allowed: Tensor, size: int, horizon: int, unroll: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Random clips of ``unroll`` chunks that stay within their episode.

    Seven of ten chunks have all ``horizon`` actions, the others a random number of them.

    Args:
        clips: the data.
        allowed: frames that a clip may start at.
        size: B.
        horizon: H.
        unroll: chunks of a clip.
        generator: of the choice.

    Returns:
        (B,) first frames, (B,) actions of every chunk, and (B,) how many frames back the previous
        frame lies.
    """

    def random_counts(n: int) -> Tensor:
        some = torch.randint(1, horizon + 1, (n,), generator=generator)
        return torch.where(torch.rand(n, generator=generator) < 0.7, horizon, some)

    rows = torch.empty(0, dtype=torch.long)
    counts = torch.empty(0, dtype=torch.long)
    while len(rows) < size:
        new = allowed[torch.randint(len(allowed), (4 * size,), generator=generator)]
        count = random_counts(len(new))
        fits = new + count * unroll < clips.end[new]
        rows = torch.cat([rows, new[fits]])
        counts = torch.cat([counts, count[fits]])
    return rows[:size], counts[:size], random_counts(size)


def _latents(clips: Clips, index: Tensor, device: torch.device) -> Tensor:
    assert clips.latents is not None
    return clips.latents[index].to(device).float()


def _full_state_if_known(model: WorldModel, clips: Clips, rows: Tensor) -> Tensor | None:
    """The real full state: in training the frames follow it, not the state model's prediction."""
    return None if model.state is None else full_state(clips, rows, model.device)


def _proprio(model: WorldModel, clips: Clips, rows: Tensor) -> Tensor:
    return (clips.proprio[rows].to(model.device) - model.proprio_mean) / model.proprio_std
