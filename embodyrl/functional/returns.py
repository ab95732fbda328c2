"""Returns and advantages over action chunks: pure functions of tensors.

One decision is one chunk of H actions. T chunks of N envs are (T, N); an env that ended inside a
chunk executed only its first h <= H actions, so a chunk is worth sum_i gamma^i r_i and what comes
after it is discounted by gamma^h.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embodyrl.errors import UserError, did_you_mean

BASELINES = ("mean", "median", "leave_one_out")


def chunk_rewards(
    reward: Float[Tensor, "*b h"], valid: Bool[Tensor, "*b h"], gamma: float
) -> Float[Tensor, "*b"]:
    """sum_i gamma^i r_i over the valid actions of each chunk."""
    weight = gamma ** torch.arange(reward.shape[-1], device=reward.device, dtype=reward.dtype)
    return torch.where(valid, reward * weight, 0.0).sum(-1)


def chunk_td_target(
    reward: Float[Tensor, "*b h"],
    valid: Bool[Tensor, "*b h"],
    next_value: Float[Tensor, "*b"],
    terminated: Bool[Tensor, "*b"],
    gamma: float,
) -> Float[Tensor, "*b"]:
    """sum_i gamma^i r_i + gamma^h V(after the chunk), without the last term where the task itself ended."""
    discount = gamma ** valid.sum(-1).to(reward.dtype)
    return chunk_rewards(reward, valid, gamma) + discount * torch.where(terminated, 0.0, next_value)


def gae(
    reward: Float[Tensor, "t n"],
    value: Float[Tensor, "t n"],
    next_value: Float[Tensor, "t n"],
    discount: Float[Tensor, "t n"],
    terminated: Bool[Tensor, "t n"],
    done: Bool[Tensor, "t n"],
    lam: float,
) -> tuple[Float[Tensor, "t n"], Float[Tensor, "t n"]]:
    """Generalised advantage estimation (arXiv:1506.02438) with one lambda per chunk.

    Args:
        reward: of each chunk, from ``chunk_rewards``.
        value: of the observation before the chunk.
        next_value: of the observation after it, before any reset; where the episode was cut
            (truncated, or the rollout ends) it is what the return is bootstrapped from. Ignored
            where terminated.
        discount: gamma^h.
        terminated: the task itself ended.
        done: terminated or truncated; nothing flows back over it.
        lam: 0 gives the TD error, 1 the discounted return minus the value.

    Returns:
        Advantage and return (= advantage + value). A chunk without a valid action (observation
        unchanged, reward 0, h = 0) that ends the episode gets advantage 0.
    """
    advantage = reward + discount * torch.where(terminated, 0.0, next_value) - value
    decay = torch.where(done, 0.0, lam * discount)
    for t in reversed(range(len(advantage) - 1)):
        advantage[t].addcmul_(decay[t], advantage[t + 1])
    return advantage, advantage + value


def group_advantages(
    returns: Float[Tensor, "g s"], baseline: str = "mean", normalize: bool = True, eps: float = 1e-6
) -> Float[Tensor, "g s"]:
    """Advantages within groups of rollouts from the same initial state and instruction, without a critic.

    Args:
        returns: G groups of S rollouts.
        baseline: ``"mean"`` (GRPO, arXiv:2402.03300), ``"median"`` (MC-GRPO), or
            ``"leave_one_out"``, the mean of the others (RLOO, arXiv:2402.14740).
        normalize: divide by the group's standard deviation (of the sample, S - 1).
        eps: added to it.

    Returns:
        All zero for a group of equal returns, and for groups of one.

    Raises:
        UserError: unknown baseline.
    """
    size = returns.shape[1]
    if baseline not in BASELINES:
        raise UserError(f"There is no baseline {baseline!r}. {did_you_mean(baseline, BASELINES)}")
    if size < 2:
        return torch.zeros_like(returns)
    # Equal returns become exact zeros here; the rounding of their mean must not become an
    # advantage.
    shifted = returns - returns[:, :1]
    std, mean = torch.std_mean(shifted, dim=1, keepdim=True)
    if baseline == "median":
        advantage = shifted - shifted.quantile(
            0.5, dim=1, keepdim=True
        )  # between the two middle ones if S is even
    else:
        advantage = shifted - mean
    if baseline == "leave_one_out":
        advantage = advantage * (size / (size - 1))
    return advantage / (std + eps) if normalize else advantage


def combined_group_advantages(
    rewards: Float[Tensor, "r g s"], weights: Float[Tensor, " r"], baseline: str = "mean"
) -> Float[Tensor, "g s"]:
    """Advantages of several rewards, each normalised within its group on its own (GDPO, arXiv:2601.05242).

    Normalising the weighted sum instead maps different mixtures of rewards to the same advantage,
    and the reward with the widest spread drowns the others.

    Args:
        rewards: R rewards of G groups of S rollouts.
        weights: of the R normalised advantages.
        baseline: see ``group_advantages``.

    Returns:
        Their weighted sum, scaled to standard deviation 1 over the whole batch.
    """
    parts = torch.stack([group_advantages(reward, baseline) for reward in rewards])
    total = (weights[:, None, None] * parts).sum(0)
    return masked_whiten(total, torch.ones_like(total, dtype=torch.bool))


def equal_episode_weights(episode: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Weights of mean 1 that give every episode (B chunks, each with its episode's number) the same total."""
    _, inverse, count = episode.unique(return_inverse=True, return_counts=True)
    return len(episode) / (len(count) * count[inverse].float())


def masked_whiten(x: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Shifts and scales x to mean 0 and standard deviation 1 over the entries where ``mask``; 0 elsewhere.

    Fewer than two entries, or equal ones, all become 0.
    """
    count = mask.sum().clamp_min(1)
    centred = torch.where(mask, x - torch.where(mask, x, 0.0).sum() / count, 0.0)
    std = (centred.square().sum() / count).sqrt()
    # Equal entries leave nothing but the rounding of their mean.
    spread = torch.where(mask, x, -torch.inf).amax() > torch.where(mask, x, torch.inf).amin()
    return torch.where(spread, centred / (std + eps), 0.0)
