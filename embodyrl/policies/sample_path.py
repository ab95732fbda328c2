"""The path from noise to action as one differentiable function: what SAC's reparameterised gradient goes through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from embodyrl.functional.flow import LOG_2PI, DenoisingTransition, Generators, randn, timesteps

Velocity = Callable[[Tensor, Tensor], Tensor]
"""Noisy chunks (N, K, H, A) and the times (N, K, H) of their actions to the velocity."""

StepInputs = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Noisy chunks (N, K, H, A) and times (N, K) to velocity and log-std (None for kinds that do not learn it)."""


@dataclass
class Path:
    """A sampled path.

    Attributes:
        x: (N, K+1, H, A), x[:, 0] the noise.
        logprob: (N, K) log-density of each step; with gradients into the std, and none through the
            noise.
    """

    x: Float[Tensor, "n k1 h a"]
    logprob: Float[Tensor, "n k"]

    @property
    def end(self) -> Float[Tensor, "n h a"]:
        """x_K."""
        return self.x[:, -1]


def sample_path(
    step_inputs: StepInputs, transition: DenoisingTransition, start: Tensor, generator: Generators
) -> Path:
    """K steps x_{k+1} = mean_k + std_k e_k from ``start`` (N, H, A), with gradients through all of them.

    Each row has its own noise. log N(x_{k+1}; mean_k, std_k^2) is log N(e_k; 0, I) - log(std_k),
    whose second term is what an entropy bonus acts on. All steps must have a std above 0.
    """
    x = start
    path = [start]
    logprobs = []
    for k, t in enumerate(timesteps(transition.num_steps, start.device)):
        velocity, log_std = step_inputs(x[:, None], t.expand(len(x), 1))
        mean, std = transition.mean_std(
            x, velocity[:, 0], k, None if log_std is None else log_std[:, 0]
        )
        noise = randn(x.shape, generator, x.device)
        x = mean + std * noise
        logprobs.append(-(0.5 * noise**2 + std.log() + 0.5 * LOG_2PI).sum(dim=(-2, -1)))
        path.append(x)
    return Path(torch.stack(path, dim=1), torch.stack(logprobs, dim=1))


def integrate(step_inputs: StepInputs, num_steps: int, start: Tensor) -> Tensor:
    """The noise-free end (N, H, A) of the path from ``start``: K Euler steps of the ODE."""
    x = start
    for t in timesteps(num_steps, start.device):
        x = x - step_inputs(x[:, None], t.expand(len(x), 1))[0][:, 0] / num_steps
    return x


def given_prefix(x: Tensor, t: Tensor, clean: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """Noisy chunks whose first actions are given: those are clean, and their time is that of data.

    Args:
        x: (N, H, A) noisy chunks.
        t: (N,) their times.
        clean: (N, H, A), of which the first actions are read.
        given: (N,) how many.

    Returns:
        (N, H, A) chunks, and (N, H) times.
    """
    known = torch.arange(x.shape[1], device=x.device) < given[:, None]
    return torch.where(known[..., None], clean, x), torch.where(known, 0.0, t[:, None])


def integrate_after(
    velocity: Velocity, num_steps: int, start: Tensor, clean: Tensor, given: int
) -> Tensor:
    """``integrate`` with the first ``given`` actions held at those of ``clean`` (arXiv:2512.05964)."""
    x = start
    count = torch.full((len(start),), given, device=start.device)
    for t in timesteps(num_steps, start.device):
        x, times = given_prefix(x, t.expand(len(x)), clean, count)
        x = x - velocity(x[:, None], times[:, None])[:, 0] / num_steps
    return given_prefix(x, torch.zeros_like(count, dtype=x.dtype), clean, count)[0]
