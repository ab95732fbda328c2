"""FPO: PPO without likelihoods; its ratio is made of flow matching losses.

Flow matching on an action bounds how likely the policy is to take it, so FPO (arXiv:2507.21053)
reads "more likely" off the loss. For M pairs of noise e and time t, drawn when the update starts,

    l_m = |v(x_t, t) - (e - a)|^2 summed over the chunk,   x_t = (1 - t) a + t e
    r_m = exp(l_m(old) - l_m(new))

Any sampler may act, with noise in its steps or without, and K does not matter to training. Clipping
each r_m by itself is FPO++'s (Yi and others 2026, "Flow Policy Gradients for Robot Control"); FPO's
own r is the exponential of the mean. Everything else is PPO's: returns, critic, epochs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from embodyrl.algorithm import MemoryPlan
from embodyrl.algorithms.clipped_actor import ClippedActor
from embodyrl.algorithms.imitation import refuse_shortcut, refuse_thoughts
from embodyrl.algorithms.ppo import PPO, PPOConfig
from embodyrl.errors import refuse_unread
from embodyrl.functional.flow import (
    flow_matching_pair,
    randn,
    sample_training_time,
)
from embodyrl.policy import FlowPolicyProtocol, HasFlow, HasValue, num_executed
from embodyrl.ranges import Count
from embodyrl.types import DenoisingTrace, EnvSpec, Obs, PolicyEval, TensorData


@dataclass(frozen=True)
class FPOConfig(PPOConfig):
    """Settings of FPO: those of ``PPOConfig`` with other defaults, and two more.

    Attributes:
        num_pairs: M, pairs of noise and time at which a chunk's loss is taken.
        per_pair: clip the ratio of each pair (FPO++); otherwise that of their mean (FPO).
    """

    name: str = "fpo"
    num_pairs: Count = 8
    per_pair: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        why = (
            "FPO takes losses for likelihoods: there are no steps, no density of the rollout and "
            "no entropy"
        )
        unread = ("ratio", "behaviour_cap", "rollout_precision", "entropy_coef")
        refuse_unread(self, "algorithm", unread, why)


@dataclass
class FlowPairs(TensorData):
    """M points of the flow towards each of B chunks.

    Attributes:
        action: (B, C, D) the chunks that were executed.
        noise: (B, M, C, D).
        t: (B, M) times.
    """

    action: Tensor
    noise: Tensor
    t: Tensor


class FlowMatchingActor(ClippedActor):
    """PPO's epochs on ratios of flow matching losses."""

    config: FPOConfig

    def _check(self) -> None:
        """Any sampler will do, of a policy that acts by the velocity that is trained."""
        refuse_shortcut(self.policy, self.config.name)
        refuse_thoughts(self.policy, self.config.name)

    def update(
        self,
        obs: Obs,
        trace: DenoisingTrace,
        logprob: Tensor,
        advantage: Tensor,
        rows: Tensor,
        *,
        weight: Tensor | None = None,
        progress: float,
        generator: torch.Generator,
    ) -> dict[str, float]:
        """As PPO's, but for ``logprob``, which the sampler gave: not read."""
        pairs = draw_pairs(trace.x[:, -1], self.config.num_pairs, generator)
        old = self.scores(obs, pairs, rows, self.config.num_pairs)
        advantage = advantage[:, None].expand_as(self._decision_logprob(old, pairs))
        return super().update(
            obs, pairs, old, advantage, rows, weight=weight, progress=progress, generator=generator
        )

    def _chunks(self, trace: Any) -> Tensor:
        return trace.action

    def _evaluate(self, obs: Obs, trace: Any) -> PolicyEval:
        loss = pair_losses(self.policy, obs, trace)
        return PolicyEval(-loss, torch.zeros_like(loss[:, 0]), None)

    def _decision_logprob(self, logprob: Tensor, trace: Any) -> Tensor:
        """(B, M), or (B, 1) without ``per_pair``."""
        return logprob if self.config.per_pair else logprob.mean(1, keepdim=True)


class FPO(PPO):
    """See the module's docstring."""

    Config = FPOConfig
    needs = (HasFlow, HasValue)
    Actor = FlowMatchingActor

    @classmethod
    def memory_plan(cls, config: PPOConfig, policy: Any, spec: EnvSpec) -> MemoryPlan | None:
        """See ``Algorithm``: not known before a run."""
        return None


def draw_pairs(action: Float[Tensor, "b c d"], count: int, generator: torch.Generator) -> FlowPairs:
    """``count`` points of the flow towards each chunk."""
    b = len(action)
    device = action.device
    t = sample_training_time(b * count, generator, device=device).view(b, count)
    return FlowPairs(action, randn((b, count, *action.shape[1:]), generator, device), t)


def pair_losses(policy: FlowPolicyProtocol, obs: Obs, pairs: FlowPairs) -> Float[Tensor, "b m"]:
    """The flow matching loss of each pair, summed over the actions that are executed."""
    b, m = pairs.t.shape
    action = pairs.action[:, None].expand_as(pairs.noise)
    x, target = flow_matching_pair(
        action.flatten(0, 1), pairs.t.flatten(), pairs.noise.flatten(0, 1)
    )
    velocity = policy.velocity(policy.encode(obs), x.unflatten(0, (b, m)), pairs.t)
    error = (velocity - target.unflatten(0, (b, m)))[
        ..., : num_executed(policy.config), : policy.spec.action_dim
    ]
    return (error**2).sum(dim=(-2, -1))
