"""``FlowPolicy``: samples the path from noise to action and computes its log-probability.

A subclass brings the network. The value head and what it sees are those of ``ActorCritic``.

    obs --encode--> context --K denoising steps from noise--> x_K --inverse normalisation--> actions
                       +------value head------> value

Shapes: N observations, K denoising steps, chunks of H actions with A dims. The flow's state may be
larger, (C, D): see ``FlowPolicy``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embodyrl.functional.flow import (
    DenoisingTransition,
    Generators,
    draw_stochastic_steps,
    randn,
    timesteps,
)
from embodyrl.policies.actor_critic import ActorCritic
from embodyrl.policies.noise_policy import initial_noise
from embodyrl.policies.one_step import OneStepHead
from embodyrl.policies.sample_path import integrate, with_executed
from embodyrl.policies.thinker import Thinker
from embodyrl.policy import Mode, num_executed
from embodyrl.types import ActionSample, DenoisingTrace, EnvSpec, Obs, PolicyEval


class FlowPolicy(ActorCritic):
    """Base of the flow policies.

    A subclass brings the network: ``encode``, ``velocity``, ``step_inputs`` and
    ``normalize_action``.

    The state of the flow, (N, C, D), may be larger than the executed actions (N, H, A), because it
    plans more actions (``execute`` below ``horizon``), or pads them to a fixed width. The executed actions are
    its first H rows and A columns. The rest follows the ODE and is not part of any probability.

    The network reads the rest at every step, so the executed path e_0 .. e_K alone is no Markov
    chain. But the rest draws no noise: given the initial noise x_0, it is a function of the path
    and of the parameters. So the executed path has a density, given x_0,

        p(e_1 .. e_K | x_0) = prod_k N(e_{k+1}; mean(e_k, r_k), std^2),   r_{k+1} = r_k - v_r / K

    with the rest r_k that the same parameters lead to. x_0 has no parameters, so it cancels in
    every ratio. What is never executed has no factor of its own, and changes the ratio as far as
    it changes the executed actions. With ``trained_steps="one"`` all ODE steps count as a part of
    the world (pi_RL, arXiv:2510.25889), the rest's too: it stays as it was in the rollout.

    With ``config.thoughts`` the policy thinks before it acts (``policies.thinker``). In training it
    draws thoughts, which are a part of the decision like the path. ``encode`` gives the context of a
    thought without noise, for evaluation and for all that scores no path. The value head sees that
    one too: a baseline may not depend on what was drawn.
    """

    normalize_action: Any

    def __init__(
        self,
        config: Any,
        spec: EnvSpec,
        eta: float = 0.0,
        trained_steps: str = "all",
        transition: DenoisingTransition | None = None,
    ) -> None:
        """Keeps the settings of the sampler.

        Args:
            config: has ``horizon`` (C), ``execute`` (H), ``num_denoise_steps`` (K) and ``transition``.
            spec: of the env.
            eta: noise level of the transitions whose noise is not learned.
            trained_steps: ``all`` steps draw noise and are trained, or ``one`` drawn at random.
            transition: the denoising steps; None makes those that ``config`` names.
        """
        super().__init__()
        self.config = config
        self.spec = spec
        self.trained_steps = trained_steps
        self.thinker: Thinker | None = None
        self.transition = transition or DenoisingTransition(
            kind=config.transition, eta=eta, num_steps=config.num_denoise_steps
        )

    def step_inputs(self, context: Any, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """What ``DenoisingTransition`` takes: velocity and, if it is learned, the log-std.

        Args:
            context: of N observations.
            x: (N, K, C, D) noisy chunks.
            t: (N, K) their times.

        Returns:
            The velocity, and the log-std or None; both of x's shape.
        """
        raise NotImplementedError

    def step_size(self, t: Tensor, d: Tensor | None = None) -> tuple[Tensor, ...]:
        """What a shortcut policy's net takes after the times; nothing for an ordinary flow.

        Args:
            t: (N, K) times.
            d: (N, K) sizes of the steps, or what broadcasts to it. None means 1/K, with which the
                policy acts.
        """
        if not getattr(self.config, "shortcut_steps", 0):
            return ()
        return (t.new_full((1, 1), 1 / self.config.num_denoise_steps) if d is None else d,)

    @property
    def start_noise(self) -> float:
        """Standard deviation of the initial noise of noise-free chunks."""
        return getattr(self.config, "start_noise", 1.0)

    @property
    def flow_shape(self) -> tuple[int, int]:
        """(C, D), the shape of the flow's state."""
        return self.config.horizon, self.spec.action_dim

    @property
    def _executed_shape(self) -> tuple[int, int]:
        """(H, A), the shape of what is executed."""
        return num_executed(self.config), self.spec.action_dim

    def executed(self, x: Tensor) -> Tensor:
        """The part (..., H, A) of a flow state (..., C, D) that becomes the executed actions."""
        return x[..., : num_executed(self.config), : self.spec.action_dim]

    @torch.no_grad()
    def decode(self, context: Any, noise: Float[Tensor, "n c d"]) -> Float[Tensor, "n h a"]:
        """The actions that the noise-free flow makes of ``noise``."""
        end = integrate(partial(self.step_inputs, context), self.transition, noise)
        return self._actions(end)

    def add_heads(self, features: int, critic: nn.Sequential | None = None) -> None:
        """As ``ActorCritic.add_heads``, and the one-step head (FQL), if the config asks for it."""
        super().add_heads(features, critic)
        if width := getattr(self.config, "one_step_width", 0):
            self.one_step = OneStepHead(features, self.flow_shape, self._executed_shape, width)
        if most := getattr(self.config, "thoughts", 0):
            self.thinker = Thinker(features, self.config.thought_width, most)

    def look(self, obs: Obs) -> Any:
        """What the denoising steps need of obs, before a thought."""
        raise NotImplementedError

    def after_thought(self, context: Any, z: Float[Tensor, "n *k w"]) -> Any:
        """The context of N observations after thinking ended in z; or in K places, for K chunks."""
        raise NotImplementedError

    def encode(self, obs: Obs) -> Any:
        """The context of the denoising steps, after a thought without noise."""
        context = self.look(obs)
        if self.thinker is None:
            return context
        return self.after_thought(context, self.thinker.settled(context.seen)[0])

    @property
    def imitation_noise(self) -> int:
        """See ``policy.DrawsNoise``: that of thoughts."""
        return 0 if self.thinker is None else self.thinker.most * self.thinker.width

    @property
    def acts_in_one_step(self) -> bool:
        """Whether the one-step head acts in place of the flow."""
        return self.one_step is not None and bool(self.one_step.ready)

    def one_step_actions(
        self, features: Float[Tensor, "n f"], noise: Float[Tensor, "n c d"]
    ) -> Float[Tensor, "n h a"]:
        """What the one-step head makes of the flow's initial noise, not yet clamped."""
        assert self.one_step is not None
        return self.normalize_action.inverse(self.one_step(features, noise))

    @torch.no_grad()
    def propose(self, obs: Obs, count: int, generator: Generators) -> Float[Tensor, "n count h a"]:
        """``count`` noise-free chunks for each observation, from as many draws of initial noise."""
        context = self.encode(obs)
        return self._proposals(context, self._draw(len(obs), count, generator, obs.proprio.device))

    def _draw(self, n: int, count: int, generator: Generators, device: torch.device) -> Tensor:
        """(N, count, C, D) standard normal noise; each of ``count`` is a draw for all rows."""
        shape = (n, *self.flow_shape)
        return torch.stack([randn(shape, generator, device) for _ in range(count)], dim=1)

    def _proposals(self, context: Any, noise: Float[Tensor, "n count c d"]) -> Tensor:
        """The noise-free chunks (N, count, H, A) of standard normal noise."""
        # All proposals of an observation share its context: they are K points of its flow.
        n, count = noise.shape[:2]
        x = self.start_noise * noise
        for k, t in enumerate(timesteps(self.transition.num_steps, x.device)):
            velocity = self.step_inputs(context, x, t.expand(n, count))[0]
            x = self.transition.ode_step(x, velocity, k)
        return self._actions(x)

    @property
    def noise_count(self) -> int:
        """Draws of initial noise that a noise-free chunk takes: one for each proposal."""
        return self.config.proposals if self.chooses else 1

    @torch.no_grad()
    def noise_free(self, obs: Obs, noise: Float[Tensor, "n count c d"]) -> Float[Tensor, "n h a"]:
        """How the policy acts in evaluation and on a robot, as a function of its noise.

        Args:
            obs: N observations.
            noise: standard normal; ``count`` is ``noise_count``.
        """
        context = self.encode(obs)
        # With a chooser it is the best of the proposals.
        if self.chooses:
            assert self.chooser is not None
            return self.chooser.best(obs, self._proposals(context, noise))
        # Otherwise one path, from noise that a noise policy may choose.
        features = self.features(context)
        start = self.start_noise * noise[:, 0]
        if self.steer is not None:
            start = with_executed(noise[:, 0], self.steer.mean(features))
        # A one-step head that has learned takes the place of the path.
        if self.acts_in_one_step:
            return self.one_step_actions(features, start).clamp(-1.0, 1.0)
        return self.decode(context, start)

    @torch.no_grad()
    def sample(self, obs: Obs, *, generator: Generators, mode: Mode) -> ActionSample:
        """See ``Actor.sample``."""
        if mode == "eval":
            # A noise policy that chooses all of the noise leaves nothing to draw.
            chosen = self.steer is not None and self.flow_shape == self._executed_shape
            noise = obs.proprio.new_zeros(len(obs), 1, *self.flow_shape)
            if not chosen:
                noise = self._draw(len(obs), self.noise_count, generator, obs.proprio.device)
            return ActionSample(self.noise_free(obs, noise))

        # Encode the observation once, and draw the initial noise of the path.
        context = self.encode(obs)
        features = self.features(context)
        noise = initial_noise(self, features, generator, mode)
        if self.acts_in_one_step:
            return ActionSample(self.one_step_actions(features, noise).clamp(-1.0, 1.0))

        # A policy that thinks draws its thoughts first; the path depends on the last of them.
        acting = context
        thoughts: tuple[Tensor, ...] = ()
        logprobs_of_thoughts: list[Tensor] = []
        if self.thinker is not None:
            thought = self.thinker.draw(context.seen, generator)
            thoughts = thought.latents, thought.count
            logprobs_of_thoughts = [thought.logprob]
            acting = self.after_thought(context, self.thinker.last(*thoughts))

        # Take K denoising steps. Stochastic steps are trained later, the others follow the ODE.
        x = noise
        steps = self.transition.num_steps
        stochastic = self._draw_stochastic(len(obs), generator).to(x.device)
        path = [x]
        logprobs = []
        for k, t in enumerate(timesteps(steps, x.device)):
            velocity, log_std = self.step_inputs(acting, x[:, None], t.expand(len(obs), 1))
            x, logprob = self._step(x, velocity, log_std, k, stochastic[:, k], generator)
            path.append(x)
            logprobs.append(logprob)

        # Keep the whole path (N, K+1, C, D): training computes its probability again.
        trace = DenoisingTrace(torch.stack(path, dim=1), stochastic, *thoughts)
        logprob = torch.cat([torch.stack(logprobs, dim=1), *logprobs_of_thoughts], dim=1)
        return ActionSample(self._actions(x), trace, logprob, self.value(obs, context))

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
        # The transition is applied to the executed part (N, H, A) alone.
        old = self.executed(x)
        # In a block of low precision the net's outputs are coarse; their density is not.
        v = self.executed(velocity[:, 0]).to(x.dtype)
        log_std = None if log_std is None else self.executed(log_std[:, 0]).to(x.dtype)
        noise = randn(old.shape, generator, x.device)
        new = self.transition.step(old, v, k, noise, stochastic, log_std)
        logprob = self.transition.log_prob(old, new, v, k, log_std)
        # The rest of the flow's state takes a step of the ODE.
        x = with_executed(self.transition.ode_step(x, velocity[:, 0], k), new)
        return x, torch.where(stochastic, logprob, 0.0)

    def _draw_stochastic(self, n: int, generator: Generators) -> Tensor:
        """(N, K) bool: the steps of each row that draw noise."""
        steps = self.transition.num_steps
        noisy = self.transition.num_noisy
        return draw_stochastic_steps(n, steps, self.trained_steps, generator, noisy)

    def _actions(self, x: Tensor) -> Tensor:
        """The actions (..., H, A) in [-1, 1] of the path's end (..., C, D)."""
        return self.normalize_action.inverse(self.executed(x)).clamp(-1.0, 1.0)

    def evaluate(self, obs: Obs, trace: DenoisingTrace) -> PolicyEval:
        """See ``ScoresPaths.evaluate``; only the trained steps are computed.

        It is one pass over all of them, or one after the other where the flow's state has a rest
        that these parameters lead elsewhere. The density N(0, I) of the initial noise is not among
        the K log-probabilities. It has no parameters, so it cancels in every ratio and adds nothing
        to a gradient.
        """
        context = self.encode(obs)
        acting = context
        if self.thinker is not None:
            acting = self.after_thought(context, self.thinker.last(*_thoughts(trace)))
        n, steps = trace.stochastic.shape
        # Gather the trained steps of each row, in their order: k is (N, trained).
        most = steps if self.trained_steps == "all" else 1
        trained = min(most, self.transition.num_noisy)
        order = trace.stochastic.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        k = order[:, :trained]
        row = torch.arange(n, device=k.device)[:, None]
        stochastic = trace.stochastic[row, k]
        if self.trained_steps == "all" and self.flow_shape != self._executed_shape:
            x, v, log_std = self._replay(acting, trace.x, trained)
        else:
            # One pass of the network over all of them.
            x = trace.x[row, k]
            v, log_std = self.step_inputs(acting, x, timesteps(steps, x.device)[k])
        x = self.executed(x)
        x_next = self.executed(trace.x[row, k + 1])
        v = self.executed(v)
        log_std = None if log_std is None else self.executed(log_std)
        # The log-probability of each step, put back at its place k among all K.
        scored = torch.where(stochastic, self.transition.log_prob(x, x_next, v, k, log_std), 0.0)
        logprob = torch.zeros(n, steps, dtype=scored.dtype, device=x.device).scatter(1, k, scored)
        # The entropy is the mean over the trained steps, per dimension of the chunk.
        entropy = torch.where(stochastic, self.transition.entropy(x, v, k, log_std), 0.0).sum(1)
        entropy = entropy / stochastic.sum(1).clamp_min(1) / (x.shape[2] * x.shape[3])
        # Thoughts are a part of the decision.
        if self.thinker is not None:
            thought = self.thinker.score(context.seen, *_thoughts(trace))
            logprob = torch.cat([logprob, thought], dim=1)
        return PolicyEval(logprob, entropy, self.value(obs, context))

    def _replay(
        self, context: Any, path: Float[Tensor, "n k1 c d"], count: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The first ``count`` steps of a path whose executed part is given.

        Returns:
            The states (N, count, C, D), whose rest is where these parameters lead it, and the step
            inputs there.
        """
        steps = self.transition.num_steps
        x = path[:, 0]
        states: list[Tensor] = []
        velocities: list[Tensor] = []
        log_stds: list[Tensor] = []
        for k, t in enumerate(timesteps(steps, x.device)[:count]):
            velocity, log_std = self.step_inputs(context, x[:, None], t.expand(len(x), 1))
            states.append(x)
            velocities.append(velocity[:, 0])
            if log_std is not None:
                log_stds.append(log_std[:, 0])
            ode_step = self.transition.ode_step(x, velocity[:, 0], k)
            x = with_executed(ode_step, self.executed(path[:, k + 1]))
        log_std = torch.stack(log_stds, dim=1) if log_stds else None
        return torch.stack(states, dim=1), torch.stack(velocities, dim=1), log_std


def _thoughts(trace: DenoisingTrace) -> tuple[Tensor, Tensor]:
    """Thoughts (N, J, W) and their number (N,) of a policy that thinks."""
    assert trace.thoughts is not None and trace.thought_count is not None
    return trace.thoughts, trace.thought_count


def pad(x: Tensor, shape: tuple[int, int]) -> Tensor:
    """Pads a tensor (..., h, a) with zeros at the end of both dims, up to (..., C, D)."""
    rows, columns = shape
    return nn.functional.pad(x, (0, columns - x.shape[-1], 0, rows - x.shape[-2]))
