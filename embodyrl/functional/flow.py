"""Flow matching and the stochastic transitions that give a flow policy a likelihood: pure functions of tensors.

Convention: t = 1 is noise, t = 0 is data, x_t = (1-t) a + t e, velocity u = e - a, K steps of d =
1/K on t_k = 1 - k/K. From x at time t the velocity predicts the data x0 = x - t v and the noise x1
= x + (1-t) v.

    kind              mean of x_{k+1}                             std                  paper
    ode               x - d v                                     0
    flow_sde          (1-t+d) x0 + (t - d - s^2 d/(2t)) x1        s sqrt(d)            Flow-GRPO, pi_RL
    flow_cps          (1-t+d) x0 + (t-d) cos(pi eta/2) x1         (t-d) sin(pi eta/2)  Flow-CPS
    flow_noise        x - d v                                     learned              ReinFlow, pi_RL
    flow_sde_learned  (1-t+d) x0 + (t - d - std^2/(2t)) x1        learned              SAC Flow

with s = eta sqrt(t/(1-t)). Flow-GRPO is arXiv:2505.05470, pi_RL 2510.25889, Flow-CPS 2509.05952,
ReinFlow 2505.22094, SAC Flow 2509.25756. The drift of Flow-SDE keeps the marginals of the ODE,
whoever chose the std. ``DenoisingTransition.mean_std`` is the only place that holds this table; sampling,
scoring and entropy all read it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from embodyrl.errors import UserError, did_you_mean

Kind = Literal["ode", "flow_sde", "flow_cps", "flow_noise", "flow_sde_learned"]
LEARNED = ("flow_noise", "flow_sde_learned")
"""The kinds whose std the policy predicts."""
Generators = torch.Generator | Sequence[torch.Generator]

LOG_2PI = math.log(2.0 * math.pi)


def randn(
    shape: Sequence[int], generator: Generators, device: torch.device | str = "cpu"
) -> Tensor:
    """Standard normal noise (float32).

    Args:
        shape: the leading dimension is the batch.
        generator: one for the whole batch, or one per row: then a row's noise depends on its own
            generator alone, whatever the batch size and the order of the rows. May live on another
            device than ``device``.
        device: where the result lives.
    """
    return _draw(torch.randn, shape, generator, device)


def _draw(
    fn: object, shape: Sequence[int], generator: Generators, device: torch.device | str
) -> Tensor:
    if isinstance(generator, torch.Generator):
        return fn(tuple(shape), generator=generator, device=generator.device).to(device)  # type: ignore[operator]
    if len(generator) != shape[0]:
        raise ValueError(f"{len(generator)} generators were given for {shape[0]} rows.")
    if not generator:
        return torch.empty(tuple(shape), device=device)
    rows = [fn(tuple(shape[1:]), generator=g, device=g.device) for g in generator]  # type: ignore[operator]
    return torch.stack(rows).to(device)


def timesteps(num_steps: int, device: torch.device | str = "cpu") -> Float[Tensor, " k"]:
    """t_k = 1 - k/K for k = 0 .. K-1, the time at the start of each denoising step."""
    return 1.0 - torch.arange(num_steps, device=device, dtype=torch.float32) / num_steps


def sample_training_time(
    batch: int, generator: Generators, schedule: str = "uniform", device: torch.device | str = "cpu"
) -> Float[Tensor, " b"]:
    """Times in (0, 1] to train the velocity at.

    Args:
        batch: B.
        generator: one, or one per row.
        schedule: ``"uniform"``, or ``"beta"``: .001 + .999 Beta(1.5, 1), more weight near the noise
            (pi0, arXiv:2410.24164).
        device: where the result lives.

    Raises:
        UserError: unknown schedule.
    """
    u = 1.0 - _draw(torch.rand, (batch,), generator, device)  # torch.rand is in [0, 1)
    if schedule == "uniform":
        return u
    if schedule == "beta":
        return 0.001 + 0.999 * u.pow(
            2.0 / 3.0
        )  # the inverse distribution function of Beta(1.5, 1) is u^(1/1.5)
    raise UserError(
        f"There is no time schedule {schedule!r}. {did_you_mean(schedule, ('uniform', 'beta'))}"
    )


def flow_matching_pair(
    actions: Float[Tensor, "b h a"], t: Float[Tensor, " b"], noise: Float[Tensor, "b h a"]
) -> tuple[Float[Tensor, "b h a"], Float[Tensor, "b h a"]]:
    """x_t = (1-t) a + t e and the velocity e - a that flow matching regresses on (arXiv:2210.02747)."""
    t = t.view(-1, *[1] * (actions.ndim - 1))
    return (1.0 - t) * actions + t * noise, noise - actions


def draw_stochastic_steps(
    n: int, num_steps: int, mode: str, generator: Generators, num_noisy: int | None = None
) -> Bool[Tensor, "n k"]:
    """Which denoising steps draw noise and are trained, for each of n envs on its own.

    Args:
        n: envs.
        num_steps: K.
        mode: ``"all"``, or ``"one"`` step per env, drawn uniformly.
        generator: one, or one per env.
        num_noisy: only the first that many steps may be chosen (``DenoisingTransition.num_noisy``); None
            means all K.

    Raises:
        UserError: unknown mode.
    """
    count = num_steps if num_noisy is None else num_noisy
    index = torch.arange(num_steps)
    if mode == "all":
        return (index < count).repeat(n, 1)
    if mode == "one":
        chosen = (
            _draw(torch.rand, (n,), generator, "cpu") * count
        ).long()  # no step is chosen where count is 0
        return (index == chosen[:, None]) & (index < count)
    raise UserError(
        f"Stochastic steps cannot be drawn as {mode!r}. {did_you_mean(mode, ('all', 'one'))}"
    )


def squash_log_std(raw: Tensor, std_min: float, std_max: float) -> Tensor:
    """An unbounded network output to the log-std of Flow-Noise, inside [std_min, std_max] (pi_RL, arXiv:2510.25889).

    The log-variance is interpolated by (1 + tanh) / 2. A fixed range is not invariant to K: scale
    it as 1/sqrt(K).
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
    noisy = std > 0
    std = torch.where(noisy, std, 1.0)
    log_prob = -0.5 * ((x - mean) / std) ** 2 - std.log() - 0.5 * LOG_2PI
    return _joint(log_prob, noisy, mask)


