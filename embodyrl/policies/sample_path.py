"""The path from noise to action as a differentiable function, and without noise.

``sample_path`` is what the reparameterised gradient of SAC goes through; ``integrate`` is the
noise-free path of evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from embodyrl.functional.flow import LOG_2PI, DenoisingTransition, Generators, randn, timesteps

Velocity = Callable[[Tensor, Tensor], Tensor]
"""Noisy chunks (N, K, H, A) and a time for each of their actions (N, K, H) -> velocity."""

StepInputs = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Noisy chunks (N, K, H, A) and their times (N, K) -> velocity and log-std, if it is learned."""


@dataclass
class SampledPath:
    """A path from noise to action.

    Attributes:
        x: (N, K+1, C, D), x[:, 0] the noise and x[:, K] the end.
        logprob: (N, K) log-density of each step. It has gradients into the std, and none through
            the noise.
    """

    x: Float[Tensor, "n k1 c d"]
    logprob: Float[Tensor, "n k"]

    @property
    def end(self) -> Float[Tensor, "n c d"]:
        """x_K, the end of the path."""
        return self.x[:, -1]


def sample_path(
    step_inputs: StepInputs,
    transition: DenoisingTransition,
    start: Float[Tensor, "n c d"],
    generator: Generators,
    executed: Callable[[Tensor], Tensor] = lambda x: x,
) -> SampledPath:
    """K steps x_{k+1} = mean_k + std_k e_k, with gradients through all of them.

    The log-density of a step, log N(x_{k+1}; mean_k, std_k^2), equals
    log N(e_k; 0, I) - log(std_k). An entropy bonus acts on the second term.

    Args:
        step_inputs: the policy's velocity and log-std.
        transition: all its steps must have a std above 0.
        start: (N, C, D) the initial noise.
        generator: of the noise e_k; one, or one per row.
        executed: the part (..., H, A) of (..., C, D) that draws noise and has a density. The rest
            of the flow's state follows the ODE, as when the policy acts.
    """
    x = start
    path = [start]
    logprobs = []
    for k, t in enumerate(timesteps(transition.num_steps, start.device)):
        velocity, log_std = step_inputs(x[:, None], t.expand(len(x), 1))
        # The executed part draws noise.
        velocity = velocity[:, 0]
        log_std = None if log_std is None else executed(log_std[:, 0])
        mean, std = transition.mean_std(executed(x), executed(velocity), k, log_std)
        noise = randn(mean.shape, generator, x.device)
        new = mean + std * noise
        # What is planned beside it takes an Euler step of the ODE.
        x = with_executed(x - velocity / transition.num_steps, new)
        logprobs.append(-(0.5 * noise**2 + std.log() + 0.5 * LOG_2PI).sum(dim=(-2, -1)))
        path.append(x)
    return SampledPath(torch.stack(path, dim=1), torch.stack(logprobs, dim=1))


def with_executed(x: Float[Tensor, "*b c d"], new: Float[Tensor, "*b h a"]) -> Tensor:
    """The flow state x (..., C, D) with ``new`` (..., H, A) in its executed part."""
    if new.shape == x.shape:
        return new
    rows, columns = new.shape[-2:]
    right = torch.cat([new, x[..., :rows, columns:]], dim=-1)
    return torch.cat([right, x[..., rows:, :]], dim=-2)


def integrate(
    step_inputs: StepInputs, transition: DenoisingTransition, start: Float[Tensor, "n h a"]
) -> Float[Tensor, "n h a"]:
    """The noise-free end of the path from ``start``: K steps of the ODE."""
    x = start
    for k, t in enumerate(timesteps(transition.num_steps, start.device)):
        velocity = step_inputs(x[:, None], t.expand(len(x), 1))[0][:, 0]
        x = transition.ode_step(x, velocity, k)
    return x


def given_prefix(x: Tensor, t: Tensor, clean: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces the first actions of noisy chunks by clean ones, and their times by 0.

    Args:
        x: (..., H, A) noisy chunks.
        t: (...) their times.
        clean: (..., H, A) clean chunks.
        given: (...) how many actions of each chunk are replaced.

    Returns:
        (..., H, A) chunks, and (..., H) times.
    """
    known = torch.arange(x.shape[-2], device=x.device) < given[..., None]
    return torch.where(known[..., None], clean, x), torch.where(known, 0.0, t[..., None])


def integrate_after(
    velocity: Velocity, num_steps: int, start: Tensor, clean: Tensor, given: int
) -> Tensor:
    """``integrate`` for chunks whose first ``given`` actions are fixed (arXiv:2512.05964).

    Args:
        velocity: takes a time for each action.
        num_steps: K.
        start: (N, P, H, A) the initial noise of P chunks for each observation.
        clean: the same, or what broadcasts to it; its first ``given`` actions are the fixed ones.
        given: number of fixed actions.

    Returns:
        (N, P, H, A).
    """
    x = start
    count = torch.full(start.shape[:-2], given, device=start.device)
    # The fixed actions are written into the chunk before every step, and once more at the end.
    for t in timesteps(num_steps, start.device):
        x, times = given_prefix(x, t.expand(count.shape), clean, count)
        x = x - velocity(x, times) / num_steps
    return given_prefix(x, torch.zeros_like(count, dtype=x.dtype), clean, count)[0]
