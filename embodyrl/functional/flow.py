"""Flow matching, and the stochastic denoising steps that give a flow policy a likelihood.

Everything here is a pure function of tensors. Convention, with action a and noise e ~ N(0, I):

    time       t = 1 is noise and t = 0 is data
    path       x_t = (1-t) a + t e
    velocity   u = e - a; v is the network's estimate of it
    steps      K steps of size d = 1/K, which start at t_k = 1 - k/K, k = 0 .. K-1
    estimates  from x at time t: the data x0 = x - t v, and the noise x1 = x + (1-t) v

An ODE step has no likelihood. A transition replaces it by a Gaussian, N(mean, std^2 I):

    kind              mean of x_{k+1}                         std                  paper
    ode               x - d v                                 0
    flow_sde          (1-t+d) x0 + (t - d - s^2 d/(2t)) x1    s sqrt(d)            Flow-GRPO, pi_RL
    flow_cps          (1-t+d) x0 + (t-d) cos(pi eta/2) x1     (t-d) sin(pi eta/2)  Flow-CPS
    flow_noise        x - d v                                 learned              ReinFlow, pi_RL
    flow_sde_learned  (1-t+d) x0 + (t - d - std^2/(2t)) x1    learned              SAC Flow

with s = eta sqrt(t/(1-t)). Flow-GRPO is arXiv:2505.05470, pi_RL 2510.25889, Flow-CPS 2509.05952,
ReinFlow 2505.22094, SAC Flow 2509.25756. The drift of Flow-SDE keeps the marginal distributions of
the ODE for any std. ``DenoisingTransition.mean_std`` is the only code that implements this table.
Sampling, scoring and entropy all call it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from embodyrl.errors import UserError, did_you_mean

Kind = Literal["ode", "flow_sde", "flow_cps", "flow_noise", "flow_sde_learned"]
LEARNED_STD = ("flow_noise", "flow_sde_learned")
"""The kinds whose std the policy predicts."""
Generators = torch.Generator | Sequence[torch.Generator]
"""One generator for a whole batch, or one for each row of it."""

LOG_2PI = math.log(2.0 * math.pi)


def randn(
    shape: Sequence[int], generator: Generators, device: torch.device | str = "cpu"
) -> Tensor:
    """Standard normal noise (float32).

    Args:
        shape: the leading dimension is the batch.
        generator: one for the whole batch, or one per row. With one per row, a row's noise depends
            on its own generator alone, not on the batch size or the order of the rows. It may live
            on another device than ``device``.
        device: where the result lives.
    """
    return _random_tensor(torch.randn, shape, generator, device)


def random_uniform(
    shape: Sequence[int], generator: Generators, device: torch.device | str = "cpu"
) -> Tensor:
    """Uniform numbers in [0, 1) (float32); see ``randn``."""
    return _random_tensor(torch.rand, shape, generator, device)


def _random_tensor(
    distribution: Callable[..., Tensor],
    shape: Sequence[int],
    generator: Generators,
    device: torch.device | str,
) -> Tensor:
    """``torch.rand`` or ``torch.randn`` from one generator, or from one for each row."""
    # Numbers are drawn on the generator's own device and then moved, so that a seed gives the same
    # numbers wherever the result is used.
    if isinstance(generator, torch.Generator):
        drawn = distribution(tuple(shape), generator=generator, device=generator.device)
        return drawn.to(device)
    if len(generator) != shape[0]:
        raise ValueError(f"{len(generator)} generators were given for {shape[0]} rows.")
    if not generator:
        return torch.empty(tuple(shape), device=device)
    rows = [distribution(tuple(shape[1:]), generator=g, device=g.device) for g in generator]
    return torch.stack(rows).to(device)


def complete_noise(
    chosen: Float[Tensor, "n h a"], shape: tuple[int, int], generator: Generators
) -> Float[Tensor, "n c d"]:
    """The flow's initial state with ``chosen`` in its executed part, and N(0, I) in the rest.

    The flow was trained with noise everywhere. Nothing is drawn where there is no rest.
    """
    rows, columns = chosen.shape[1:]
    if (rows, columns) == shape:
        return chosen
    noise = randn((len(chosen), *shape), generator, chosen.device).to(chosen.dtype)
    noise[:, :rows, :columns] = chosen
    return noise


def timesteps(num_steps: int, device: torch.device | str = "cpu") -> Float[Tensor, " k"]:
    """t_k = 1 - k/K for k = 0 .. K-1, the time at the start of each denoising step.

    They are rounded once, from float64, as LeRobot's and openpi's samplers do.
    """
    k = torch.arange(num_steps, device=device, dtype=torch.float64)
    return (1.0 + k * (-1.0 / num_steps)).float()


def sample_training_time(
    batch: int, generator: Generators, schedule: str = "uniform", device: torch.device | str = "cpu"
) -> Float[Tensor, " b"]:
    """Random times in (0, 1], at which the velocity is trained.

    Args:
        batch: B.
        generator: one, or one per row.
        schedule: ``"uniform"``, or ``"beta"``: .001 + .999 Beta(1.5, 1), which gives more weight to
            times near the noise (pi0, arXiv:2410.24164).
        device: where the result lives.

    Raises:
        UserError: unknown schedule.
    """
    # torch.rand is in [0, 1); its complement is in (0, 1].
    u = 1.0 - random_uniform((batch,), generator, device)
    if schedule == "uniform":
        return u
    if schedule == "beta":
        # Beta(1.5, 1) has the distribution function x^1.5. Its inverse, u^(1/1.5), samples it.
        return 0.001 + 0.999 * u.pow(2.0 / 3.0)
    raise UserError(
        f"There is no time schedule {schedule!r}. {did_you_mean(schedule, ('uniform', 'beta'))}"
    )


def flow_matching_pair(
    actions: Float[Tensor, "b h a"], t: Float[Tensor, " b"], noise: Float[Tensor, "b h a"]
) -> tuple[Float[Tensor, "b h a"], Float[Tensor, "b h a"]]:
    """The input x_t = (1-t) a + t e and the target e - a of flow matching (arXiv:2210.02747)."""
    t = t.view(-1, *[1] * (actions.ndim - 1))  # (B, 1, 1), to broadcast over H and A
    return (1.0 - t) * actions + t * noise, noise - actions


def draw_stochastic_steps(
    n: int, num_steps: int, mode: str, generator: Generators, num_noisy: int | None = None
) -> Bool[Tensor, "n k"]:
    """Chooses for each of n envs the denoising steps that draw noise and are trained.

    Args:
        n: envs.
        num_steps: K.
        mode: ``"all"``, or ``"one"`` step per env, drawn uniformly.
        generator: one, or one per env.
        num_noisy: only the first ``num_noisy`` steps may be chosen (see
            ``DenoisingTransition.num_noisy``); None means all K.

    Raises:
        UserError: unknown mode.
    """
    count = num_steps if num_noisy is None else num_noisy
    index = torch.arange(num_steps)
    if mode == "all":
        return (index < count).repeat(n, 1)
    if mode == "one":
        chosen = (random_uniform((n,), generator) * count).long()
        # If count is 0 there is nothing to choose, and the second condition is always False.
        return (index == chosen[:, None]) & (index < count)
    raise UserError(
        f"Stochastic steps cannot be drawn as {mode!r}. {did_you_mean(mode, ('all', 'one'))}"
    )


def squash_log_std(raw: Tensor, std_min: float, std_max: float) -> Tensor:
    """Maps an unbounded network output to a log-std inside [log std_min, log std_max].

    This is the learned noise of Flow-Noise (pi_RL, arXiv:2510.25889). The log-std is interpolated
    by (1 + tanh(raw)) / 2. The noise of a whole path grows with the number of steps K, so the
    caller scales the range as 1/sqrt(K).
    """
    low = math.log(std_min)
    high = math.log(std_max)
    return low + (high - low) * 0.5 * (1.0 + torch.tanh(raw))


def gaussian_log_prob(x: Tensor, mean: Tensor, std: Tensor, mask: Tensor | None = None) -> Tensor:
    """Log N(x; mean, std^2) summed over the last two dims (H, A); zero where std is 0.

    Args:
        x: (..., H, A).
        mean: broadcastable to x.
        std: broadcastable to x.
        mask: bool, broadcastable to x; False leaves a dim out (padding, or actions after the end of
            the episode).
    """
    # Where std is 0 the logarithm is infinite. A std of 1 in its place keeps the gradient finite;
    # those entries are then left out of the sum.
    noisy = std > 0
    std = torch.where(noisy, std, 1.0)
    log_prob = -0.5 * ((x - mean) / std) ** 2 - std.log() - 0.5 * LOG_2PI
    return _sum_over_chunk(log_prob, noisy, mask)


def _sum_over_chunk(per_dim: Tensor, noisy: Tensor, mask: Tensor | None) -> Tensor:
    """Sums (..., H, A) over H and A, for the entries with noise that ``mask`` keeps."""
    keep = noisy if mask is None else noisy & mask
    return torch.where(keep, per_dim, 0.0).sum(dim=(-2, -1))


def initial_log_prob(x: Float[Tensor, "*b h a"], mask: Tensor | None = None) -> Float[Tensor, "*b"]:
    """Log N(x; 0, I) of the initial noise.

    This is the first factor of a path's density. It has no parameters, so it cancels in the ratio
    of two policies.
    """
    return gaussian_log_prob(x, torch.zeros_like(x), torch.ones_like(x), mask)


@dataclass(frozen=True)
class DenoisingTransition:
    """One denoising step x_k -> x_{k+1} as a Gaussian; see the table at the top of the module.

    In every method ``x``, ``velocity`` and ``log_std`` have the shape (*b, H, A). ``k`` is an int,
    or an integer tensor that broadcasts against (*b,):

        a batch at one step       x (B, H, A)       k an int
        all steps of a batch      x (B, K, H, A)    k torch.arange(K)

    Results are at least float32.

    Attributes:
        kind: row of the table.
        num_steps: K.
        eta: noise level of ``flow_sde`` and ``flow_cps``; 0 makes both the ODE. ``flow_cps`` takes
            at most 1.
    """

    kind: Kind = "flow_sde"
    num_steps: int = 4
    eta: float = 0.5

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UserError(
                f"There is no transition {self.kind!r}. {did_you_mean(self.kind, get_args(Kind))}"
            )
        if self.num_steps < 1:
            raise UserError(
                f"The number of denoising steps is {self.num_steps}; it must be at least 1."
            )
        if self.eta < 0 or (self.kind == "flow_cps" and self.eta > 1):
            raise UserError(
                f"eta is {self.eta}; it must not be negative, and for flow_cps not above 1."
            )

    @property
    def num_noisy(self) -> int:
        """How many steps, counted from the first, have a std above 0 and so can be trained."""
        if self.kind in LEARNED_STD:
            return self.num_steps
        if self.kind == "ode" or self.eta == 0:
            return 0
        if self.kind == "flow_cps":
            return self.num_steps - 1  # its last step has t - d = 0, and so no noise
        return self.num_steps

    def mean_std(
        self, x: Tensor, velocity: Tensor, k: int | Tensor, log_std: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean and std of x_{k+1}: the table at the top of the module.

        Args:
            x: (*b, H, A) before the step.
            velocity: v at x and t_k.
            k: step.
            log_std: log of the learned std; only the kinds in ``LEARNED_STD`` take it.

        Returns:
            The mean, of x's shape, and the std, broadcastable to it.
        """
        if (log_std is None) == (self.kind in LEARNED_STD):
            raise ValueError(
                f"log_std is {'needed' if log_std is None else 'not used'} by a {self.kind} "
                "transition."
            )
        if isinstance(k, int) and not 0 <= k < self.num_steps:
            raise ValueError(f"There is no step {k}; they are 0 to {self.num_steps - 1}.")
        t = self._time(x, k)
        d = 1.0 / self.num_steps
        if self.kind in ("ode", "flow_noise"):
            # The mean is the Euler step of the ODE.
            std = torch.zeros_like(t) if log_std is None else log_std.exp()
            return x - d * velocity, std

        # The other kinds mix the estimated data x0 and noise x1. An ODE step ends at the time
        # t_next = t - d, with the weights 1 - t_next for x0 and t_next for x1.
        x0 = x - t * velocity
        x1 = x + (1.0 - t) * velocity
        # It is exactly 0 after the last step, which t - d is not for every K.
        t_next = self._time(x, k + 1)
        if self.kind == "flow_cps":
            # A part of x1 is replaced by new noise: cos^2 + sin^2 = 1 keeps the noise level.
            angle = 0.5 * math.pi * self.eta
            mean = (1.0 - t_next) * x0 + t_next * math.cos(angle) * x1
            return mean, t_next * math.sin(angle)
        if log_std is not None:
            std = log_std.exp()
        else:
            # s = eta sqrt(t / (1-t)) is infinite at t = 1. There 1 - t is replaced by d, its value
            # at the next step.
            std = self.eta * (t / (1.0 - t).clamp_min(d) * d).sqrt()
        # The drift -std^2 / (2t) x1 compensates the added noise.
        mean = (1.0 - t_next) * x0 + (t_next - std**2 / (2.0 * t)) * x1
        return mean, std

    def step(
        self,
        x: Tensor,
        velocity: Tensor,
        k: int | Tensor,
        noise: Tensor,
        stochastic: Tensor,
        log_std: Tensor | None = None,
    ) -> Tensor:
        """The next state x_{k+1}.

        Rows where ``stochastic`` (*b,) is True take this transition with ``noise`` (*b, H, A). The
        others take an Euler step of the ODE.
        """
        mean, std = self.mean_std(x, velocity, k, log_std)
        ode_step = self.ode_step(x, velocity, k)
        return torch.where(stochastic[..., None, None], mean + std * noise, ode_step)

    def ode_step(self, x: Tensor, velocity: Tensor, k: int | Tensor) -> Tensor:
        """x_{k+1} without noise: an Euler step x - v / K of the ODE.

        The factor 1 / K is rounded first, as in LeRobot's sampler: actions are then the same bit
        for bit, and so is every later frame of an episode.
        """
        return x + (-1.0 / self.num_steps) * velocity

    def log_prob(
        self,
        x: Tensor,
        x_next: Tensor,
        velocity: Tensor,
        k: int | Tensor,
        log_std: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """(*b,) log-density of x_next, summed over H and A; 0 for steps without noise.

        ``mask`` (bool, broadcastable to x) leaves dims out. Use the same mask in the rollout and
        in training.
        """
        mean, std = self.mean_std(x, velocity, k, log_std)
        return gaussian_log_prob(x_next, mean, std, mask)

    def entropy(
        self,
        x: Tensor,
        velocity: Tensor,
        k: int | Tensor,
        log_std: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """(*b,) entropy of the step in nats, summed over H and A; 0 for steps without noise."""
        mean, std = self.mean_std(x, velocity, k, log_std)
        std = std.expand_as(mean)
        noisy = std > 0
        # The entropy of a Gaussian is log(std) + (1 + log 2 pi) / 2 per dimension.
        per_dim = torch.where(noisy, std, 1.0).log() + 0.5 * (1.0 + LOG_2PI)
        return _sum_over_chunk(per_dim, noisy, mask)

    def _time(self, x: Tensor, k: int | Tensor) -> Tensor:
        """t_k = 1 - k/K, with two trailing dims of size 1 that broadcast over H and A."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        if isinstance(k, int):
            return torch.full((1, 1), 1.0 - k / self.num_steps, dtype=dtype, device=x.device)
        return 1.0 - k.to(x.device, dtype)[..., None, None] / self.num_steps
