"""What flow policies share whatever their network is: sampling a path, scoring it, a critic, steered noise."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embodyrl.errors import UserError, refuse_unread
from embodyrl.functional.flow import Transition, draw_stochastic_steps, randn, timesteps
from embodyrl.policies.noise_policy import NoisePolicy, initial_noise
from embodyrl.policies.normalize import Normalizer
from embodyrl.policies.sample_path import integrate
from embodyrl.policy import Mode
from embodyrl.types import ActionSample, DenoisingTrace, EnvSpec, Obs, PolicyEval

Generators = torch.Generator | list[torch.Generator]


def check_sampler(config: Any) -> None:
    """Refuses settings of transition, trained steps, critic and steering that do not exist or that nothing reads."""
    for key, valid in (
        ("transition", ("flow_sde", "flow_cps", "flow_noise")),
        ("trained_steps", ("all", "one")),
        ("critic", ("privileged", "shared")),
    ):
        if getattr(config, key) not in valid:
            raise UserError(
                f"policy.{key} is {getattr(config, key)!r}; it must be one of {', '.join(valid)}."
            )
    if not 0 < config.noise_min <= config.noise_max:
        raise UserError("policy.noise_min must be above 0 and policy.noise_max not below it.")
    unread = ("eta",) if config.transition == "flow_noise" else ("noise_min", "noise_max")
    refuse_unread(config, "policy", unread, f"transition={config.transition} does not read it")
    if not config.steer_width:
        refuse_unread(
            config, "policy", ("steer_bound",), "steer_width=0 leaves the initial noise as it is"
        )


class ActorCritic(nn.Module):
    """Base of the policies with a value head: a subclass has ``config``, ``spec`` and ``encode``."""

    config: Any
    spec: EnvSpec

    def encode(self, obs: Obs) -> Any:
        """What acting needs of an observation, with a summary ``pooled`` (N, F)."""
        raise NotImplementedError

    def add_heads(self, features: int) -> None:
        """Builds the critic and the policy over the initial noise; ``features`` is the width of ``pooled``."""
        c = self.config
        spec = self.spec
        self.features_dim = critic_in = features
        if c.critic == "privileged":
            if not spec.privileged_dim:
                raise UserError(
                    f"{spec.name} gives no privileged state for the critic. Set "
                    "policy.critic=shared to let it see the actor's features."
                )
            critic_in = spec.privileged_dim
            self.normalize_privileged = Normalizer(critic_in)
        self.critic = nn.Sequential(
            nn.Linear(critic_in, c.critic_width),
            nn.SiLU(),
            nn.Linear(c.critic_width, c.critic_width),
            nn.SiLU(),
            nn.Linear(c.critic_width, 1),
        )
        self.steer = None
        if getattr(c, "steer_width", 0):
            self.steer = NoisePolicy(
                features, c.horizon, spec.action_dim, c.steer_width, c.steer_bound
            )
        last = cast(nn.Linear, self.critic[-1])
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def actor_parameters(self) -> list[nn.Parameter]:
        """Everything but the critic and the policy over the initial noise."""
        others = {*self.critic.parameters(), *(self.steer.parameters() if self.steer else ())}
        return [p for p in self.parameters() if p not in others]

    def value(self, obs: Obs, context: Any = None) -> Float[Tensor, " n"]:
        """The critic's estimate of the discounted return from obs; ``context`` saves encoding obs a second time."""
        return self.value_of(self.critic_features(obs, context))

    def critic_features(self, obs: Obs, context: Any = None) -> Float[Tensor, "n f"]:
        """What the critic sees of obs; no gradient goes into them, so they hold for as long as the actor stands."""
        if self.config.critic == "privileged":
            assert obs.privileged is not None
            return self.normalize_privileged(obs.privileged)
        if context is None:
            with torch.no_grad():
                context = self.encode(obs)
        return self.features(context)

    def value_of(self, features: Float[Tensor, "n f"]) -> Float[Tensor, " n"]:
        """The critic's estimate from ``critic_features``."""
        return self.critic(features).squeeze(-1)

    def features(self, context: Any) -> Float[Tensor, "n f"]:
        """What small nets beside the actor see of an observation: a summary, without gradient into the actor."""
        return context.pooled.detach()

    def fit_critic_inputs(self, obs: Obs) -> None:
        """Normalises the critic's privileged state by a first rollout; a critic that was trained keeps its own."""
        if self.config.critic == "privileged" and not self.normalize_privileged.fitted:
            assert obs.privileged is not None
            self.normalize_privileged.fit(obs.privileged)


