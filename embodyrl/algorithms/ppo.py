"""PPO on flow-matching policies: the ratio is that of the joint density of a chunk's denoising path.

A denoising step that draws noise is a Gaussian transition (``embodyrl.functional.flow``), so the
path from noise to action has a density in closed form, and PPO (arXiv:1707.06347) applies to it as
to any policy: pi_RL (arXiv:2510.25889), ReinFlow (arXiv:2505.22094), DPPO (arXiv:2409.00588). One
decision is one chunk of H actions; returns are computed over chunks
(``embodyrl.functional.returns``). The policy's config chooses the noise (``policy.transition``) and
the steps (``trained_steps``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodyrl.algorithms.clipped_actor import ActorConfig, ClippedActor
from embodyrl.algorithms.optim import GuardedAdam, Means
from embodyrl.errors import UserError
from embodyrl.functional.losses import value_loss
from embodyrl.functional.returns import chunk_rewards, gae, masked_whiten
from embodyrl.rollouts.batches import RolloutBatch, minibatches


@dataclass(frozen=True)
class PPOConfig(ActorConfig):
    """Settings of PPO; those of the actor's updates are in ``ActorConfig``.

    Attributes:
        num_chunks: T, chunks per env and iteration.
        gamma: discount per action.
        gae_lambda: of the exponential average over chunks.
        warmup_iterations: first iterations in which only the critic learns.
        critic_epochs: passes of the critic alone, before the actor's.
        critic_lr: of the critic (Adam).
        value_clip: clips the critic's change per iteration; 0 means none.
        huber_delta: of the value loss.
    """

    name: str = "ppo"
    num_chunks: int = 16
    gamma: float = 0.99
    gae_lambda: float = 0.9
    warmup_iterations: int = 3
    critic_epochs: int = 5
    critic_lr: float = 1e-3
    value_clip: float = 0.0
    huber_delta: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.gamma <= 1 or not 0 <= self.gae_lambda <= 1:
            raise UserError(
                "algorithm.gamma must lie in (0, 1] and algorithm.gae_lambda in [0, 1]."
            )


class PPO:
    """See the module's docstring."""

    Config: type = PPOConfig
    Actor: type[ClippedActor] = ClippedActor
    source = "rollout"

    def __init__(self, config: PPOConfig, policy: Any) -> None:
        self.config = config
        self.policy = policy
        self.result = policy
        self.actor = self.Actor(config, policy)
        critic = policy.critic.parameters()
        self.critic_optimizer = GuardedAdam(
            critic, config.critic_lr, config.max_grad_norm, "critic", eps=1e-5
        )
        self.iteration = 0

    def update(
        self, batch: RolloutBatch, *, progress: float, generator: torch.Generator
    ) -> dict[str, float]:
        """One iteration on one rollout: returns, then the critic's epochs, then the actor's."""
        if self.iteration == 0:
            # A fresh critic says zero everywhere: normalising its inputs now leaves the rollout's
            # values as they are.
            self.policy.fit_critic_inputs(batch.obs)
        advantage, ret = self._returns(batch)
        mask = batch.valid.any(-1).flatten()
        rows = mask.nonzero().flatten()
        advantage = masked_whiten(advantage.flatten(), mask)
        ret = ret.flatten()
        old_value = batch.value.flatten()

        stats = self._fit_critic(batch, rows, ret, old_value, generator)
        if self.iteration >= self.config.warmup_iterations:
            options: dict[str, Any] = {"progress": progress, "generator": generator}
            stats |= self.actor.update(
                batch.obs, batch.trace, batch.logprob, advantage, rows, **options
            )
        self.iteration += 1
        spread = ret[mask].var(correction=0)
        explained = 1.0 - (ret - old_value)[mask].var(correction=0) / spread.clamp_min(1e-8)
        return {
            "actor_epochs": 0.0,
            **stats,
            "explained_variance": float(explained),
            "return": float(ret[mask].mean()),
            "value": float(old_value[mask].mean()),
            "skipped_steps": float(self.actor.optimizer.skipped + self.critic_optimizer.skipped),
        }

    def _returns(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        c = self.config
        reward = chunk_rewards(batch.reward, batch.valid, c.gamma)
        discount = c.gamma ** batch.valid.sum(-1).to(reward.dtype)
        done = batch.terminated | batch.truncated
        return gae(
            reward, batch.value, batch.next_value, discount, batch.terminated, done, c.gae_lambda
        )

    def _fit_critic(
        self,
        batch: RolloutBatch,
        rows: Tensor,
        ret: Tensor,
        old_value: Tensor,
        generator: torch.Generator,
    ) -> dict[str, float]:
        c = self.config
        stats = Means()
        # The critic's inputs have no parameters that it trains: once is enough for all epochs.
        everything = torch.arange(len(batch.obs), device=rows.device)
        features = self.actor.microbatches.forward(
            everything, lambda i: self.policy.critic_features(batch.obs[i]), c.minibatch_size
        )
        for _ in range(c.critic_epochs):
            for i in minibatches(rows, c.minibatch_size, generator):
                value = self.policy.value_of(features[i])
                mask = torch.ones_like(i, dtype=torch.bool)
                loss, figures = value_loss(
                    value, old_value[i], ret[i], mask, c.value_clip or None, c.huber_delta
                )
                self.critic_optimizer.step(loss)
                stats.add(**figures, value_loss=loss)
        return stats.means()

    def state_dict(self) -> dict[str, Any]:
        """Optimisers and counters."""
        return {
            "actor": self.actor.state_dict(),
            "critic": self.critic_optimizer.state_dict(),
            "iteration": self.iteration,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self.actor.load_state_dict(state["actor"])
        self.critic_optimizer.load_state_dict(state["critic"])
        self.iteration = int(state["iteration"])
