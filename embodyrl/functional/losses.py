"""Losses: pure functions of tensors, each of which returns a scalar.

Where a loss takes a ``mask``, the mean is over the entries with a True mask.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


def masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of x over the entries where ``mask`` (broadcast to x) is True; 0 if there are none.

    The other entries may hold NaN.
    """
    if mask is None:
        return x.mean()
    mask = mask.to(torch.bool).expand_as(x)
    # torch.where and not a product: 0 * NaN would be NaN.
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
    """The clipped surrogate loss of PPO (arXiv:1707.06347).

    With group advantages it is GRPO's objective.

    With the ratio r = exp(logprob - old_logprob) and the advantage A, the loss is the mean of
    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). A "decision" is what one ratio belongs to,
    for example one action chunk.

    Args:
        logprob: of the whole decision under the current parameters, summed over the trained
            denoising steps of a chunk.
        old_logprob: the same under the parameters that sampled it, or under a proximal policy
            (decoupled PPO).
        advantage: A of the decision.
        mask: decisions that count.
        clip_low: lower clip: for a negative advantage the loss is flat once the ratio drops below
            1 - clip_low. 1 or more means no lower clip.
        clip_high: upper clip: for a positive advantage the loss is flat once the ratio exceeds
            1 + clip_high (clip-higher, arXiv:2503.14476).
        dual_clip: for a negative advantage the loss is at most dual_clip |A| (arXiv:1912.09729);
            above 1, or None for no bound.
        weight: of each decision in the mean, without gradient: an importance weight, or a
            trajectory's share.

    Returns:
        The loss, and metrics without gradients: ``ratio``, ``clip_fraction`` (ratio outside the
        clip range), ``dual_clip_fraction``, ``approx_kl`` (ratio - 1 - log-ratio, the "k3"
        estimate) and ``log_ratio_max`` (largest magnitude).
    """
    # The bounds as logarithms of the ratio.
    log_ratio = torch.where(mask, logprob - old_logprob, 0.0)
    low = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    high = math.log1p(clip_high)
    dual = math.log(dual_clip) if dual_clip else math.inf
    # min(r A, clip(r) A) equals A max(r, 1 - clip_low) for A < 0, and A min(r, 1 + clip_high)
    # otherwise. Clamping log r does the same, and its gradient is finite even where exp overflows.
    clipped = torch.where(advantage < 0, log_ratio.clamp(low, dual), log_ratio.clamp(max=high))
    gain = advantage * clipped.exp()
    loss = masked_mean(-gain if weight is None else -gain * weight, mask)
    with torch.no_grad():
        # A masked decision has a log-ratio of 0 and so adds nothing to any of these sums.
        count = mask.sum().clamp_min(1)
        ratio_minus_1 = torch.expm1(log_ratio)
        largest = log_ratio.abs().max() if log_ratio.numel() else log_ratio.new_zeros(())
        stats = {
            "ratio": 1.0 + ratio_minus_1.sum() / count,
            "clip_fraction": ((log_ratio < low) | (log_ratio > high)).sum() / count,
            "dual_clip_fraction": ((advantage < 0) & (log_ratio > dual)).sum() / count,
            "approx_kl": (ratio_minus_1 - log_ratio).sum() / count,
            "log_ratio_max": largest,
        }
    return loss, stats


