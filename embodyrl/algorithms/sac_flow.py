"""SAC-Flow: soft actor-critic on a flow policy, its gradient reparameterised through all K denoising steps.

SAC Flow is arXiv:2509.25756, SAC arXiv:1812.05905. The noise-augmented rollout x_{k+1} = mean_k +
std_k e_k ends in the action a. Its density pi(a|s) has no closed form; two others take its place
(``SACFlowConfig.entropy``):

    path      log pi = sum_k log N(x_{k+1}; mean_k, std_k^2) - log |da/dx_K|      (the initial noise's is a constant)
    action    log pi = log N(x_K; mean_{K-1}, std_{K-1}^2) - log |da/dx_K|        (of a, given x_{K-1})

The second is a bound, H(a|s) >= H(a|x_{K-1}, s), so an entropy that it reaches is the action's.
That of the path is not: a policy may be noisy on the way and exact at the end.
One decision is a chunk of H actions: critics see whole chunks, and a TD target spans what was
executed of one. RLPD, WSRL and DSRL are this loop with other data or another actor.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embodyrl.algorithms.critics import NORMS, Critics
from embodyrl.algorithms.optim import GuardedAdam, Means
from embodyrl.algorithms.sft import imitation_loss
from embodyrl.errors import UserError, did_you_mean, refuse_unread
from embodyrl.functional.flow import LEARNED, LOG_2PI, randn
from embodyrl.functional.losses import sac_actor_loss, td_loss, temperature_loss
from embodyrl.functional.returns import chunk_td_target
from embodyrl.policies.sample_path import sample_path
from embodyrl.policies.vision import random_shift
from embodyrl.rollouts.batches import Transitions
from embodyrl.rollouts.replay_buffer import ReplayBuffer
from embodyrl.types import Obs

if TYPE_CHECKING:
    from embodyrl.data.demonstrations import Demonstrations

ENTROPIES = ("action", "path")


@dataclass(frozen=True)
class SACFlowConfig:
    """Settings of SAC-Flow.

    Attributes:
        name: registry name.
        num_chunks: T, chunks per env and iteration.
        capacity: chunks in the replay buffer, allocated at the start.
        save_replay: whether checkpoints hold the buffer; without it a resumed run collects
            ``warmup_chunks`` anew.
        warmup_chunks: collected before the first gradient step.
        random_warmup: those are uniformly random actions, for a policy that starts from nothing,
            not the policy's own.
        critic_warmup: gradient steps, the first ones, in which only the critics learn; for a policy
            worth keeping.
        utd: update-to-data ratio: gradient steps of the critics per chunk collected.
        policy_delay: critic steps per step of the actor and the temperature.
        batch_size: chunks per gradient step.
        gamma: discount per action.
        lr: of the actor (Adam).
        critic_lr: of the critics (Adam).
        alpha_lr: of the temperature (Adam).
        alpha: the temperature at the start; it stays there if ``alpha_lr`` is 0.
        entropy: whose the temperature holds, of the ``action`` or of the joint ``path``; see the
            module.
        target_entropy: at how many nats per action dim, for the path also per denoising step;
            negative. In all that is target_entropy * H * A, or target_entropy * K * H * A, in the
            units of actions.
        entropy_backup: whether TD targets hold the entropy bonus of the next decision.
        bc_coef: weight of the flow matching loss on ``data.path`` in the actor's loss
            (offline-to-online).
        num_critics: E; a target is the smaller value of two of them, drawn for every step (REDQ,
            arXiv:2101.05982).
        shared_critic: critics see the actor's features, also where ``policy.critic`` is privileged.
        own_encoder: critics see the features of an encoder of their own instead, whatever
            ``policy.critic`` is: a copy of the actor's that their loss trains further.
        critic_shift: pixels, at most, by which pictures are shifted at random before it sees them
            (DrQ, arXiv: 2004.13649).
        critic_width: of their hidden layers.
        critic_layers: hidden layers.
        critic_norm: ``none``, ``layer`` (LayerNorm), or ``batch``: CrossQ, which has no target
            nets.
        tau: share by which target nets follow at each step; not read by CrossQ.
        max_grad_norm: of the actor and of the critics, each; 0 means no bound. The critics' norms
            grow with returns, and a bound that always binds makes all batches weigh the same.
    """

    name: str = "sac_flow"
    num_chunks: int = 1
    capacity: int = 200_000
    save_replay: bool = True
    warmup_chunks: int = 5_000
    random_warmup: bool = True
    critic_warmup: int = 0
    utd: float = 1.0
    policy_delay: int = 2
    batch_size: int = 256
    gamma: float = 0.99
    lr: float = 3e-4
    critic_lr: float = 1e-3
    alpha_lr: float = 1e-3
    alpha: float = 0.2
    entropy: str = "action"
    target_entropy: float = -1.0
    entropy_backup: bool = True
    bc_coef: float = 0.0
    num_critics: int = 2
    shared_critic: bool = False
    own_encoder: bool = False
    critic_shift: int = 4
    critic_width: int = 256
    critic_layers: int = 2
    critic_norm: str = "none"
    tau: float = 0.005
    max_grad_norm: float = 0.0

    def __post_init__(self) -> None:
        if self.utd <= 0:
            raise UserError(
                f"algorithm.utd is {self.utd}, so nothing would be learned: it is the number of "
                "gradient steps per chunk collected and must be above 0."
            )
        if self.target_entropy >= 0:
            raise UserError(
                f"algorithm.target_entropy is {self.target_entropy}; the entropy of actions in "
                "[-1, 1] is a negative number of nats per dim for all but near-uniform noise. "
                "SAC's usual target is -1."
            )
        if self.entropy not in ENTROPIES:
            raise UserError(
                f"There is no entropy of {self.entropy!r}. {did_you_mean(self.entropy, ENTROPIES)}"
            )
        if self.critic_norm not in NORMS:
            raise UserError(
                f"There is no critic_norm {self.critic_norm!r}. "
                f"{did_you_mean(self.critic_norm, NORMS)}"
            )
        if not self.own_encoder:
            refuse_unread(
                self, "algorithm", ("critic_shift",), "own_encoder=false shifts no pictures"
            )
        if self.critic_norm == "batch":
            refuse_unread(
                self, "algorithm", ("tau",), "critic_norm=batch (CrossQ) has no target nets"
            )
        if not self.alpha_lr:
            refuse_unread(
                self, "algorithm", ("target_entropy",), "alpha_lr=0 leaves the temperature as it is"
            )
        if not 0 < self.gamma <= 1 or not 0 < self.tau <= 1:
            raise UserError("algorithm.gamma and algorithm.tau must lie in (0, 1].")
        if self.critic_shift < 0:
            raise UserError(
                f"algorithm.critic_shift is {self.critic_shift}; it is a number of pixels, 0 for "
                "none."
            )
        if self.num_critics < 2:
            raise UserError(
                f"algorithm.num_critics is {self.num_critics}; the smaller value of two needs at "
                "least 2."
            )
        for key in ("num_chunks", "policy_delay", "batch_size"):
            if getattr(self, key) < 1:
                raise UserError(f"algorithm.{key} is {getattr(self, key)}; it must be at least 1.")
        if self.alpha <= 0 or self.warmup_chunks < 0 or self.critic_warmup < 0 or self.bc_coef < 0:
            raise UserError(
                "algorithm.alpha must be above 0, and warmup_chunks, critic_warmup and bc_coef "
                "not below it."
            )


class SACFlow:
    """See the module's docstring."""

    Config: type = SACFlowConfig
    source = "transitions"
    sample_path = staticmethod(sample_path)

    def __init__(self, config: Any, policy: Any) -> None:
        self.config = config
        self.policy = policy
        self.result = policy
        c = config
        spec = policy.spec
        horizon = policy.config.horizon
        self.device = next(policy.parameters()).device
        self._check_actor()
        self.featured = c.shared_critic or c.own_encoder
        self.privileged = getattr(policy.config, "critic", "") == "privileged" and not self.featured
        self.buffer = ReplayBuffer(
            c.capacity, spec, horizon, privileged=self.privileged, device=self.device
        )
        size = (c.num_critics, c.critic_width, c.critic_layers, c.critic_norm)
        features = policy.features_dim if self.featured else policy.critic[0].in_features
        self.critics = Critics(features, horizon * spec.action_dim, *size).to(self.device)
        self.encoder = copy.deepcopy(policy) if c.own_encoder else None
        self.target = (
            None if c.critic_norm == "batch" else copy.deepcopy(self.critics).requires_grad_(False)
        )
        self.log_alpha = nn.Parameter(torch.tensor(math.log(c.alpha), device=self.device))
        self.target_entropy = c.target_entropy * self._decision_size()
        self.actor_optimizer = GuardedAdam(self._actor_parameters(), c.lr, c.max_grad_norm, "actor")
        judges = [
            *self.critics.parameters(),
            *([] if self.encoder is None else self.encoder.parameters()),
        ]
        self.critic_optimizer = GuardedAdam(judges, c.critic_lr, c.max_grad_norm, "critics")
        self.alpha_optimizer = GuardedAdam([self.log_alpha], c.alpha_lr, 0.0, "temperature")
        self.demos: Demonstrations | None = None
        self.collected = 0
        self.gradient_steps = 0
        self.owed = 0.0

    # The actor: what DSRL replaces.

    def _check_actor(self) -> None:
        """Refuses a policy whose noise cannot be tuned, or an entropy that it cannot have."""
        transition = self.policy.transition
        p = self.policy.config
        if transition.kind not in LEARNED:
            raise UserError(
                f"policy.transition is {transition.kind!r}, whose noise is fixed, so SAC could not "
                "tune its entropy. Set policy.transition=flow_noise."
            )
        unread = [key for key in ("trained_steps", "steer_width") if hasattr(p, key)]
        refuse_unread(
            p,
            "policy",
            unread,
            f"{self.config.name} does not read it: all K steps draw noise and are trained",
        )
        steps = transition.num_steps
        top = 0.5 * (1 + LOG_2PI) + math.log(p.noise_max) - 0.5 * math.log(steps)
        if self.config.target_entropy >= top:
            raise UserError(
                f"algorithm.target_entropy is {self.config.target_entropy}, but with "
                f"policy.noise_max={p.noise_max} and K={steps} no step has more than {top:.2f} "
                "nats per dim. Lower the one or raise the other."
            )

    def _decision_size(self) -> int:
        """What target_entropy is multiplied with."""
        p = self.policy
        steps = p.transition.num_steps if self.config.entropy == "path" else 1
        return steps * p.config.horizon * p.spec.action_dim

    def _actor_parameters(self) -> list[nn.Parameter]:
        return list(self.policy.actor_parameters())

    def _propose(self, obs: Obs, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """A reparameterised choice (B, H, A), its log-density (B,), and what the critics see of obs (B, F)."""
        p = self.policy
        context = p.encode(obs)
        start = randn((len(obs), p.config.horizon, p.spec.action_dim), generator, self.device)
        path = self.sample_path(partial(p.step_inputs, context), p.transition, start, generator)
        choice = p.normalize_action.inverse(path.end).clamp(-1.0, 1.0)
        logprob = path.logprob.sum(1) if self.config.entropy == "path" else path.logprob[:, -1]
        logprob = logprob - p.normalize_action.log_det(path.end)
        with torch.no_grad():
            features = self._critic_features(obs, context)
        return choice, logprob, features

    def _critic_features(self, obs: Obs, context: Any = None) -> Tensor:
        """What the critics see of obs (B, F); ``context`` saves encoding obs a second time."""
        if self.encoder is not None:
            return self.encoder.encode(obs).pooled
        if not self.featured:
            return self.policy.critic_features(obs, context)
        with torch.no_grad():
            return self.policy.features(self.policy.encode(obs) if context is None else context)

    def act(self, obs: Obs, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See ``rollouts.collect.Act``: the noisy policy, or while it warms up from nothing, uniform actions."""
        if self.config.random_warmup and self.collected < self.config.warmup_chunks:
            shape = (len(obs), self.policy.config.horizon, self.policy.spec.action_dim)
            choice = (torch.rand(shape, generator=generator) * 2 - 1).to(self.device)
        else:
            choice = self.policy.sample(obs, generator=generator, mode="train").actions
        return choice, choice

    # The data: what RLPD replaces.

    @property
    def wants_demos(self) -> bool:
        """Whether ``add_demos`` must be called before the first update."""
        return self.config.bc_coef > 0

    def add_demos(self, demos: Demonstrations) -> None:
        """Demonstrations for the flow matching term."""
        self.demos = demos

    def _batch(self, generator: torch.Generator) -> Transitions:
        return self.buffer.sample(self.config.batch_size, generator)[0].to(self.device)

    def _shifted(self, obs: Obs, generator: torch.Generator) -> Obs:
        """Pictures as an own encoder of the critics learns from them."""
        if self.encoder is None or not self.config.critic_shift:
            return obs
        shift = partial(random_shift, pixels=self.config.critic_shift, generator=generator)
        return replace(obs, images={name: shift(image) for name, image in obs.images.items()})

    # The loop.

    def update(
        self, batch: Transitions, *, progress: float, generator: torch.Generator
    ) -> dict[str, float]:
        """Stores the chunks, then takes ``utd`` gradient steps for each once the warm-up is over."""
        c = self.config
        self.buffer.add(batch)
        self.collected += len(batch)
        stats = Means()
        if len(self.buffer) >= min(c.warmup_chunks, c.capacity):
            if self.gradient_steps == 0 and self.privileged:
                seen = torch.arange(min(len(self.buffer), 4096), device=self.device)
                self.policy.fit_critic_inputs(self.buffer.rows(seen).obs)
            self.owed += c.utd * len(batch)
        while self.owed >= 1:
            self.owed -= 1
            self._gradient_step(generator, stats)
        return {
            **stats.means(),
            "alpha": float(self.log_alpha.detach().exp()),
            "target_entropy": self.target_entropy,
            "replay_chunks": float(len(self.buffer)),
            "replay_gib": self.buffer.nbytes / 2**30,
            "gradient_steps": float(self.gradient_steps),
        }

    def _gradient_step(self, generator: torch.Generator, stats: Means) -> None:
        c = self.config
        batch = self._batch(generator)
        self._critic_step(batch, generator, stats)
        self.gradient_steps += 1
        if self.gradient_steps > c.critic_warmup and self.gradient_steps % c.policy_delay == 0:
            self._actor_step(batch.obs, generator, stats)

    def _critic_step(self, batch: Transitions, generator: torch.Generator, stats: Means) -> None:
        c = self.config
        features = self._critic_features(self._shifted(batch.obs, generator))
        with torch.no_grad():
            following, logprob, next_features = self._propose(
                self._shifted(batch.next_obs, generator), generator
            )
        if self.target is None:
            both = self.critics(
                torch.cat([features, next_features]), torch.cat([batch.choice, following])
            )
            q, next_q = both.split(len(batch), dim=1)
            next_q = next_q.detach()
        else:
            q = self.critics(features, batch.choice)
            next_q = self.target(next_features, following)
        two = torch.randperm(c.num_critics, generator=generator)[:2].to(self.device)
        next_value = next_q[two].amin(0)
        if c.entropy_backup:
            next_value = next_value - self.log_alpha.detach().exp() * logprob
        target = chunk_td_target(batch.reward, batch.valid, next_value, batch.terminated, c.gamma)
        loss = td_loss(q, target)
        norm = self.critic_optimizer.step(loss)
        if self.target is not None:
            self.target.follow(self.critics, c.tau)
        stats.add(critic_loss=loss, critic_grad_norm=norm, q=q.mean(), td_target=target.mean())

    def _actor_step(self, obs: Obs, generator: torch.Generator, stats: Means) -> None:
        c = self.config
        choice, logprob, features = self._propose(obs, generator)
        self.critics.requires_grad_(False).eval()
        q = self.critics(features.detach(), choice)
        self.critics.requires_grad_(True).train()
        # The smaller of two, as SAC; of more, the mean, as REDQ.
        q = q.amin(0) if c.num_critics == 2 else q.mean(0)
        loss = sac_actor_loss(q, logprob, self.log_alpha.detach().exp())
        if c.bc_coef:
            bc = self._imitation(generator)
            loss = loss + c.bc_coef * bc
            stats.add(bc_loss=bc)
        norm = self.actor_optimizer.step(loss)
        if c.alpha_lr:
            self.alpha_optimizer.step(
                temperature_loss(self.log_alpha, logprob, self.target_entropy)
            )
        stats.add(actor_loss=loss, actor_grad_norm=norm, entropy=-logprob.mean(), q_actor=q.mean())

    def _imitation(self, generator: torch.Generator) -> Tensor:
        assert self.demos is not None
        index = torch.randint(len(self.demos), (self.config.batch_size,), generator=generator)
        obs, actions, mask = self.demos.batch(index)
        d = self.device
        return imitation_loss(self.policy, obs.to(d), actions.to(d), mask.to(d), generator)

    def state_dict(self) -> dict[str, Any]:
        """Critics, optimisers, counters and, with ``save_replay``, the buffer."""
        return {
            "critics": self.critics.state_dict(),
            "encoder": None if self.encoder is None else self.encoder.state_dict(),
            "target": None if self.target is None else self.target.state_dict(),
            "log_alpha": self.log_alpha.detach(),
            "optimizers": [o.state_dict() for o in self._optimizers()],
            "counters": [self.collected, self.gradient_steps, self.owed],
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
        for optimizer, saved in zip(self._optimizers(), state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.collected, self.gradient_steps, self.owed = state["counters"]
        if state["replay"] is not None:
            self.buffer.load_state_dict(state["replay"])

    def _optimizers(self) -> tuple[GuardedAdam, GuardedAdam, GuardedAdam]:
        return self.actor_optimizer, self.critic_optimizer, self.alpha_optimizer
