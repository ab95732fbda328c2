"""SAC-Flow: soft actor-critic on a flow policy, reparameterised through all K denoising steps.

SAC Flow is arXiv:2509.25756, SAC arXiv:1812.05905. The noise-augmented rollout x_{k+1} = mean_k +
std_k e_k ends in the action a. Its density pi(a|s) has no closed form; two others take its place
(``SACFlowConfig.entropy``):

    path      log pi = sum_k log N(x_{k+1}; mean_k, std_k^2) - log |da/dx_K|
    action    log pi = log N(x_K; mean_{K-1}, std_{K-1}^2) - log |da/dx_K|     (given x_{K-1})

The initial noise adds a constant to the first.

The second is a bound, H(a|s) >= H(a|x_{K-1}, s), so an entropy that it reaches is the action's.
That of the path is not: a policy may be noisy on the way and exact at the end.
One decision is a chunk of H actions: critics see whole chunks, and a TD target spans what was
executed of one. RLPD, WSRL and DSRL are this loop with other data or another actor.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embodyrl.algorithms.episode_buffer import EpisodeBuffer
from embodyrl.algorithms.hindsight import Hindsight, check_found
from embodyrl.algorithms.imitation import imitation_loss
from embodyrl.algorithms.off_policy import OffPolicy, take_units
from embodyrl.algorithms.optim import GuardedAdam, Means
from embodyrl.algorithms.sac_flow_config import SACFlowConfig
from embodyrl.algorithms.side_by_side import fork, side_by_side
from embodyrl.errors import UserError, refuse_unread
from embodyrl.functional.flow import LEARNED_STD, LOG_2PI, randn
from embodyrl.functional.losses import sac_actor_loss, td_loss, temperature_loss
from embodyrl.functional.returns import chunk_td_target, ensemble_value
from embodyrl.policies.augment import augmented
from embodyrl.policies.critics import Critics
from embodyrl.policies.sample_path import sample_path
from embodyrl.policy import FlowCriticPolicy, HasFeatures, HasFlow, num_executed
from embodyrl.rollouts.batches import TransitionBatch, Transitions
from embodyrl.rollouts.replay_buffer import ONLINE, ReplayBuffer
from embodyrl.types import Obs

if TYPE_CHECKING:
    from embodyrl.data.demonstrations import Demonstrations

COLLECTED = "collected"
Following = tuple[Tensor, Tensor, Tensor]
"""Choices (B, H, A), their log-densities (B,), and what the critics see there (B, F)."""
Gradient = tuple[Tensor, tuple[Tensor | None, ...], dict[str, Tensor]]
"""A loss, its gradient of each parameter, and figures by name."""


class SACFlow(OffPolicy):
    """See the module's docstring."""

    Config = SACFlowConfig
    needs = (HasFlow, HasFeatures)
    sample_path = staticmethod(sample_path)

    def __init__(self, config: SACFlowConfig, policy: FlowCriticPolicy) -> None:
        super().__init__(config, policy)
        c = config
        self.device = next(policy.parameters()).device
        self._check_actor()
        self._make_critics()
        self.buffer = self._make_buffer(c.capacity)
        self.hindsight: Hindsight | None = None
        if self.found is not None and isinstance(self.buffer, EpisodeBuffer):
            steps, every = c.hindsight_steps, c.refresh_chunks
            self.hindsight = Hindsight(self.found, self.buffer, steps, every)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(c.alpha), device=self.device))
        self.target_entropy = c.target_entropy * self._decision_size()
        self.actor_optimizer = GuardedAdam(self._actor_parameters(), c.lr, c.max_grad_norm, "actor")
        self.critic_optimizer = GuardedAdam(
            self._critic_parameters(), c.critic_lr, c.max_grad_norm, "critics"
        )
        self.alpha_optimizer = GuardedAdam([self.log_alpha], c.alpha_lr, 0.0, "temperature")
        self.demos: Demonstrations | None = None
        self.collected = 0  # chunks so far
        self.gradient_steps = 0
        self.pending_steps = 0.0  # gradient steps that the chunks collected so far still ask for

    # The critics.

    def _make_critics(self) -> None:
        """An ensemble of Q functions, its target nets, and an encoder where they have their own."""
        c = self.config
        policy = self.policy
        # Critics see the actor's features, those of their own encoder, or what the policy's value
        # head sees.
        self.found = check_found(c, policy)
        self.sees_features = c.shared_critic or c.own_encoder
        if self.found is not None and self.sees_features:
            key = "shared_critic" if c.shared_critic else "own_encoder"
            raise UserError(
                f"policy.critic=found and algorithm.{key}=true say two things about what the critics "
                f"see. Set algorithm.{key}=false, or another policy.critic."
            )
        self.privileged = getattr(policy, "reads_privileged", False) and not self.sees_features
        features = policy.features_dim if self.sees_features else policy.critic_features_dim
        size = num_executed(policy.config) * policy.spec.action_dim
        self.critics = Critics(
            features, size, c.num_critics, c.critic_width, c.critic_layers, c.critic_norm
        ).to(self.device)
        self.encoder = copy.deepcopy(policy) if c.own_encoder else None
        # CrossQ (batch norm) has no target nets.
        self.target = None
        if c.critic_norm != "batch":
            self.target = copy.deepcopy(self.critics).requires_grad_(False)

    def _make_buffer(self, capacity: int) -> ReplayBuffer:
        """A replay buffer of what the critics need; with ``found`` it keeps what they see."""
        spec = self.policy.spec
        horizon = num_executed(self.policy.config)
        if self.found is not None:
            gamma = self.config.gamma
            return EpisodeBuffer(capacity, spec, horizon, self.found, gamma, self.device)
        return ReplayBuffer(capacity, spec, horizon, privileged=self.privileged, device=self.device)

    def _critic_parameters(self) -> list[nn.Parameter]:
        encoder = [] if self.encoder is None else list(self.encoder.parameters())
        return [*self.critics.parameters(), *encoder]

    def _critic_features(self, obs: Obs, context: Any = None) -> Tensor:
        """What the critics see of obs (B, F); ``context`` saves encoding obs a second time."""
        if self.encoder is not None:
            return self.encoder.encode(obs).pooled
        if not self.sees_features:
            return self.policy.critic_features(obs, context)
        with torch.no_grad():
            return self.policy.features(self.policy.encode(obs) if context is None else context)

    # The actor: what DSRL replaces.

    def _check_actor(self) -> None:
        """Refuses a policy whose noise cannot be tuned, or an entropy that it cannot have."""
        transition = self.policy.transition
        config = self.policy.config
        if transition.kind not in LEARNED_STD:
            raise UserError(
                f"policy.transition is {transition.kind!r}, whose noise is fixed, so SAC could not "
                "tune its entropy. Set policy.transition=flow_noise."
            )
        unread = [key for key in ("trained_steps", "steer_width") if hasattr(config, key)]
        why = f"{self.config.name} does not read it: all K steps draw noise and are trained"
        refuse_unread(config, "policy", unread, why)
        steps = transition.num_steps
        top = 0.5 * (1 + LOG_2PI) + math.log(config.noise_max) - 0.5 * math.log(steps)
        if self.config.target_entropy >= top:
            raise UserError(
                f"algorithm.target_entropy is {self.config.target_entropy}, but with "
                f"policy.noise_max={config.noise_max} and K={steps} no step has more than "
                f"{top:.2f} nats per dim. Lower the one or raise the other."
            )

    def _decision_size(self) -> int:
        """What target_entropy is multiplied with."""
        policy = self.policy
        steps = policy.transition.num_steps if self.config.entropy == "path" else 1
        return steps * num_executed(policy.config) * policy.spec.action_dim

    def _actor_parameters(self) -> list[nn.Parameter]:
        return list(self.policy.actor_parameters())

    def _sample_choice(
        self, obs: Obs, generator: torch.Generator, seen: Tensor | None = None
    ) -> Following:
        """Samples from the actor, so that gradients flow through the sample.

        Args:
            obs: B observations.
            generator: of noise.
            seen: what the critics see of obs, where the buffer keeps it.

        Returns:
            The choice (B, H, A), its log-density (B,), and what the critics see of obs (B, F).
        """
        policy = self.policy
        context = policy.encode(obs)
        # The whole path of the flow; the critics judge the part that is executed.
        start = randn((len(obs), *policy.flow_shape), generator, self.device)
        step_inputs = partial(policy.step_inputs, context)
        path = self.sample_path(step_inputs, policy.transition, start, generator, policy.executed)
        end = policy.executed(path.end)
        choice = policy.normalize_action.inverse(end).clamp(-1.0, 1.0)
        logprob = path.logprob.sum(1) if self.config.entropy == "path" else path.logprob[:, -1]
        logprob = logprob - policy.normalize_action.log_det(end)
        return choice, logprob, self._seen(obs, context, seen)

    def _seen(self, obs: Obs, context: Any, kept: Tensor | None) -> Tensor:
        """What the critics see of obs without gradients: ``kept``, where the buffer keeps it."""
        if kept is not None:
            return kept
        with torch.no_grad():
            return self._critic_features(obs, context)

    def act(self, obs: Obs, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See ``rollouts.collect.Act``: the noisy policy.

        While it warms up from nothing, uniform actions take its place.
        """
        policy = self.policy
        if self.config.random_warmup and self.collected < self.config.warmup_chunks:
            shape = (len(obs), num_executed(policy.config), policy.spec.action_dim)
            choice = (torch.rand(shape, generator=generator) * 2 - 1).to(self.device)
        else:
            choice = policy.sample(obs, generator=generator, mode="train").actions
        return choice, choice

    # The data: what RLPD replaces.

    @property
    def wants_demos(self) -> bool:
        """Whether ``add_demos`` must be called before the first update."""
        return self.config.bc_coef > 0

    @property
    def takes_demos(self) -> bool:
        """See ``Algorithm``: also to learn where things are in pictures."""
        return self.wants_demos or (self.hindsight is not None and self.hindsight.looks)

    def add_demos(self, demos: Demonstrations) -> None:
        """Demonstrations for the flow matching term, and to learn where things are from."""
        super().add_demos(demos)
        if self.encoder is not None:
            take_units(self.encoder, demos)
        self.demos = demos
        if self.hindsight is not None:
            self.hindsight.demos = demos

    def _batch(self, generator: torch.Generator) -> Transitions:
        return self.buffer.sample(self.config.batch_size, generator)[0].to(self.device)

    def _shifted(self, obs: Obs, generator: torch.Generator) -> Obs:
        """Randomly shifted images, as the critics' own encoder learns from them."""
        if self.encoder is None:
            return obs
        return augmented(obs, generator, shift=self.config.critic_shift)

    # The loop.

    def update(
        self, batch: TransitionBatch, *, progress: float, generator: torch.Generator
    ) -> dict[str, float]:
        """Stores the chunks, then takes ``utd`` gradient steps for each after the warm-up."""
        c = self.config
        self._store(self.buffer, batch.chunks)
        self.collected += len(batch.chunks)
        stats = Means()
        if len(self.buffer) >= min(c.warmup_chunks, c.capacity):
            if self.gradient_steps == 0 and self.privileged:
                rows = torch.arange(min(len(self.buffer), 4096), device=self.device)
                self.policy.fit_critic_inputs(self.buffer.rows(rows).obs)
            if self.hindsight is not None:
                self._look(self.hindsight, len(batch.chunks), generator, stats)
            self.pending_steps += c.utd * len(batch.chunks)
        while self.pending_steps >= 1:
            self._gradient_steps(int(self.pending_steps), generator, stats)
        return {
            **stats.means(),
            "alpha": float(self.log_alpha.detach().exp()),
            "target_entropy": self.target_entropy,
            "replay_chunks": float(len(self.buffer)),
            "replay_gib": self.buffer.nbytes / 2**30,
            "gradient_steps": float(self.gradient_steps),
        }

    def _store(self, buffer: ReplayBuffer, chunks: Transitions, source: int = ONLINE) -> None:
        """Adds chunks to a buffer, with what the critics see where it keeps that."""
        if isinstance(buffer, EpisodeBuffer):
            buffer.store(chunks, source)
        else:
            buffer.add(chunks, source)

    def _look(
        self, hindsight: Hindsight, chunks: int, generator: torch.Generator, stats: Means
    ) -> bool:
        """The critics' lessons in seeing that are due; whether there was one."""
        first = not hindsight.begun
        if first:
            hindsight.begin(generator, stats)
        return hindsight.played(chunks, generator, stats) or first

    def _gradient_steps(self, most: int, generator: torch.Generator, stats: Means) -> None:
        """At most so many steps of the critics, up to the next step of the actor, and that one.

        The actor stays as it is between two of its steps, so the next actions of all these critic
        steps are drawn side by side; the critics then learn in order.
        """
        c = self.config
        count = min(most, c.policy_delay - self.gradient_steps % c.policy_delay)
        generators = [fork(generator) for _ in range(count)]
        pieces = [partial(self._draw, own) for own in generators]
        drawn = side_by_side(pieces, self.device)
        # Then the critics learn, one step after the other.
        for (batch, following), own in zip(drawn, generators, strict=True):
            self._update_critics(batch, own, stats, following)
            self.gradient_steps += 1
            self.pending_steps -= 1
        if self.gradient_steps > c.critic_warmup and self.gradient_steps % c.policy_delay == 0:
            last = drawn[-1][0]
            self._update_actor(last.obs, generator, stats, last.features)

    def _draw(self, generator: torch.Generator) -> tuple[Transitions, Following | None]:
        """A batch, and the choices that follow it.

        None in their place means that they wait for the critics' own encoder, which changes with
        every step.
        """
        batch = self._batch(generator)
        return batch, None if self.encoder is not None else self._following(batch, generator)

    @torch.no_grad()
    def _following(self, batch: Transitions, generator: torch.Generator) -> Following:
        """The current policy's choice after each chunk; see ``_sample_choice``."""
        obs = self._shifted(batch.next_obs, generator)
        return self._sample_choice(obs, generator, batch.next_features)

    def _update_critics(
        self,
        batch: Transitions,
        generator: torch.Generator,
        stats: Means,
        following: Following | None = None,
    ) -> None:
        c = self.config
        features = batch.features
        if features is None:
            features = self._critic_features(self._shifted(batch.obs, generator))
        # The next action, from the current policy.
        next_choice, next_logprob, next_features = following or self._following(batch, generator)
        # Q of the chunk, and of what comes after it.
        q, next_q = self._q_values(features, batch.choice, next_features, next_choice)
        # The soft value: that of two critics (REDQ), or the least of all, and the entropy bonus.
        next_value = ensemble_value(next_q, c.target_critics, generator)
        if c.entropy_backup:
            next_value = next_value - self.log_alpha.detach().exp() * next_logprob
        target = chunk_td_target(batch.reward, batch.valid, next_value, batch.terminated, c.gamma)
        # Loss, backward pass and optimiser step.
        loss = td_loss(q, target)
        self.critic_optimizer.zero_grad()
        loss.backward()
        norm = self.critic_optimizer.step(loss)
        # The target nets follow.
        if self.target is not None:
            self.target.follow(self.critics, c.tau)
        stats.add(critic_loss=loss, critic_grad_norm=norm, q=q.mean(), td_target=target.mean())

    def _q_values(
        self, features: Tensor, choice: Tensor, next_features: Tensor, next_choice: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Q (E, B) with gradients, and the Q of the next pair (E, B) without."""
        if self.target is not None:
            return self.critics(features, choice), self.target(next_features, next_choice)
        # CrossQ: one pass over both, so that batch norm sees the statistics of both.
        both = self.critics(torch.cat([features, next_features]), torch.cat([choice, next_choice]))
        q, next_q = both.split(len(choice), dim=1)
        return q, next_q.detach()

    def _update_actor(
        self, obs: Obs, generator: torch.Generator, stats: Means, seen: Tensor | None = None
    ) -> None:
        c = self.config
        # Two losses, the second where imitation of the demonstrations is asked for.
        pieces: list[Callable[[], Gradient]] = [
            partial(self._improvement, obs, fork(generator), seen)
        ]
        if c.bc_coef:
            pieces.append(partial(self._imitation_gradient, fork(generator)))
        found = side_by_side(pieces, self.device)
        # Their gradients add up, then the optimiser steps.
        parameters = self.actor_optimizer.parameters
        for p, *parts in zip(parameters, *(g for _, g, _ in found), strict=True):
            given = [part for part in parts if part is not None]
            p.grad = sum(given[1:], start=given[0]) if given else None
        loss = torch.stack([loss for loss, _, _ in found]).sum()
        norm = self.actor_optimizer.step(loss)
        logprob = found[0][2]["logprob"]
        # The temperature holds the entropy at its target.
        if c.alpha_lr:
            alpha_loss = temperature_loss(self.log_alpha, logprob, self.target_entropy)
            self.alpha_optimizer.zero_grad()
            alpha_loss.backward()
            self.alpha_optimizer.step(alpha_loss)
        stats.add(actor_loss=loss, actor_grad_norm=norm, entropy=-logprob.mean())
        stats.add(q_actor=found[0][2]["q"].mean())
        if c.bc_coef:
            stats.add(bc_loss=found[1][0] / c.bc_coef)

    def _improvement(
        self, obs: Obs, generator: torch.Generator, seen: Tensor | None = None
    ) -> Gradient:
        """SAC's loss of the actor at ``obs``, through critics that stay as they are."""
        choice, logprob, features = self._sample_choice(obs, generator, seen)
        self.critics.requires_grad_(False).eval()
        q = self.critics(features.detach(), choice)
        self.critics.requires_grad_(True).train()
        # The smaller of two, as SAC, or the least of all, as SAC-N; otherwise the mean, as REDQ.
        takes_least = self.config.num_critics == 2 or self.config.target_critics == "least"
        value = q.amin(0) if takes_least else q.mean(0)
        loss = sac_actor_loss(value, logprob, self.log_alpha.detach().exp())
        figures = {"logprob": logprob.detach(), "q": value.detach()}
        return loss.detach(), self._actor_gradient(loss), figures

    def _imitation_gradient(self, generator: torch.Generator) -> Gradient:
        """The loss of imitation, with its weight."""
        loss = self.config.bc_coef * self._imitation(generator)
        return loss.detach(), self._actor_gradient(loss), {}

    def _actor_gradient(self, loss: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of each actor parameter; None where the loss does not reach it."""
        parameters = self.actor_optimizer.parameters
        # Frozen weights have none.
        trained = [p for p in parameters if p.requires_grad]
        found = iter(torch.autograd.grad(loss, trained, allow_unused=True))
        return tuple(next(found) if p.requires_grad else None for p in parameters)

    def _imitation(self, generator: torch.Generator) -> Tensor:
        """The flow matching loss of a batch of demonstrations."""
        assert self.demos is not None
        index = self.demos.draw(self.config.batch_size, generator)
        obs, actions, mask = self.demos.batch(index)
        d = self.device
        return imitation_loss(self.policy, obs.to(d), actions.to(d), mask.to(d), generator)

    def rehearse(self, obs: Obs, generator: torch.Generator) -> None:
        """See ``Algorithm``: two pieces, as a gradient step has."""

        def piece(own: torch.Generator) -> None:
            choice, logprob, _ = self._sample_choice(obs, own)
            self._actor_gradient(choice.sum() + logprob.sum())

        side_by_side([partial(piece, fork(generator)) for _ in range(2)], self.device)

    # Checkpoints and workers.

    def state_dict(self) -> dict[str, Any]:
        """Critics, optimisers, counters and, with ``save_replay``, the buffer."""
        return {
            "critics": self.critics.state_dict(),
            "encoder": None if self.encoder is None else self.encoder.state_dict(),
            "target": None if self.target is None else self.target.state_dict(),
            "log_alpha": self.log_alpha.detach(),
            "optimizers": [o.state_dict() for o in self._guarded()],
            "counters": [self.collected, self.gradient_steps, self.pending_steps],
            "hindsight": None if self.hindsight is None else self.hindsight.state_dict(),
            "replay": self.buffer.state_dict() if self.config.save_replay else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self.critics.load_state_dict(state["critics"])
        if self.encoder is not None:
            self.encoder.load_state_dict(state["encoder"])
        if self.target is not None:
            self.target.load_state_dict(state["target"])
        with torch.no_grad():
            self.log_alpha.copy_(state["log_alpha"])
        for optimizer, saved in zip(self._guarded(), state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        collected, gradient_steps, pending_steps = state["counters"]
        self.collected = int(collected)
        self.gradient_steps = int(gradient_steps)
        self.pending_steps = float(pending_steps)  # a fraction of a step may be left
        if self.hindsight is not None:
            self.hindsight.load_state_dict(state["hindsight"])
        if state["replay"] is not None:
            self.buffer.load_state_dict(state["replay"])

    def _guarded(self) -> tuple[GuardedAdam, GuardedAdam, GuardedAdam]:
        return self.actor_optimizer, self.critic_optimizer, self.alpha_optimizer

    def acting_state(self) -> dict[str, Tensor]:
        """See ``Algorithm``: chunks collected so far, for who acts otherwise while it warms up."""
        return {COLLECTED: torch.tensor(self.collected)}

    def load_acting_state(self, state: dict[str, Tensor]) -> None:
        """See ``Algorithm``."""
        self.collected = int(state[COLLECTED])
