"""Bases of the policies: a value head beside an actor, and a flow whose path is sampled and scored."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embodyrl.errors import UserError, refuse_unread
from embodyrl.functional.flow import (
    DenoisingTransition,
    Generators,
    draw_stochastic_steps,
    randn,
    timesteps,
)
from embodyrl.policies.noise_policy import NoisePolicy, initial_noise
from embodyrl.policies.normalize import Normalizer
from embodyrl.policies.sample_path import integrate
from embodyrl.policy import Mode
from embodyrl.types import ActionSample, DenoisingTrace, EnvSpec, Obs, PolicyEval


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
    """Base of the policies with a value head: a subclass has ``encode`` and calls ``add_heads``.

    It has the abilities ``HasValue`` and ``HasFeatures`` of ``embodyrl.policy``.
    """

    config: Any
    spec: EnvSpec

    def encode(self, obs: Obs) -> Any:
        """What acting needs of an observation, with a summary ``pooled`` (N, F)."""
        raise NotImplementedError

    def add_heads(self, features: int, critic: nn.Sequential | None = None) -> None:
        """Builds the value head and, where the config asks for it, the policy over the noise.

        Args:
            features: width of ``features``.
            critic: the value head's net; None builds one that starts at zero.
        """
        c = self.config
        self.features_dim = features
        self.reads_privileged = getattr(c, "critic", "shared") == "privileged"
        self.critic_features_dim = self.spec.privileged_dim if self.reads_privileged else features
        if self.reads_privileged:
            if not self.spec.privileged_dim:
                raise UserError(
                    f"{self.spec.name} gives no privileged state for the critic. Set "
                    "policy.critic=shared to let it see the actor's features."
                )
            self.normalize_privileged = Normalizer(self.critic_features_dim)
        self.critic = critic or _value_head(self.critic_features_dim, c.critic_width)
        self.steer = None
        if getattr(c, "steer_width", 0):
            self.steer = NoisePolicy(
                features, c.horizon, self.spec.action_dim, c.steer_width, c.steer_bound
            )

    def actor_parameters(self) -> list[nn.Parameter]:
        """Everything but the value head and the policy over the initial noise."""
        others = {*self.critic.parameters(), *(self.steer.parameters() if self.steer else ())}
        return [p for p in self.parameters() if p not in others]

    def critic_parameters(self) -> list[nn.Parameter]:
        """Of the value head."""
        return list(self.critic.parameters())

    def value(self, obs: Obs, context: Any = None) -> Float[Tensor, " n"]:
        """The estimate of the discounted return from obs; ``context`` saves encoding obs again."""
        return self.value_of(self.critic_features(obs, context))

    def critic_features(self, obs: Obs, context: Any = None) -> Float[Tensor, "n f"]:
        """What the value head sees of obs.

        No gradient goes into these features, so they stay the same while the actor does.
        """
        if self.reads_privileged:
            assert obs.privileged is not None
            return self.normalize_privileged(obs.privileged)
        if context is None:
            with torch.no_grad():
                context = self.encode(obs)
        return self.features(context)

    def value_of(self, features: Float[Tensor, "n f"]) -> Float[Tensor, " n"]:
        """The estimate from ``critic_features``."""
        return self.critic(features).squeeze(-1)

    def features(self, context: Any) -> Float[Tensor, "n f"]:
        """A summary of an observation for small nets beside the actor, which it does not train."""
        return context.pooled.detach()

    def fit_critic_inputs(self, obs: Obs) -> None:
        """Normalises the privileged state by a first rollout; a trained value head keeps its own."""
        if self.reads_privileged and not self.normalize_privileged.fitted:
            assert obs.privileged is not None
            self.normalize_privileged.fit(obs.privileged)


def _value_head(inputs: int, width: int) -> nn.Sequential:
    """Two hidden layers; every value is 0 at the start."""
    head = nn.Sequential(
        nn.Linear(inputs, width),
        nn.SiLU(),
        nn.Linear(width, width),
        nn.SiLU(),
        nn.Linear(width, 1),
    )
    last = cast(nn.Linear, head[-1])
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return head


class FlowPolicy(ActorCritic):
    """Base of the flow policies; a subclass has the network.

    That is ``encode``, ``velocity``, ``step_inputs`` and ``normalize_action``.

    The state of its flow, (N, C, D), may be larger than the actions (N, H, A) that are executed,
    which are its first H rows and A columns: a pretrained model plans further ahead, or pads
    actions to a fixed width. What lies beyond takes the ODE's steps, and has no part in any
    probability.
    """

    normalize_action: Any

    def __init__(
        self, config: Any, spec: EnvSpec, eta: float = 0.0, trained_steps: str = "all"
    ) -> None:
        """Keeps the settings of the sampler.

        Args:
            config: has ``horizon``, ``num_denoise_steps`` (K) and ``transition``.
            spec: of the env.
            eta: noise level of the transitions that do not learn theirs.
            trained_steps: ``all`` steps draw noise and are trained, or ``one`` drawn at random.
        """
        super().__init__()
        self.config = config
        self.spec = spec
        self.trained_steps = trained_steps
        self.transition = DenoisingTransition(
            kind=config.transition, eta=eta, num_steps=config.num_denoise_steps
        )

    def step_inputs(self, context: Any, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """Velocity and, for Flow-Noise, the log-std: what ``DenoisingTransition`` takes."""
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
        """The actions that the noise-free flow makes of ``noise``, taken as 0 beyond its size."""
        start = pad(noise, self.flow_shape)
        end = integrate(partial(self.step_inputs, context), self.transition.num_steps, start)
        return self._actions(end)

    @torch.no_grad()
    def sample(self, obs: Obs, *, generator: Generators, mode: Mode) -> ActionSample:
        """See ``Actor.sample``."""
        # Encode the observation once, and draw the noise that the path starts from.
        context = self.encode(obs)
        shape = (len(obs), *self.flow_shape)
        noise = initial_noise(self.steer, self.features(context), shape, generator, mode)
        if mode == "eval":
            return ActionSample(self.decode(context, noise))

        # Take K denoising steps. Those that are stochastic are trained, the others follow the ODE.
        x = pad(noise, self.flow_shape)
        steps = self.transition.num_steps
        stochastic = self._draw_stochastic(len(obs), generator).to(x.device)
        path = [x]
        logprobs = []
        for k, t in enumerate(timesteps(steps, x.device)):
            velocity, log_std = self.step_inputs(context, x[:, None], t.expand(len(obs), 1))
            x, logprob = self._step(x, velocity, log_std, k, stochastic[:, k], generator)
            path.append(x)
            logprobs.append(logprob)
        trace = DenoisingTrace(torch.stack(path, dim=1), stochastic)
        value = self.value(obs, context)
        return ActionSample(self._actions(x), trace, torch.stack(logprobs, dim=1), value)

    def _step(
        self,
        x: Tensor,
        velocity: Tensor,
        log_std: Tensor | None,
        k: int,
        stochastic: Tensor,
        generator: Generators,
    ) -> tuple[Tensor, Tensor]:
        """One denoising step: x_{k+1} (N, C, D), and its log-probability (N,)."""
        old = self.executed(x)
        v = self.executed(velocity[:, 0])
        log_std = None if log_std is None else self.executed(log_std[:, 0])
        noise = randn(old.shape, generator, x.device)
        new = self.transition.step(old, v, k, noise, stochastic, log_std)
        logprob = self.transition.log_prob(old, new, v, k, log_std)
        if new.shape == x.shape:
            x = new
        else:  # what is not executed follows the ODE
            x = x - velocity[:, 0] / self.transition.num_steps
            self.executed(x).copy_(new)
        return x, torch.where(stochastic, logprob, 0.0)

    def _draw_stochastic(self, n: int, generator: Generators) -> Tensor:
        steps = self.transition.num_steps
        noisy = self.transition.num_noisy
        return draw_stochastic_steps(n, steps, self.trained_steps, generator, noisy)

    def _actions(self, x: Tensor) -> Tensor:
        """The actions (N, H, A) of the flow's end (N, C, D)."""
        return self.normalize_action.inverse(self.executed(x)).clamp(-1.0, 1.0)

    def evaluate(self, obs: Obs, trace: DenoisingTrace) -> PolicyEval:
        """See ``ScoresPaths.evaluate``; only the trained steps are computed, all in one pass.

        The initial noise is a factor N(0, I) of the path's density too, but it has no parameters:
        it cancels in every ratio and adds nothing to a gradient, so it is not among the K
        log-probabilities.
        """
        context = self.encode(obs)
        n, steps = trace.stochastic.shape
        # Gather the trained steps of each row, in their order: (N, trained).
        most = steps if self.trained_steps == "all" else 1
        trained = min(most, self.transition.num_noisy)
        order = trace.stochastic.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        k = order[:, :trained]
        row = torch.arange(n, device=k.device)[:, None]
        stochastic = trace.stochastic[row, k]
        x = trace.x[row, k]
        # One pass of the network over all of them.
        v, log_std = self.step_inputs(context, x, timesteps(steps, x.device)[k])
        x = self.executed(x)
        x_next = self.executed(trace.x[row, k + 1])
        v = self.executed(v)
        log_std = None if log_std is None else self.executed(log_std)
        # Score them, and put the scores back at their steps.
        scored = torch.where(stochastic, self.transition.log_prob(x, x_next, v, k, log_std), 0.0)
        logprob = torch.zeros(n, steps, dtype=scored.dtype, device=x.device).scatter(1, k, scored)
        entropy = torch.where(stochastic, self.transition.entropy(x, v, k, log_std), 0.0).sum(1)
        entropy = entropy / stochastic.sum(1).clamp_min(1) / (x.shape[2] * x.shape[3])
        return PolicyEval(logprob, entropy, self.value(obs, context))


def pad(x: Tensor, shape: tuple[int, int]) -> Tensor:
    """The tensor (..., h, a) with zeros behind its rows and columns, up to (..., C, D)."""
    return nn.functional.pad(x, (0, shape[1] - x.shape[-1], 0, shape[0] - x.shape[-2]))
