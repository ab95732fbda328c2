"""What recorded episodes say of a policy that did not play them: fitted Q evaluation.

    outcome   Q(s, a) -> whether the episode was solved           of who played
    evaluate  Q(s, a) -> V(s') = mean over a' of the policy of Q(s', a')     round by round
    estimate  mean over the episodes of V at their first observation

The target acts with the policy's own next chunk (fitted Q evaluation, arXiv:1903.08738). The first
round evaluates who played, and each further one lets the policy act for one chunk more before they
go on. Rewards are 1 for success and are not discounted, and critics see how much of the time is
over. So values are probabilities: critics learn them by cross-entropy, and cannot diverge.

Each critic learns from its own bootstrap sample of whole episodes, so the critics' disagreement is
the interval (arXiv:2102.03607). All policies have the same samples, first weights and batches, so
two of them are compared critic by critic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from embodyrl.algorithms.optim import GuardedAdam
from embodyrl.functional.fitted_q import (
    bootstrap_weights,
    success_target,
    weighted_cross_entropy,
)
from embodyrl.judge.logged import AT_ONCE, Logged
from embodyrl.policies.critics import Critics

CRITICS = 10
"""Bootstrap samples, with a critic each."""
WIDTH = 128
"""Of their hidden layers."""
PROPOSALS = 4
"""Chunks of the policy at each observation, whose mean is its value."""
BATCH = 256
"""Chunks of a gradient step."""
FIRST_STEPS = 300
"""Gradient steps of the first round, in which critics learn outcomes."""
ROUNDS = 30
"""Further rounds at most, each with new targets; no more than an episode has chunks."""
STEPS = 40
"""Gradient steps of each."""
LR = 1e-3


@torch.no_grad()
def would_do(
    policy: Any, logged: Logged, device: torch.device | str = "cpu", seed: int = 0
) -> Float[Tensor, "b m h a"]:
    """What a policy would do at each recorded observation: several draws of its noise-free chunk."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for obs in logged.observations():
        seen = obs.to(device)
        draws = [
            policy.sample(seen, generator=generator, mode="eval").actions for _ in range(PROPOSALS)
        ]
        found.append(torch.stack(draws, dim=1).float().to(logged.features.device))
    return torch.cat(found)


def fitted_q(
    logged: Logged, proposals: Float[Tensor, "b m h a"], seed: int = 0, rounds: int | None = None
) -> np.ndarray:
    """The success of a policy as each critic estimates it.

    Args:
        logged: B chunks of E episodes.
        proposals: what the policy would do at each of them (``would_do``).
        seed: of bootstrap samples, weights and batches; the same for policies that are compared.
        rounds: chunks for which the policy acts; 0 evaluates who played, and None is as many as the
            longest episode has, or ``ROUNDS``.

    Returns:
        (``CRITICS``,) the mean value of the first observations, of each bootstrap sample.
    """
    device = logged.features.device
    generator = torch.Generator().manual_seed(seed)
    weight = bootstrap_weights(len(logged.success), CRITICS, np.random.default_rng(seed)).to(device)
    size = logged.choice[0].numel()
    critics = Critics(logged.features.shape[1], size, CRITICS, WIDTH, 2, "layer").to(device)
    critics.forget(generator)
    optimizer = GuardedAdam(critics.parameters(), LR, 10.0, "critics")
    # Who played: how the episode of each chunk ended.
    outcome = logged.success[logged.episode].float().expand(CRITICS, -1)
    _fit(critics, optimizer, logged, outcome, weight, FIRST_STEPS, generator)
    # The policy: in each round it acts for one chunk more.
    longest = int(torch.bincount(logged.episode).max())
    for _ in range(min(ROUNDS, longest) if rounds is None else rounds):
        value = values_of(critics, logged.features, proposals)
        target = success_target(value, logged.following, logged.solved)
        _fit(critics, optimizer, logged, target, weight, STEPS, generator)
    # How the episodes of each sample would begin.
    first = logged.first
    value = values_of(critics, logged.features[first], proposals[first])
    return ((value * weight).sum(1) / weight.sum(1)).double().cpu().numpy()


@torch.no_grad()
def values_of(
    critics: Critics, features: Float[Tensor, "b f"], proposals: Float[Tensor, "b m h a"]
) -> Float[Tensor, "e b"]:
    """The probability of success by each critic, a mean over what the policy would do."""
    found = []
    for seen, chunks in zip(features.split(AT_ONCE), proposals.split(AT_ONCE), strict=True):
        m = chunks.shape[1]
        logit = critics(seen.repeat_interleave(m, 0), chunks.flatten(0, 1))
        found.append(logit.sigmoid().unflatten(1, (-1, m)).mean(2))
    return torch.cat(found, dim=1)


def _fit(
    critics: Critics,
    optimizer: GuardedAdam,
    logged: Logged,
    target: Float[Tensor, "e b"],
    weight: Float[Tensor, "e n"],
    steps: int,
    generator: torch.Generator,
) -> None:
    """Gradient steps towards targets; each critic weighs episodes by its own sample."""
    for _ in range(steps):
        rows = torch.randint(len(logged.episode), (BATCH,), generator=generator)
        rows = rows.to(target.device)
        logit = critics(logged.features[rows], logged.choice[rows])
        loss = weighted_cross_entropy(logit, target[:, rows], weight[:, logged.episode[rows]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(loss)