class FlowPolicy(ActorCritic):
    """Base of the flow policies. A subclass has ``encode``, ``step_inputs`` and ``normalize_action``.

    The state of its flow, (N, C, D), may be larger than the actions (N, H, A) that are executed,
    which are its first H rows and A columns: a pretrained model plans further ahead, or pads
    actions to a fixed width. What lies beyond takes the ODE's steps, and has no part in any
    probability.
    """

    def __init__(self, config: Any, spec: EnvSpec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec
        kind = config.transition
        steps = config.num_denoise_steps
        self.transition = Transition(kind=kind, eta=config.eta, num_steps=steps)

    normalize_action: Any

    def step_inputs(self, context: Any, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """Velocity and, for Flow-Noise, the log-std: what ``Transition`` takes."""
        raise NotImplementedError

    @property
    def flow_shape(self) -> tuple[int, int]:
        """(C, D)."""
        return self.config.horizon, self.spec.action_dim

    def executed(self, x: Tensor) -> Tensor:
        """The actions (..., H, A) of a state of the flow (..., C, D)."""
        return x[..., : self.config.horizon, : self.spec.action_dim]

    @torch.no_grad()
    def decode(self, context: Any, noise: Float[Tensor, "n h a"]) -> Float[Tensor, "n h a"]:
        """The action chunk that the noise-free flow makes of ``noise``, which is 0 beyond what is given."""
        start = pad(noise, self.flow_shape)
        end = integrate(partial(self.step_inputs, context), self.config.num_denoise_steps, start)
        return self.normalize_action.inverse(self.executed(end)).clamp(-1.0, 1.0)

    @torch.no_grad()
    def sample(self, obs: Obs, *, generator: Generators, mode: Mode) -> ActionSample:
        """See ``Policy.sample``."""
        n = len(obs)
        steps = self.config.num_denoise_steps
        device = obs.proprio.device
        context = self.encode(obs)
        x = initial_noise(
            self.steer, self.features(context), (n, *self.flow_shape), generator, mode
        )
        if mode == "eval":
            return ActionSample(self.decode(context, x))
        x = pad(x, self.flow_shape)
        times = timesteps(steps, device)
        noisy = self.transition.num_noisy
        stochastic = draw_stochastic_steps(
            n, steps, self.config.trained_steps, generator, noisy
        ).to(device)
        path = [x]
        logprobs = []
        for k in range(steps):
            velocity, log_std = self.step_inputs(context, x[:, None], times[k].expand(n, 1))
            log_std = None if log_std is None else self.executed(log_std[:, 0])
            old = self.executed(x)
            v = self.executed(velocity[:, 0])
            new = self.transition.step(
                old, v, k, randn(old.shape, generator, device), stochastic[:, k], log_std
            )
            logprob = self.transition.log_prob(old, new, v, k, log_std)
            logprobs.append(torch.where(stochastic[:, k], logprob, 0.0))
            if new.shape == x.shape:
                x = new
            else:
                x = x - velocity[:, 0] / steps
                self.executed(x).copy_(new)
            path.append(x)
        actions = self.normalize_action.inverse(self.executed(x)).clamp(-1.0, 1.0)
        trace = DenoisingTrace(torch.stack(path, dim=1), stochastic)
        return ActionSample(actions, trace, torch.stack(logprobs, dim=1), self.value(obs, context))

    def evaluate(self, obs: Obs, trace: DenoisingTrace) -> PolicyEval:
        """See ``Policy.evaluate``; only the steps that are trained are computed, all of them in one pass.

        The initial noise is a factor N(0, I) of the path's density too, but it has no parameters:
        it cancels in every ratio and adds nothing to a gradient, so it is not among the K
        log-probabilities.
        """
        context = self.encode(obs)
        n, steps = trace.stochastic.shape
        trained = (
            self.transition.num_noisy
            if self.config.trained_steps == "all"
            else min(1, self.transition.num_noisy)
        )
        # The trained steps of each row, in their order: (N, trained).
        k = trace.stochastic.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[
            :, :trained
        ]
        row = torch.arange(n, device=k.device)[:, None]
        x = trace.x[row, k]
        stochastic = trace.stochastic[row, k]
        v, log_std = self.step_inputs(context, x, timesteps(steps, x.device)[k])
        x = self.executed(x)
        x_next = self.executed(trace.x[row, k + 1])
        v = self.executed(v)
        log_std = None if log_std is None else self.executed(log_std)
        scored = torch.where(stochastic, self.transition.log_prob(x, x_next, v, k, log_std), 0.0)
        logprob = torch.zeros(n, steps, dtype=scored.dtype, device=x.device).scatter(1, k, scored)
        entropy = torch.where(stochastic, self.transition.entropy(x, v, k, log_std), 0.0).sum(1)
        entropy = entropy / stochastic.sum(1).clamp_min(1) / (x.shape[2] * x.shape[3])
        return PolicyEval(logprob, entropy, self.value(obs, context))


def pad(x: Tensor, shape: tuple[int, int]) -> Tensor:
    """X (..., h, a) with zeros behind its rows and columns, up to (..., C, D)."""
    return nn.functional.pad(x, (0, shape[1] - x.shape[-1], 0, shape[0] - x.shape[-2]))
