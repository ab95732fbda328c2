"""Losses: pure functions of tensors. Every one returns a scalar, and means are over the entries where ``mask``."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


def masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of x where ``mask`` (broadcast to x); 0 when nothing is left. Masked entries may hold NaN."""
    if mask is None:
        return x.mean()
    mask = mask.to(torch.bool).expand_as(x)
    return torch.where(mask, x, 0.0).sum() / mask.sum().clamp_min(1)


def ppo_policy_loss(
    logprob: Float[Tensor, " b"],
    old_logprob: Float[Tensor, " b"],
    advantage: Float[Tensor, " b"],
    mask: Bool[Tensor, " b"],
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    weight: Float[Tensor, " b"] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate of PPO (arXiv:1707.06347); with group advantages it is GRPO's objective.

    Args:
        logprob: of the whole decision under the current parameters: summed over the trained steps
            of a chunk.
        old_logprob: the same under the parameters that sampled it, or under a proximal policy
            (decoupled PPO).
        advantage: of the decision.
        mask: decisions that count.
        clip_low: a ratio below 1 - clip_low earns a negative advantage nothing more; 1 or more
            means no bound.
        clip_high: a ratio above 1 + clip_high earns a positive advantage nothing more (clip-higher,
            arXiv:2503.14476).
        dual_clip: bounds the loss of a negative advantage at dual_clip |A| (arXiv:1912.09729);
            above 1, or None.
        weight: of each decision in the mean, not differentiated: an importance weight, or a
            trajectory's share.

    Returns:
        The loss and its figures: ``ratio``, ``clip_fraction`` (ratio outside the clip range),
            ``dual_clip_fraction``,
        ``approx_kl`` (ratio - 1 - log-ratio, "k3") and ``log_ratio_max`` (largest magnitude),
        without gradients.
    """
    log_ratio = torch.where(mask, logprob - old_logprob, 0.0)
    low = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    high = math.log1p(clip_high)
    top = math.log(dual_clip) if dual_clip else math.inf
    # min(r A, clip(r) A) is A max(r, 1 - low) for A < 0 and A min(r, 1 + high) otherwise. Clamping
    # the logarithm says the same and keeps the gradient finite where the exponential is not.
    effective = torch.where(advantage < 0, log_ratio.clamp(low, top), log_ratio.clamp(max=high))
    gain = advantage * effective.exp()
    loss = masked_mean(-gain if weight is None else -gain * weight, mask)
    with torch.no_grad():
        # A masked decision has a log-ratio of 0 and so adds nothing to any of these sums.
        count = mask.sum().clamp_min(1)
        growth = torch.expm1(log_ratio)
        stats = {
            "ratio": 1.0 + growth.sum() / count,
            "clip_fraction": ((log_ratio < low) | (log_ratio > high)).sum() / count,
            "dual_clip_fraction": ((advantage < 0) & (log_ratio > top)).sum() / count,
            "approx_kl": (growth - log_ratio).sum() / count,
            "log_ratio_max": log_ratio.abs().max()
            if log_ratio.numel()
            else log_ratio.new_zeros(()),
        }
    return loss, stats


def value_loss(
    value: Float[Tensor, " b"],
    old_value: Float[Tensor, " b"],
    ret: Float[Tensor, " b"],
    mask: Bool[Tensor, " b"],
    clip: float | None = None,
    huber: float = 10.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Huber loss of the critic, optionally pessimistic about moving further than ``clip`` from the old value.

    Args:
        value: under the current parameters.
        old_value: at the time of the rollout.
        ret: target.
        mask: entries that count.
        clip: the loss is the larger one of value and of old_value + clamp(value - old_value, -clip,
            clip).
        huber: error beyond which the loss grows linearly, in units of return.

    Returns:
        The loss and its figures: ``value_clip_fraction`` (|value - old_value| > clip, before any
            clipping; 0 without
        clip) and ``value_error`` (mean |value - ret|).
    """
    ret = torch.where(mask, ret, value.detach())  # so that a masked NaN reaches no gradient
    loss = F.huber_loss(value, ret, reduction="none", delta=huber)
    moved = value - old_value
    clipped = torch.zeros_like(value)
    if clip is not None:
        limited = old_value + moved.clamp(-clip, clip)
        loss = torch.maximum(loss, F.huber_loss(limited, ret, reduction="none", delta=huber))
        clipped = (moved.detach().abs() > clip).to(value.dtype)
    stats = {
        "value_clip_fraction": masked_mean(clipped, mask),
        "value_error": masked_mean((value - ret).detach().abs(), mask),
    }
    return masked_mean(loss, mask), stats


def flow_matching_loss(pred: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean squared error of the velocity (arXiv:2210.02747).

    Args:
        pred: (B, H, A).
        target: (B, H, A), noise - action.
        mask: (B, H) actions that are real, or anything that broadcasts to (B, H, A); None means
            all.
    """
    if mask is not None:
        mask = mask[..., None] if mask.ndim == pred.ndim - 1 else mask
        target = torch.where(mask, target, pred.detach())
    return masked_mean((pred - target).square(), mask)


def sac_actor_loss(
    q: Float[Tensor, " b"], logprob: Float[Tensor, " b"], alpha: Tensor | float
) -> Tensor:
    """E[alpha log pi - Q] of reparameterised actions (SAC, arXiv:1812.05905); gradients flow through both terms."""
    return (alpha * logprob - q).mean()


def temperature_loss(
    log_alpha: Float[Tensor, ""], logprob: Float[Tensor, " b"], target_entropy: float
) -> Tensor:
    """Tunes SAC's temperature (arXiv:1812.05905): its derivative by alpha is H - H_target, H the mean of -log pi."""
    return log_alpha.exp() * (-logprob.detach() - target_entropy).mean()


def td_loss(q: Float[Tensor, "e b"], target: Float[Tensor, " b"]) -> Tensor:
    """Squared TD error: the mean over the batch, summed over the E critics."""
    return (q - target).square().mean(1).sum()


def nft_branches(velocity: Tensor, old: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The velocities v+- = v_old +- beta (v - v_old), mirror images about the old policy's (NFT, arXiv:2509.16117)."""
    return old + beta * (velocity - old), old - beta * (velocity - old)


def nft_loss(
    positive: Tensor,
    negative: Tensor,
    target: Tensor,
    optimality: Float[Tensor, " b"],
    weight: Float[Tensor, " b"] | None = None,
) -> Tensor:
    """Mean of r |positive - target|^2 + (1 - r) |negative - target|^2 (NFT, arXiv:2509.16117).

    In velocities its gradient at v = v_old is 2 beta (2r - 1) (v_old - u) per entry, and it is
    least at v_old + ((2r - 1) / beta) (u - v_old): towards what was done if r > 1/2, away from it
    if r < 1/2.

    Args:
        positive: prediction of the branch v+, (B, ...).
        negative: of the branch v-.
        target: what was done.
        optimality: r in [0, 1] of each row.
        weight: of each row in the mean.
    """
    r = optimality.view(-1, *[1] * (target.ndim - 1))
    loss = (
        (r * (positive - target).square() + (1.0 - r) * (negative - target).square())
        .flatten(1)
        .mean(1)
    )
    return (loss if weight is None else loss * weight).mean()
