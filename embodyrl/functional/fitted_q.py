"""Fitted Q evaluation: the maths of one step, and the interval that a bootstrap gives.

Success is a reward of 1 at the end of an episode, and nothing is discounted. So a value is a
probability of success, and the loss is the cross-entropy.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embodyrl.functional.intervals import t_quantile


def success_target(
    value: Float[Tensor, "e b"], following: Int[Tensor, " b"], solved: Bool[Tensor, " b"]
) -> Float[Tensor, "e b"]:
    """The target of each chunk: the value of what is seen after it, or how the episode ended.

    Args:
        value: V(s) of the policy at each chunk's observation, by each critic.
        following: the chunk that follows each in its episode; -1 where it is the last one.
        solved: whether the task was solved in the chunk.
    """
    last = following < 0
    return torch.where(last, solved.to(value.dtype), value[:, following.clamp_min(0)])


def weighted_cross_entropy(
    logit: Float[Tensor, "e b"], target: Float[Tensor, "e b"], weight: Float[Tensor, "e b"]
) -> Tensor:
    """The sum over critics of the mean cross-entropy, each with its own weights of the chunks."""
    each = F.binary_cross_entropy_with_logits(logit, target, reduction="none")
    return ((each * weight).sum(1) / weight.sum(1).clamp_min(1e-6)).sum()


def bootstrap_weights(episodes: int, count: int, rng: np.random.Generator) -> Float[Tensor, "e n"]:
    """How often each episode is in each of ``count`` bootstrap samples of whole episodes."""
    draws = rng.multinomial(episodes, np.full(episodes, 1 / episodes), size=count)
    return torch.from_numpy(draws).float()


def bootstrap_interval(
    replicates: np.ndarray, confidence: float = 0.95
) -> tuple[float, float, float]:
    """The mean of a few bootstrap replicates (E,), and the interval from their standard deviation.

    Of so few, percentiles would be the extremes. The deviation of bootstrap replicates is the
    standard error itself; Student's t takes into account that it is estimated.
    """
    count = len(replicates)
    half = t_quantile(count - 1, confidence) * float(np.std(replicates, ddof=1))
    mean = math.fsum(replicates) / count
    return mean, mean - half, mean + half
