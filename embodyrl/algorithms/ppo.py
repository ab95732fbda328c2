"""PPO on flow-matching policies: its ratio is that of the density of a denoising path.

A denoising step that draws noise is a Gaussian transition (``embodyrl.functional.flow``), so the
path from noise to action has a density in closed form, and PPO (arXiv:1707.06347) applies to it as
to any policy: pi_RL (arXiv:2510.25889), ReinFlow (arXiv:2505.22094), DPPO (arXiv:2409.00588). One
decision is one chunk of H actions; returns are computed over chunks
(``embodyrl.functional.returns``). The policy's config chooses the noise (``policy.transition``) and
the steps (``trained_steps``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodyrl.algorithm import Algorithm, MemoryPlan, SharesGradients
from embodyrl.algorithms.clipped_actor import ClippedActor, on_policy_memory
from embodyrl.algorithms.clipped_actor_config import ActorConfig
from embodyrl.algorithms.episode_buffer import EpisodeBuffer
from embodyrl.algorithms.hindsight import FoundConfig, Hindsight, check_found
from embodyrl.algorithms.optim import GuardedAdam, Means, minibatches
from embodyrl.functional.losses import value_loss
from embodyrl.functional.returns import chunk_rewards, gae, masked_whiten
from embodyrl.policies.found_features import FoundFeatures
from embodyrl.policy import ActorCriticPolicy, HasValue, ScoresPaths, num_executed
from embodyrl.ranges import Count, CountOrZero, Discount, NotNegative, Positive, Share
from embodyrl.rollouts.batches import RolloutBatch
from embodyrl.rollouts.collect import Player, collect_rollout
from embodyrl.rollouts.low_precision import acting_in, in_float32
from embodyrl.types import EnvSpec

if TYPE_CHECKING:
    from embodyrl.data.demonstrations import Demonstrations


@dataclass(frozen=True)
class PPOConfig(FoundConfig, ActorConfig):
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
        seen_chunks: with ``policy.critic=found``: the last chunks, of which hindsight learns where
            things are in pictures; checkpoints hold them.
    """

    name: str = "ppo"
    num_chunks: Count = 16
    gamma: Discount = 0.99
    gae_lambda: Share = 0.9
    warmup_iterations: CountOrZero = 3
    critic_epochs: CountOrZero = 5
    critic_lr: Positive = 1e-3
    value_clip: NotNegative = 0.0
    huber_delta: Positive = 10.0
    seen_chunks: Count = 4_096


