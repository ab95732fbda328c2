"""``ClippedActor``: epochs of the clipped surrogate, for given advantages.

PPO and GRPO share it: they differ in where the advantages come from.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from embodyrl.algorithm import MemoryPlan
from embodyrl.algorithms.anchors import Anchors, add_gradient
from embodyrl.algorithms.clipped_actor_config import ActorConfig
from embodyrl.algorithms.optim import Figures, GuardedAdam, Means, Microbatches, minibatches
from embodyrl.errors import UserError
from embodyrl.functional.importance import behaviour_weights, effective_share
from embodyrl.functional.losses import ppo_policy_loss
from embodyrl.policy import num_executed
from embodyrl.types import DenoisingTrace, Obs, PolicyEval

ADAPTIVE_RANGE = 30.0
"""The adaptive rate stays within this factor of ``lr``.

So one odd rollout neither freezes nor wrecks a policy.
"""


class ClippedActor:
    """Epochs of the clipped surrogate on a policy; one ``update`` is one iteration.

    FPO replaces what is scored and how: ``_check``, ``_evaluate``, ``_decision_logprob`` and
    ``_chunks``. FlowRL replaces the loss: ``_policy_loss``, and ``_trained``.
    """

    def __init__(self, config: ActorConfig, policy: Any) -> None:
        self.config = config
        self.policy = policy
        self._check()
        self.optimizer = GuardedAdam(
            self._trained(), config.lr, config.max_grad_norm, "actor", eps=1e-5
        )
        self.microbatches = Microbatches(config.microbatch_size, self.optimizer.parameters)
        self.anchors = Anchors(config, policy)
        self.iteration = 0

    def _trained(self) -> list[nn.Parameter]:
        """What the optimiser trains."""
        return self.policy.actor_parameters()

    def _check(self) -> None:
        """Refuses a sampler whose path has no density, or no entropy that could be raised."""
        transition = self.policy.transition
        coef = self.config.entropy_coef
        if transition.num_noisy == 0:
            raise UserError(
                f"{self.config.name} needs denoising steps that draw noise, or no step has a "
                f"density, and {transition.kind} with eta {transition.eta} and "
                f"{transition.num_steps} step(s) has none. Raise policy.eta above 0; flow_cps, "
                "whose last step is noise-free, needs policy.num_denoise_steps of at least 2."
            )
        if coef and transition.kind in ("flow_sde", "flow_cps", "ddim"):
            other = "it to 0" if transition.kind == "ddim" else "policy.transition=flow_noise"
            raise UserError(
                f"algorithm.entropy_coef is {coef}, but the noise of {transition.kind} is fixed, "
                f"so its entropy has no gradient. Set {other}, or change policy.eta to explore "
                "more."
            )

    def _evaluate(self, obs: Obs, trace: Any) -> PolicyEval:
        """Log-probabilities (B, K) and entropies of what the policy did, with gradients."""
        return self.policy.evaluate(obs, trace)

    def _decision_logprob(self, logprob: Tensor, trace: Any) -> Tensor:
        """Log-probability (B,) of the whole decision: the sum over the trained steps (B, K)."""
        return logprob.sum(1) / self._divisor(trace)

    def _chunks(self, trace: Any) -> Tensor:
        """What the policy did (B, C, D), in its own units."""
        return trace.x[:, -1]

    def update(
        self,
        obs: Obs,
        trace: Any,
        logprob: Tensor,
        advantage: Tensor,
        rows: Tensor,
        *,
        weight: Tensor | None = None,
        progress: float,
        generator: torch.Generator,
    ) -> dict[str, float]:
        """Epochs over the chunks ``rows`` of B.

        Args:
            obs: B observations.
            trace: what the policy did.
            logprob: (B, K) under the policy that acted.
            advantage: (B,).
            rows: the indices that count.
            weight: (B,) of each chunk in the mean; None means the same for all.
            progress: of the run, in [0, 1].
            generator: of the minibatches.

        Returns:
            The means of the loss's figures, and ``actor_epochs``, ``actor_lr`` and
            ``clip_range_joint``.
        """
        c = self.config
        stats = Means()
        # How much a policy that thinks has thought.
        if (count := getattr(trace, "thought_count", None)) is not None and len(rows):
            stats.add(thoughts=count[rows].float().mean())
        # The old policy's log-probabilities, which every ratio is taken against.
        old, weight, useful = self._old_policy(obs, trace, logprob, rows, weight, stats)
        if c.lr_schedule == "linear":
            self.optimizer.lr = self._scheduled_lr(progress)
        # A rollout of few useful chunks is worth a smaller step, in this iteration alone.
        scheduled = self.optimizer.lr
        rate = scheduled * math.sqrt(useful) if c.behaviour_ess else scheduled
        self.optimizer.lr = rate
        # Where the policy is compared with the one that training began with.
        points = None
        if c.reference_coef and len(rows):
            size = self.microbatches.size or c.minibatch_size
            points = self.anchors.reference_points(
                obs, self._chunks(trace), rows, self.microbatches, size, generator
            )

        passes = 0
        kl = 0.0
        for _ in range(c.epochs if len(rows) else 0):
            kls = []
            for batch in minibatches(rows, c.minibatch_size, generator):

                def surrogate(i: Tensor, size: int = len(batch)) -> tuple[Tensor, Figures]:
                    # Score the decisions again under the current parameters.
                    new = self._evaluate(obs[i], trace[i])
                    # The clipped surrogate with its entropy bonus.
                    loss, figures = self._policy_loss(new, trace, i, old, advantage, weight)
                    entropy = new.entropy.mean()
                    total = loss - c.entropy_coef * entropy
                    figures |= {"policy_loss": loss, "entropy": entropy}
                    # The distance to the policy that training began with.
                    if points is not None:
                        distance = self.anchors.distance(obs, points, i)
                        total = total + c.reference_coef * distance
                        figures["reference_distance"] = distance
                    # These rows' share of the minibatch's mean.
                    return total * (len(i) / size), {**figures}

                # The gradient of imitation, where demonstrations are learned from too.
                imitation = self._imitation_gradient(len(batch), generator, stats)
                # Loss, backward pass (in pieces that fit the memory) and optimiser step.
                loss, figures = self.microbatches.backward(batch, surrogate)
                add_gradient(self.optimizer.parameters, imitation)
                norm = self.optimizer.step(loss)
                stats.add(grad_norm=norm, **figures)
                kls.append(figures["approx_kl"])
            passes += 1
            # Stop early where the policy has moved far enough.
            kl = float(torch.stack(kls).mean())
            if c.lr_schedule == "linear" and c.target_kl and kl > c.target_kl:
                break

        self.optimizer.lr = scheduled
        if c.lr_schedule == "adaptive" and passes and math.isfinite(kl):
            self.optimizer.lr = self._adapted_lr(scheduled, kl)
        self.iteration += 1
        return {
            **stats.means(),
            "actor_epochs": float(passes),
            "actor_lr": rate,
            "clip_range_joint": c.clip_range * self._divisor(trace),
        }

    def _policy_loss(
        self,
        new: PolicyEval,
        trace: Any,
        i: Tensor,
        old: Tensor,
        advantage: Tensor,
        weight: Tensor,
    ) -> tuple[Tensor, Figures]:
        """The loss of the rows ``i``, which were scored anew, and its figures."""
        c = self.config
        loss, figures = ppo_policy_loss(
            self._decision_logprob(new.logprob, trace),
            old[i],
            advantage[i],
            torch.ones_like(old[i], dtype=torch.bool),
            c.clip_range,
            c.clip_range_high or c.clip_range,
            c.dual_clip or None,
            weight[i],
        )
        return loss, {**figures}

    def _imitation_gradient(
        self, count: int, generator: torch.Generator, stats: Means
    ) -> list[Tensor | None]:
        """Of ``count`` chunks of demonstrations, weighted; None of each parameter without them."""
        if not self.config.bc_coef:
            return [None] * len(self.optimizer.parameters)
        gradient, figures = self.anchors.imitation_gradient(count, self.microbatches, generator)
        stats.add(**figures)
        return gradient

    def imitate(self, *, progress: float, generator: torch.Generator) -> dict[str, float]:
        """``epochs`` gradient steps of imitation alone, where no rollout can be learned from."""
        c = self.config
        stats = Means()
        if c.lr_schedule == "linear":
            self.optimizer.lr = self._scheduled_lr(progress)
        for _ in range(c.epochs if c.bc_coef else 0):
            rows, share = self.anchors.imitation(c.minibatch_size, generator)
            stats.add(bc_weight=self.anchors.weight * len(rows) / c.minibatch_size)
            if not len(rows):
                continue  # no demonstration is of what RL never solves
            loss, figures = self.microbatches.backward(rows, share)
            norm = self.optimizer.step(loss)
            stats.add(grad_norm=norm, **figures)
        return stats.means()

    def _old_policy(
        self,
        obs: Obs,
        trace: Any,
        logprob: Tensor,
        rows: Tensor,
        weight: Tensor | None,
        stats: Means,
    ) -> tuple[Tensor, Tensor, float]:
        """The proximal policy's log-probabilities (B,), each chunk's weight (B,), and their use.

        The last is the effective sample size as a share of the chunks.
        """
        c = self.config
        cap = c.behaviour_cap
        behaviour = self._decision_logprob(logprob, trace)
        weight = torch.ones_like(behaviour) if weight is None else weight
        if not cap:
            return behaviour, weight, 1.0
        # Decoupled PPO: the proximal policy is the one that this update starts from.
        proximal = self._decision_logprob(self.scores(obs, trace, rows, logprob.shape[1]), trace)
        log_ratio = (proximal - behaviour)[rows]
        low = c.behaviour_low if c.behaviour_filter == "mask" else None
        importance = torch.zeros_like(behaviour)
        importance[rows] = behaviour_weights(log_ratio, cap, low)
        # What the log says of them.
        useful = effective_share(importance[rows])
        stats.add(behaviour_weight=importance[rows].mean(), ess=useful)
        if low is None:
            stats.add(behaviour_truncated=(log_ratio > math.log(cap)).float().mean())
        else:
            outside = (log_ratio.exp() < low) | (log_ratio.exp() > cap)
            stats.add(behaviour_masked=outside.float().mean())
        return proximal, weight * importance, float(useful)

    def _scheduled_lr(self, progress: float) -> float:
        """A linear rise over the first iterations, then a linear fall to ``lr_end``."""
        c = self.config
        warmup = min(1.0, (self.iteration + 1) / max(c.lr_warmup, 1))
        return c.lr * warmup * (1.0 + (c.lr_end - 1.0) * progress)

    def _adapted_lr(self, rate: float, kl: float) -> float:
        """Lower where the KL is more than twice the target, higher where less than half of it."""
        c = self.config
        factor = 1.0
        if kl > 2 * c.target_kl:
            factor = 1 / 1.5
        elif kl < c.target_kl / 2:
            factor = 1.5
        return min(max(rate * factor, c.lr / ADAPTIVE_RANGE), c.lr * ADAPTIVE_RANGE)

    def _divisor(self, trace: DenoisingTrace) -> float:
        """What the joint log-ratio is divided by."""
        if self.config.ratio == "joint":
            return 1.0
        steps = float(trace.stochastic.sum(1).float().mean())
        dims = steps * num_executed(self.policy.config) * self.policy.spec.action_dim
        # Each thought is one more step.
        if trace.thoughts is not None and trace.thought_count is not None:
            thoughts = float(trace.thought_count.float().mean())
            steps += thoughts
            dims += thoughts * trace.thoughts.shape[2]
        return steps if self.config.ratio == "per_step" else dims

    @torch.no_grad()
    def scores(self, obs: Obs, trace: Any, rows: Tensor, width: int) -> Tensor:
        """(B, width) log-probabilities of ``rows`` under the policy as it is; NaN elsewhere."""
        out = torch.full((len(obs), width), math.nan, device=rows.device)
        size = self.microbatches.size or self.config.minibatch_size
        out[rows] = self.microbatches.forward(
            rows, lambda i: self._evaluate(obs[i], trace[i]).logprob, size
        )
        return out

    def state_dict(self) -> dict[str, Any]:
        """Optimiser, its rate included, counter, and what holds the policy."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "iteration": self.iteration,
            **self.anchors.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.iteration = int(state["iteration"])
        self.anchors.load_state_dict(state)


def on_policy_memory(
    config: ActorConfig, rollout_chunks: int, extra_policies: int = 0
) -> MemoryPlan:
    """The memory of an algorithm that scores paths, and holds so many more copies of the policy."""
    rows = min(config.microbatch_size or config.minibatch_size, config.minibatch_size)
    return MemoryPlan(
        rows,
        lambda policy, obs, trace: policy.evaluate(obs, trace).logprob.sum(),
        rollout_chunks,
        extra_policies=extra_policies + int(config.reference_coef > 0),
    )