def flow_balance_loss(
    logprob: Float[Tensor, " b"],
    old_logprob: Float[Tensor, " b"],
    reference_logprob: Float[Tensor, " b"],
    log_partition: Float[Tensor, " b"],
    advantage: Float[Tensor, " b"],
    beta: float,
    clip_low: float,
    clip_high: float,
    weight: Float[Tensor, " b"] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The squared error of flow balance (FlowRL, arXiv:2509.15207).

    It is the mean of w (log_partition + logprob - reference_logprob - beta A)^2, and 0 for the policy
    reference exp(beta A) / partition alone.

    Args:
        logprob: of the decision under the current parameters.
        old_logprob: the same under the parameters that sampled it.
        reference_logprob: the same under the reference.
        log_partition: log Z, with gradients.
        advantage: A.
        beta: inverse temperature.
        clip_low: w is the ratio to the old policy, not below 1 - clip_low.
        clip_high: nor above 1 + clip_high. It has no gradient.
        weight: of each decision in the mean, without gradient.

    Returns:
        The loss, and metrics without gradients: ``ratio``, ``clip_fraction``, ``approx_kl`` and
        ``log_ratio_max`` as of ``ppo_policy_loss``; ``balance_error``, the mean absolute error; and
        ``log_partition``.
    """
    log_ratio = (logprob - old_logprob).detach()
    ratio = log_ratio.exp()
    importance = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    error = log_partition + logprob - reference_logprob - beta * advantage
    loss = (importance if weight is None else importance * weight) * error.square()
    figures = {
        "ratio": ratio.mean(),
        "clip_fraction": (importance != ratio).float().mean(),
        "approx_kl": (torch.expm1(log_ratio) - log_ratio).mean(),
        "log_ratio_max": log_ratio.abs().max(),
        "balance_error": error.detach().abs().mean(),
        "log_partition": log_partition.detach().mean(),
    }
    return loss.mean(), figures


def value_loss(
    value: Float[Tensor, " b"],
    old_value: Float[Tensor, " b"],
    ret: Float[Tensor, " b"],
    mask: Bool[Tensor, " b"],
    clip: float | None = None,
    huber: float = 10.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Huber loss of the critic, with PPO's optional value clipping.

    Args:
        value: under the current parameters.
        old_value: at the time of the rollout.
        ret: the return, which is the target.
        mask: entries that count.
        clip: if given, the value is also limited to old_value +- clip, and the larger of the two
            losses counts.
        huber: error above which the loss grows linearly, in units of return.

    Returns:
        The loss, and metrics: ``value_clip_fraction`` (share with |value - old_value| > clip; 0
        without clip) and ``value_error`` (mean |value - ret|).
    """
    # A masked target may be NaN. Replacing it by the value gives an error and a gradient of 0.
    ret = torch.where(mask, ret, value.detach())
    loss = F.huber_loss(value, ret, reduction="none", delta=huber)
    change = value - old_value
    beyond_clip = torch.zeros_like(value)
    if clip is not None:
        clipped_value = old_value + change.clamp(-clip, clip)
        clipped_loss = F.huber_loss(clipped_value, ret, reduction="none", delta=huber)
        loss = torch.maximum(loss, clipped_loss)
        beyond_clip = (change.detach().abs() > clip).to(value.dtype)
    stats = {
        "value_clip_fraction": masked_mean(beyond_clip, mask),
        "value_error": masked_mean((value - ret).detach().abs(), mask),
    }
    return masked_mean(loss, mask), stats


def flow_matching_loss(pred: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean squared error of the velocity (arXiv:2210.02747).

    Args:
        pred: (B, H, A).
        target: (B, H, A), noise - action.
        mask: (B, H) actions that count (not padding), or anything that broadcasts to (B, H, A);
            None means all.
    """
    if mask is not None:
        mask = mask[..., None] if mask.ndim == pred.ndim - 1 else mask
        # Padding may hold NaN, which must not reach the gradient.
        target = torch.where(mask, target, pred.detach())
    return masked_mean((pred - target).square(), mask)


def flow_map_loss(end: Float[Tensor, "b c a"], target: Float[Tensor, "b c a"]) -> Tensor:
    """Mean squared distance of two paths' ends; no gradient goes into ``target``.

    Args:
        end: of the student.
        target: of the teacher, from the same noise.
    """
    return (end - target.detach()).square().mean()


def sac_actor_loss(
    q: Float[Tensor, " b"], logprob: Float[Tensor, " b"], alpha: Tensor | float
) -> Tensor:
    """The actor's loss of SAC, E[alpha log pi - Q] (arXiv:1812.05905).

    Actions are reparameterised, so gradients flow through both terms.
    """
    return (alpha * logprob - q).mean()


def temperature_loss(
    log_alpha: Float[Tensor, ""], logprob: Float[Tensor, " b"], target_entropy: float
) -> Tensor:
    """The loss of SAC's temperature, alpha (H - H_target) with H = E[-log pi] (arXiv:1812.05905).

    It lowers alpha while the entropy is above its target, and raises alpha while it is below.
    """
    return log_alpha.exp() * (-logprob.detach() - target_entropy).mean()


def one_step_loss(
    action: Float[Tensor, "b h a"],
    target: Float[Tensor, "b h a"],
    q: Float[Tensor, " b"],
    alpha: float,
    scale: Tensor | float = 1.0,
) -> Tensor:
    """The loss of FQL's one-step head, E[alpha |action - target|^2 / (H A) - Q / scale].

    It is arXiv:2502.02538.

    Args:
        action: of the head, with gradients.
        target: what the flow makes of the same noise; no gradient goes into it.
        q: the critics' value of ``action``, with gradients.
        alpha: weight of the distance.
        scale: what values are divided by; no gradient goes into it.
    """
    distance = (action - target.detach()).square().mean()
    return alpha * distance - (q / torch.as_tensor(scale).detach()).mean()


def td_loss(q: Float[Tensor, "e b"], target: Float[Tensor, " b"]) -> Tensor:
    """Squared TD error: the mean over the batch, summed over the E critics."""
    return (q - target).square().mean(1).sum()


def nft_branches(velocity: Tensor, old: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The positive and negative branch of NFT, v_old +- beta (v - v_old) (arXiv:2509.16117).

    The two velocities mirror each other at the old policy's velocity.
    """
    return old + beta * (velocity - old), old - beta * (velocity - old)


def nft_loss(
    positive: Tensor,
    negative: Tensor,
    target: Tensor,
    optimality: Float[Tensor, " b"],
    weight: Float[Tensor, " b"] | None = None,
) -> Tensor:
    """Mean of r |positive - target|^2 + (1 - r) |negative - target|^2 (NFT, arXiv:2509.16117).

    Written in velocities, with the target u: the gradient at v = v_old is 2 beta (2r - 1)
    (v_old - u) per entry, and the minimum is at v_old + ((2r - 1) / beta) (u - v_old). So the
    velocity moves towards the action taken if r > 1/2, and away from it if r < 1/2.

    Args:
        positive: prediction of the branch v+, (B, ...).
        negative: of the branch v-.
        target: u of the actions taken.
        optimality: r in [0, 1] of each row.
        weight: of each row in the mean.
    """
    r = optimality.view(-1, *[1] * (target.ndim - 1))  # (B, 1, ...), to broadcast
    positive_error = (positive - target).square()
    negative_error = (negative - target).square()
    loss = (r * positive_error + (1.0 - r) * negative_error).flatten(1).mean(1)
    return (loss if weight is None else loss * weight).mean()