def _joint(per_dim: Tensor, noisy: Tensor, mask: Tensor | None) -> Tensor:
    keep = noisy if mask is None else noisy & mask
    return torch.where(keep, per_dim, 0.0).sum(dim=(-2, -1))


def initial_log_prob(x: Float[Tensor, "*b h a"], mask: Tensor | None = None) -> Float[Tensor, "*b"]:
    """Log N(x; 0, I) of the initial noise, the first factor of a path's density; it cancels in every ratio."""
    return gaussian_log_prob(x, torch.zeros_like(x), torch.ones_like(x), mask)


@dataclass(frozen=True)
class DenoisingTransition:
    """One denoising step x_k -> x_{k+1} as a Gaussian; see the table at the top of the module.

    In every method ``x``, ``velocity`` and ``log_std`` are (*b, H, A), and ``k`` is an int or an
    integer tensor that broadcasts against (*b,): a batch at one step is (B, H, A) with an int, all
    steps at once are (B, K, H, A) with ``torch.arange(K)``. Results are float32 at least.

    Attributes:
        kind: of transition.
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
        if self.kind in LEARNED:
            return self.num_steps
        if self.kind == "ode" or self.eta == 0:
            return 0
        return self.num_steps - (self.kind == "flow_cps")  # Flow-CPS ends without noise

    def mean_std(
        self, x: Tensor, velocity: Tensor, k: int | Tensor, log_std: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean, of x's shape, and std, broadcastable to it, of x_{k+1}.

        Args:
            x: (*b, H, A) before the step.
            velocity: at x and t_k.
            k: step.
            log_std: log of the learned std, for the ``LEARNED`` kinds alone.
        """
        if (log_std is None) == (self.kind in LEARNED):
            raise ValueError(
                f"log_std is {'needed' if log_std is None else 'not used'} by a {self.kind} "
                "transition."
            )
        t = self._time(x, k)
        d = 1.0 / self.num_steps
        if self.kind in ("ode", "flow_noise"):
            std = torch.zeros_like(t) if log_std is None else log_std.exp()
            return x - d * velocity, std
        x0 = x - t * velocity
        x1 = x + (1.0 - t) * velocity
        after = (t - d).clamp_min(0.0)
        if self.kind == "flow_cps":
            angle = 0.5 * math.pi * self.eta
            return (1.0 - after) * x0 + after * math.cos(angle) * x1, after * math.sin(angle)
        if log_std is not None:
            std = log_std.exp()
        else:  # s is infinite at t = 1, so the first step divides by 1 - t of the next one, which is d
            std = self.eta * (t / (1.0 - t).clamp_min(d) * d).sqrt()
        return (1.0 - after) * x0 + (after - std**2 / (2.0 * t)) * x1, std

    def step(
        self,
        x: Tensor,
        velocity: Tensor,
        k: int | Tensor,
        noise: Tensor,
        stochastic: Tensor,
        log_std: Tensor | None = None,
    ) -> Tensor:
        """x_{k+1}: rows (*b,) where ``stochastic`` take this transition with ``noise``, the others the ODE."""
        mean, std = self.mean_std(x, velocity, k, log_std)
        return torch.where(
            stochastic[..., None, None], mean + std * noise, x - velocity / self.num_steps
        )

    def log_prob(
        self,
        x: Tensor,
        x_next: Tensor,
        velocity: Tensor,
        k: int | Tensor,
        log_std: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """(*b,) log-density of x_next, joint over H and A; 0 for steps without noise.

        ``mask`` (bool, broadcastable to x) leaves dims out; use the same one at rollout and in
        training.
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
        """(*b,) entropy of the step in nats, joint over H and A; 0 for steps without noise."""
        mean, std = self.mean_std(x, velocity, k, log_std)
        std = std.expand_as(mean)
        noisy = std > 0
        return _joint(torch.where(noisy, std, 1.0).log() + 0.5 * (1.0 + LOG_2PI), noisy, mask)

    def _time(self, x: Tensor, k: int | Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        if isinstance(k, int):
            if not 0 <= k < self.num_steps:
                raise ValueError(f"There is no step {k}; they are 0 to {self.num_steps - 1}.")
            return torch.full((1, 1), 1.0 - k / self.num_steps, dtype=dtype, device=x.device)
        return 1.0 - k.to(x.device, dtype)[..., None, None] / self.num_steps
