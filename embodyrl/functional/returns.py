"""Returns and advantages over action chunks: pure functions of tensors.

One decision is one chunk of H actions. T chunks of N envs have the shape (T, N). An env whose
episode ends inside a chunk executes only the first h <= H actions. The reward of a chunk is
sum_i gamma^i r_i over these actions, and everything after the chunk is discounted by gamma^h.
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
    steps = torch.arange(reward.shape[-1], device=reward.device, dtype=reward.dtype)
    return torch.where(valid, reward * gamma**steps, 0.0).sum(-1)


def chunk_td_target(
    reward: Float[Tensor, "*b h"],
    valid: Bool[Tensor, "*b h"],
    next_value: Float[Tensor, "*b"],
    terminated: Bool[Tensor, "*b"],
    gamma: float,
) -> Float[Tensor, "*b"]:
    """The TD target of a chunk: sum_i gamma^i r_i + gamma^h V(after the chunk).

    The second term is 0 where the episode terminated. It stays where the episode was truncated.
    """
    discount = gamma ** valid.sum(-1).to(reward.dtype)  # gamma^h
    return chunk_rewards(reward, valid, gamma) + discount * torch.where(terminated, 0.0, next_value)


def ensemble_value(
    q: Float[Tensor, "e b"], how: str, generator: torch.Generator
) -> Float[Tensor, " b"]:
    """What a TD target takes of E critics.

    Where dreams are cut short, the last state is one that no target was ever computed for, and
    critics make up its value ("edge of reach", RAVL, arXiv:2402.12527). Critics that never learned
    it differ there, so the least of many is low, and where they learned it is the value.

    Args:
        q: of each critic.
        how: ``two``: the smaller of two that are drawn anew at every call (REDQ,
            arXiv:2101.05982). ``mean``: of all. ``least``: of all (SAC-N, arXiv:2110.01548).
        generator: of the draw.
    """
    if how == "mean":
        return q.mean(0)
    if how == "least":
        return q.amin(0)
    pair = torch.randperm(len(q), generator=generator)[:2].to(q.device)
    return q[pair].amin(0)


def discounted_returns(
    reward: Float[Tensor, "t h"], valid: Bool[Tensor, "t h"], gamma: float
) -> Float[Tensor, " t"]:
    """The discounted return from each chunk of an episode on: G_t = r_t + gamma^h G_{t+1}.

    Args:
        reward: of the T chunks of an episode that is over, per action.
        valid: the actions that were executed.
        gamma: discount per action.
    """
    chunk = chunk_rewards(reward, valid, gamma)
    discount = gamma ** valid.sum(-1).to(reward.dtype)
    returns = chunk.clone()
    for t in reversed(range(len(returns) - 1)):
        returns[t] += discount[t] * returns[t + 1]
    return returns


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
        next_value: of the observation after the chunk, before any reset. The return is
            bootstrapped from it where the episode was truncated or the rollout ends. Ignored where
            terminated.
        discount: gamma^h.
        terminated: the task itself ended.
        done: terminated or truncated; no advantage is passed back across it.
        lam: lambda; 0 gives the TD error, 1 the discounted return minus the value.

    Returns:
        Advantage and return (= advantage + value). A chunk without a valid action (observation
        unchanged, reward 0, h = 0) that ends the episode gets advantage 0.
    """
    # The TD errors: delta_t = r_t + gamma^h V_{t+1} - V_t.
    advantage = reward + discount * torch.where(terminated, 0.0, next_value) - value
    # Backwards in time: A_t = delta_t + lambda gamma^h A_{t+1}, and A_t = delta_t where done.
    decay = torch.where(done, 0.0, lam * discount)
    for t in reversed(range(len(advantage) - 1)):
        advantage[t].addcmul_(decay[t], advantage[t + 1])
    return advantage, advantage + value


