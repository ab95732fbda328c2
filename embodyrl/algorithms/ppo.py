"""PPO on flow-matching policies: the ratio is that of the joint density of a chunk's denoising path.

A denoising step that draws noise is a Gaussian transition (``embodyrl.flow``), so the path from noise to action has a
density in closed form, and PPO (arXiv:1707.06347) applies to it as to any policy: pi_RL (arXiv:2510.25889), DPPO
(arXiv:2409.00588). One decision is one chunk of H actions; returns are computed over chunks (``embodyrl.returns``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from embodyrl.buffers import RolloutBatch, minibatches
from embodyrl.errors import UserError
from embodyrl.losses import ppo_policy_loss, value_loss
from embodyrl.returns import chunk_rewards, gae, masked_whiten

RATIOS = ("joint", "per_step", "per_dim")


@dataclass(frozen=True)
class PPOConfig:
    """Settings of PPO.

    Attributes:
        name: registry name.
        num_chunks: T, chunks per env and iteration.
        gamma: discount per action.
        gae_lambda: of the exponential average over chunks.
        epochs: passes of the actor over a rollout.
        critic_epochs: passes of the critic alone, before the actor's.
        warmup_iterations: first iterations in which only the critic learns.
        minibatch_size: chunks per gradient step.
        lr: of the actor (Adam).
        lr_warmup: iterations over which the actor's rate rises: Adam's first steps are as large as any, and random.
        lr_end: the actor's rate falls linearly to this fraction of ``lr`` at the last iteration.
        critic_lr: of the critic (Adam).
        clip_range: ratios are clipped to [1 - clip_range, 1 + clip_range_high].
        clip_range_high: 0 means the same as ``clip_range``.
        dual_clip: bound c on the loss of negative advantages; 0 means none.
        ratio: which log-ratio is clipped: ``joint`` over all steps and dims of a chunk, or its mean ``per_step`` or
            ``per_dim``; the same range is far looser for a mean.
        entropy_coef: weight of the entropy bonus (entropy per dim).
        value_clip: clips the critic's change per iteration; 0 means none.
        huber_delta: of the value loss.
        target_kl: stops the actor's epochs once the estimated KL passes it; 0 means never.
        max_grad_norm: of the actor and of the critic, each.
    """

    name: str = "ppo"
    num_chunks: int = 16
    gamma: float = 0.99
    gae_lambda: float = 0.9
    epochs: int = 5
    critic_epochs: int = 5
    warmup_iterations: int = 3
    minibatch_size: int = 512
    lr: float = 1e-4
    lr_warmup: int = 10
    lr_end: float = 1.0
    critic_lr: float = 1e-3
    clip_range: float = 0.2
    clip_range_high: float = 0.0
    dual_clip: float = 3.0
    ratio: str = "joint"
    entropy_coef: float = 0.0
    value_clip: float = 0.0
    huber_delta: float = 10.0
    target_kl: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.ratio not in RATIOS:
            raise UserError(f"algorithm.ratio is {self.ratio!r}; it must be one of {', '.join(RATIOS)}.")
        if not 0 < self.gamma <= 1 or not 0 <= self.gae_lambda <= 1:
            raise UserError("algorithm.gamma must lie in (0, 1] and algorithm.gae_lambda in [0, 1].")
        if self.dual_clip and self.dual_clip <= 1:
            raise UserError(f"algorithm.dual_clip is {self.dual_clip}; it must be above 1, or 0 for none.")


class PPO:
    """See the module's docstring."""

    Config = PPOConfig
    source = "rollout"

    def __init__(self, config: PPOConfig, policy: Any) -> None:
        if policy.transition.num_noisy == 0:
            raise UserError("PPO needs noisy denoising steps: policy.eta is 0, so no step of the policy has a density.")
        self.config, self.policy, self.result = config, policy, policy
        self.actor = list(policy.actor_parameters())
        self.critic = list(policy.critic.parameters())
        self.actor_optimizer = torch.optim.Adam(self.actor, lr=config.lr, eps=1e-5, fused=True)
        self.critic_optimizer = torch.optim.Adam(self.critic, lr=config.critic_lr, eps=1e-5, fused=True)
        self.iteration = 0
        # Steps skipped in a row; each its own, or good steps of the critic would hide that the actor is stuck.
        self.skipped = {"actor": 0, "critic": 0}

    def update(self, batch: RolloutBatch, *, progress: float, generator: torch.Generator) -> dict[str, float]:
        """One iteration on one rollout: returns, then the critic's epochs, then the actor's."""
        c = self.config
        if self.iteration == 0:
            # A fresh critic says zero everywhere: normalising its inputs now leaves the rollout's values as they are.
            self.policy.fit_critic_inputs(batch.obs)
        advantage, ret = self._returns(batch)
        mask = batch.valid.any(-1).flatten()
        rows = mask.nonzero().flatten()
        advantage = masked_whiten(advantage.flatten(), mask)
        ret, old_value = ret.flatten(), batch.value.flatten()
        old_logprob = batch.logprob
        scale = self._ratio_divisor(batch)
        stats = _Means()

        features = self._critic_features(batch)
        for _ in range(c.critic_epochs):
            for i in minibatches(rows, c.minibatch_size, generator):
                value = self.policy.value_of(features[i])
                loss, info = value_loss(value, old_value[i], ret[i], mask[i], c.value_clip or None, c.huber_delta)
                stats.add(info, value_loss=loss)
                self._step(self.critic_optimizer, self.critic, loss)

        actor_iteration = self.iteration - c.warmup_iterations
        epochs = c.epochs if actor_iteration >= 0 else 0
        warmup = min(1.0, (actor_iteration + 1) / max(c.lr_warmup, 1))
        for group in self.actor_optimizer.param_groups:
            group["lr"] = c.lr * warmup * (1.0 - progress * (1.0 - c.lr_end))
        passes = 0
        for _ in range(epochs):
            kl = _Means()
            for i in minibatches(rows, c.minibatch_size, generator):
                new = self.policy.evaluate(batch.obs[i], batch.trace[i])
                loss, info = ppo_policy_loss(
                    new.logprob.sum(1) / scale,
                    old_logprob[i].sum(1) / scale,
                    advantage[i],
                    mask[i],
                    c.clip_range,
                    c.clip_range_high or c.clip_range,
                    c.dual_clip or None,
                )
                entropy = new.entropy.mean()
                norm = self._step(self.actor_optimizer, self.actor, loss - c.entropy_coef * entropy)
                stats.add(info, policy_loss=loss, entropy=entropy, grad_norm=norm)
                kl.add(info)
            passes += 1
            if c.target_kl and kl.mean("approx_kl") > c.target_kl:
                break

        self.iteration += 1
        spread = ret[mask].var(correction=0)
        explained = 1.0 - (ret - old_value)[mask].var(correction=0) / spread.clamp_min(1e-8)
        return {
            **stats.means(),
            "explained_variance": float(explained),
            "return": float(ret[mask].mean()),
            "value": float(old_value[mask].mean()),
            "actor_epochs": float(passes),
            "clip_range_joint": c.clip_range * scale,
            "skipped_steps": float(sum(self.skipped.values())),
        }

    @torch.no_grad()
    def _critic_features(self, batch: RolloutBatch) -> Tensor:
        rows = torch.arange(len(batch.obs), device=batch.logprob.device).split(self.config.minibatch_size)
        return torch.cat([self.policy.critic_features(batch.obs[i]) for i in rows])

    def _returns(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        c = self.config
        reward = chunk_rewards(batch.reward, batch.valid, c.gamma)
        discount = c.gamma ** batch.valid.sum(-1).to(reward.dtype)
        done = batch.terminated | batch.truncated
        return gae(reward, batch.value, batch.next_value, discount, batch.terminated, done, c.gae_lambda)

    def _ratio_divisor(self, batch: RolloutBatch) -> float:
        steps, (horizon, dims) = batch.trace.stochastic.sum(1).float().mean().item(), batch.trace.x.shape[2:]
        return {"joint": 1.0, "per_step": steps, "per_dim": steps * horizon * dims}[self.config.ratio]

    def _step(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], loss: Tensor) -> float:
        """One guarded gradient step; a loss or gradient that is not finite changes nothing."""
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm))
        which = "actor" if optimizer is self.actor_optimizer else "critic"
        if math.isfinite(norm) and math.isfinite(float(loss.detach())):
            optimizer.step()
            self.skipped[which] = 0
        else:
            self.skipped[which] += 1
            if self.skipped[which] >= 10:
                raise UserError(
                    "Ten gradient steps in a row were not finite, so training stopped; the weights are those before "
                    "them. Lower algorithm.lr, or look at the last rollouts for extreme rewards."
                )
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Optimisers and counters."""
        return {
            "actor_optimizer": self.actor_optimizer.state_dict(),
            "critic_optimizer": self.critic_optimizer.state_dict(),
            "iteration": self.iteration,
            "skipped": dict(self.skipped),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self.actor_optimizer.load_state_dict(state["actor_optimizer"])
        self.critic_optimizer.load_state_dict(state["critic_optimizer"])
        self.iteration = int(state["iteration"])
        self.skipped = dict(state["skipped"])


class _Means:
    """Means of named figures over the minibatches of an update."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def add(self, *infos: dict[str, Any], **more: Any) -> None:
        for info in (*infos, more):
            for key, value in info.items():
                self.values.setdefault(key, []).append(float(value.detach() if isinstance(value, Tensor) else value))

    def mean(self, key: str) -> float:
        values = self.values.get(key, [0.0])
        return sum(values) / len(values)

    def means(self) -> dict[str, float]:
        return {key: self.mean(key) for key in self.values}