class PPO(Algorithm):
    """See the module's docstring."""

    Config = PPOConfig
    needs = (ScoresPaths, HasValue)
    Batch = RolloutBatch
    Actor: type[ClippedActor] = ClippedActor

    def __init__(self, config: PPOConfig, policy: ActorCriticPolicy) -> None:
        super().__init__(config, policy)
        self.actor = self.Actor(config, policy)
        self.critic_optimizer = GuardedAdam(
            policy.critic_parameters(), config.critic_lr, config.max_grad_norm, "critic", eps=1e-5
        )
        self.iteration = 0
        # What the critic sees of pictures is learned from the episodes that were played last.
        found = check_found(config, policy, ("seen_chunks",))
        self.hindsight: Hindsight | None = None
        if found is not None and found.localiser is not None:
            self.hindsight = self._make_hindsight(found)

    def _make_hindsight(self, found: FoundFeatures) -> Hindsight:
        c = self.config
        spec = self.policy.spec
        device = next(self.policy.parameters()).device
        horizon = num_executed(self.policy.config)
        buffer = EpisodeBuffer(c.seen_chunks, spec, horizon, None, c.gamma, device)
        return Hindsight(found, buffer, c.hindsight_steps, c.refresh_chunks)

    @property
    def wants_demos(self) -> bool:
        """See ``Algorithm``: to imitate them."""
        return self.config.bc_coef > 0

    @property
    def takes_demos(self) -> bool:
        """See ``Algorithm``: also to learn where things are in pictures."""
        return self.wants_demos or self.hindsight is not None

    def add_demos(self, demos: Demonstrations) -> None:
        """Demonstrations to imitate, and to learn where things are from."""
        self.actor.anchors.demos = demos
        if self.hindsight is not None:
            self.hindsight.demos = demos

    def collect(
        self,
        player: Player,
        *,
        generator: torch.Generator,
        between: Callable[[], None] = lambda: None,
    ) -> RolloutBatch:
        """``num_chunks`` chunks of every env, from fresh initial states."""
        with acting_in(self.policy, self.config.rollout_precision):
            batch = collect_rollout(
                player.new_episodes(),
                self.policy,
                self.config.num_chunks,
                generator=generator,
                between=between,
                keep_chunks=self.hindsight is not None,
            )
        return in_float32(batch)

    def update(
        self, batch: RolloutBatch, *, progress: float, generator: torch.Generator
    ) -> dict[str, float]:
        """One iteration on one rollout: returns, then the critic's epochs, then the actor's."""
        self.actor.anchors.note(batch.episodes)
        seeing = Means()
        if self.hindsight is not None:
            self._look(self.hindsight, batch, generator, seeing)
        elif self.iteration == 0:
            # A fresh critic says zero everywhere, so fitting its inputs now changes no value.
            self.policy.fit_critic_inputs(batch.obs)

        # Advantages and returns of every chunk in which something was executed.
        advantage, returns = self._advantages(batch)
        mask = batch.valid.any(-1).flatten()
        rows = mask.nonzero().flatten()
        advantage = masked_whiten(advantage.flatten(), mask)
        returns = returns.flatten()
        old_value = batch.value.flatten()

        # The critic learns first. Only once it is of use does the actor follow it.
        stats = self._update_critic(batch, rows, returns, old_value, generator)
        if self.iteration >= self.config.warmup_iterations:
            stats |= self.actor.update(
                batch.obs,
                batch.trace,
                batch.logprob,
                advantage,
                rows,
                progress=progress,
                generator=generator,
            )
        self.iteration += 1

        error = (returns - old_value)[mask].var(correction=0)
        spread = returns[mask].var(correction=0).clamp_min(1e-8)
        skipped = self.actor.optimizer.skipped + self.critic_optimizer.skipped
        return {
            "actor_epochs": 0.0,
            **seeing.means(),
            **stats,
            "explained_variance": float(1.0 - error / spread),
            "return": float(returns[mask].mean()),
            "value": float(old_value[mask].mean()),
            "skipped_steps": float(skipped),
        }

    def _look(
        self, hindsight: Hindsight, batch: RolloutBatch, generator: torch.Generator, stats: Means
    ) -> None:
        """The critic's lessons in seeing that are due with this rollout."""
        assert batch.chunks is not None, "collect keeps them where hindsight learns"
        hindsight.buffer.store(batch.chunks)
        if not hindsight.begun:
            hindsight.begin(generator, stats)
        hindsight.played(len(batch.chunks), generator, stats)

    def _advantages(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """Generalised advantage estimates and returns, (T, N) each."""
        c = self.config
        reward = chunk_rewards(batch.reward, batch.valid, c.gamma)
        discount = c.gamma ** batch.valid.sum(-1).to(reward.dtype)
        done = batch.terminated | batch.truncated
        return gae(
            reward,
            batch.value,
            batch.next_value,
            discount,
            batch.terminated,
            done,
            c.gae_lambda,
        )

    def _update_critic(
        self,
        batch: RolloutBatch,
        rows: Tensor,
        returns: Tensor,
        old_value: Tensor,
        generator: torch.Generator,
    ) -> dict[str, float]:
        """The critic's epochs: regression on the returns."""
        c = self.config
        stats = Means()
        # The critic's loss does not train what it sees: once is enough for all epochs.
        everything = torch.arange(len(batch.obs), device=rows.device)
        features = self.actor.microbatches.forward(
            everything, lambda i: self.policy.critic_features(batch.obs[i]), c.minibatch_size
        )
        for _ in range(c.critic_epochs):
            for i in minibatches(rows, c.minibatch_size, generator):
                # Loss, backward pass and optimiser step.
                value = self.policy.value_of(features[i])
                mask = torch.ones_like(i, dtype=torch.bool)
                loss, figures = value_loss(
                    value, old_value[i], returns[i], mask, c.value_clip or None, c.huber_delta
                )
                self.critic_optimizer.zero_grad()
                loss.backward()
                self.critic_optimizer.step(loss)
                stats.add(**figures, value_loss=loss)
        return stats.means()

    def state_dict(self) -> dict[str, Any]:
        """Optimisers and counters."""
        return {
            "actor": self.actor.state_dict(),
            "critic": self.critic_optimizer.state_dict(),
            "iteration": self.iteration,
            **self._seen_state(),
        }

    def _seen_state(self) -> dict[str, Any]:
        if self.hindsight is None:
            return {}
        return {
            "hindsight": self.hindsight.state_dict(),
            "seen": self.hindsight.buffer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self.actor.load_state_dict(state["actor"])
        self.critic_optimizer.load_state_dict(state["critic"])
        self.iteration = int(state["iteration"])
        if self.hindsight is not None:
            self.hindsight.load_state_dict(state["hindsight"])
            self.hindsight.buffer.load_state_dict(state["seen"])

    @classmethod
    def tolerates_lag(cls, config: PPOConfig) -> bool:
        """See ``Algorithm``: decoupled PPO does."""
        return config.behaviour_cap > 0

    @classmethod
    def worker_config(cls, config: PPOConfig, count: int) -> PPOConfig:
        """See ``Algorithm``: the learner alone compares with a reference."""
        return replace(config, reference_coef=0.0)

    def shared_gradients(self) -> list[SharesGradients]:
        """See ``Algorithm``."""
        return [self.actor.microbatches]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """See ``Algorithm``."""
        return [self.actor.optimizer.adam, self.critic_optimizer.adam]

    @classmethod
    def memory_plan(cls, config: PPOConfig, policy: Any, spec: EnvSpec) -> MemoryPlan | None:
        """See ``Algorithm``."""
        return on_policy_memory(config, config.num_chunks * spec.num_envs)