def group_advantages(
    returns: Float[Tensor, "g s"], baseline: str = "mean", normalize: bool = True, eps: float = 1e-6
) -> Float[Tensor, "g s"]:
    """Advantages of rollouts compared within their group, without a critic.

    A group is S rollouts from the same initial state and instruction.

    Args:
        returns: G groups of S rollouts.
        baseline: what is subtracted: ``"mean"`` (GRPO, arXiv:2402.03300), ``"median"`` (MC-GRPO),
            or ``"leave_one_out"``, the mean of the other rollouts (RLOO, arXiv:2402.14740).
        normalize: divide by the group's standard deviation (of a sample: S - 1).
        eps: added to the standard deviation.

    Returns:
        The advantages; all zero for a group of equal returns, and for groups of one.

    Raises:
        UserError: unknown baseline.
    """
    size = returns.shape[1]
    if baseline not in BASELINES:
        raise UserError(f"There is no baseline {baseline!r}. {did_you_mean(baseline, BASELINES)}")
    if size < 2:
        return torch.zeros_like(returns)
    # Subtracting the first return changes no advantage. It makes equal returns exactly 0, so that
    # the rounding error of their mean is not divided by a tiny standard deviation.
    shifted = returns - returns[:, :1]
    std, mean = torch.std_mean(shifted, dim=1, keepdim=True)
    if baseline == "median":
        # For an even S, quantile gives the middle between the two central returns.
        advantage = shifted - shifted.quantile(0.5, dim=1, keepdim=True)
    else:
        advantage = shifted - mean
    if baseline == "leave_one_out":
        # R_i - mean of the others = S / (S-1) (R_i - mean of all).
        advantage = advantage * (size / (size - 1))
    return advantage / (std + eps) if normalize else advantage


def median_pivots(returns: Float[Tensor, "g s"]) -> Bool[Tensor, "g s"]:
    """The one rollout of each group that is its median, for an odd S; for an even S there is none.

    Its advantage is 0 with the baseline ``"median"``. MC-GRPO draws one rollout more than it learns
    from and leaves this one out: it gives the baseline and no gradient. Of equal returns it is the
    one in the middle of their order.
    """
    size = returns.shape[1]
    pivots = torch.zeros_like(returns, dtype=torch.bool)
    if size % 2:
        middle = returns.argsort(dim=1, stable=True)[:, size // 2 : size // 2 + 1]
        pivots.scatter_(1, middle, True)
    return pivots


def combined_group_advantages(
    rewards: Float[Tensor, "r g s"], weights: Float[Tensor, " r"], baseline: str = "mean"
) -> Float[Tensor, "g s"]:
    """Advantages of several rewards, each normalised on its own (GDPO, arXiv:2601.05242).

    If the weighted sum were normalised instead, different combinations of rewards could get the
    same advantage, and the reward with the largest spread would hide the others.

    Args:
        rewards: R rewards of G groups of S rollouts.
        weights: of the R normalised advantages.
        baseline: see ``group_advantages``.

    Returns:
        Their weighted sum, shifted and scaled to mean 0 and standard deviation 1 over the batch.
    """
    advantages = torch.stack([group_advantages(reward, baseline) for reward in rewards])
    total = (weights[:, None, None] * advantages).sum(0)
    return masked_whiten(total, torch.ones_like(total, dtype=torch.bool))


def equal_episode_weights(episode: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Weights of mean 1 with the same sum for every episode, however long it is.

    Args:
        episode: (B,) the episode number of each chunk.
    """
    # A chunk of an episode with c chunks weighs B / (E c), for E episodes in all.
    _, inverse, count = episode.unique(return_inverse=True, return_counts=True)
    return len(episode) / (len(count) * count[inverse].float())


def masked_whiten(x: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Shifts and scales x to mean 0 and standard deviation 1 over the masked-in entries.

    Entries with a False mask become 0. If there are fewer than two others, or all are equal, all
    become 0.
    """
    count = mask.sum().clamp_min(1)
    mean = torch.where(mask, x, 0.0).sum() / count
    centred = torch.where(mask, x - mean, 0.0)
    std = (centred.square().sum() / count).sqrt()
    # The differences of equal entries from their mean are rounding errors: they become 0 here.
    largest = torch.where(mask, x, -torch.inf).amax()
    smallest = torch.where(mask, x, torch.inf).amin()
    return torch.where(largest > smallest, centred / (std + eps), 0.0)
