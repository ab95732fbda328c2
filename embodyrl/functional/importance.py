"""Importance weights between the policy that acted and the one that is trained, and what they are worth."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def behaviour_weights(
    log_ratio: Float[Tensor, " b"], cap: float, low: float | None = None
) -> Float[Tensor, " b"]:
    """The weights w = proximal / behaviour of decisions, made safe.

    Without ``low`` they are truncated, min(w, cap) (TIS, arXiv:2110.00641). With it a decision whose
    w lies outside [low, cap] is masked: its weight is 0, and the others keep theirs (IcePop of
    Ring-1T, arXiv:2510.18855).

    Args:
        log_ratio: log w.
        cap: largest w.
        low: smallest w; None truncates.
    """
    # Truncate above, or mask on both sides.
    weight = log_ratio.exp()
    if low is None:
        return weight.clamp(max=cap)
    # torch.where and not a product: 0 * inf would be NaN.
    return torch.where((weight >= low) & (weight <= cap), weight, 0.0)


def effective_share(weight: Float[Tensor, " b"]) -> Float[Tensor, ""]:
    """The effective sample size as a share of the samples, (sum w)^2 / (B sum w^2).

    1 where all weights are equal, m/B where m of B are equal and the others 0. The variance of a
    weighted mean grows as its inverse (Kong 1992), so VCPO scales the learning rate by it
    (arXiv:2602.17616). Without samples, or if all weights are 0, it is 0.
    """
    # The bound is for no samples and for weights that are all 0.
    squares = weight.square().sum() * max(len(weight), 1)
    return weight.sum().square() / squares.clamp_min(1e-30)
