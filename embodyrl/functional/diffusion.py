"""The denoising steps of a diffusion model as Gaussians.

With a = alpha-bar before a step and b = alpha-bar after it, x = sqrt(a) x0 + sqrt(1-a) e, and the
network's estimates of the data x0 and the noise e:

    step              mean of the next x                        std
    without noise     sqrt(b) x0 + sqrt(1-b) e                  0
    with noise        sqrt(b) x0 + sqrt(1-b-s^2) e'             max(s, noise_min)

with s = eta sqrt((1-b)/(1-a) (1-a/b)). The first is DDIM (arXiv:2010.02502), the second DDPM
(arXiv:2006.11239) for eta = 1. DPPO (arXiv:2409.00588) trains such a chain by PPO, and bounds its
std from below: a small one makes the ratio explode. x0 may be clipped. DDIM, as diffusers has it,
keeps the noise e of the network; DDPM takes the noise e' that goes with the clipped x0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.functional.flow import DenoisingTransition


@dataclass(frozen=True)
class DiffusionTransition(DenoisingTransition):
    """One denoising step of a diffusion model; see the table at the top of the module.

    What the methods call ``velocity`` is here the network's output: noise, or data.

    Attributes:
        kind: always ``"ddim"``.
        eta: 0 is DDIM, 1 is DDPM.
        alphas: K+1 alpha-bars, before each step and after the last.
        noise_min: smallest std of a step with noise, in normalised units.
        clip: largest magnitude of the estimated data.
        predicts: what the network's output is, ``"epsilon"`` (noise) or ``"sample"`` (data).
    """

    kind: Any = "ddim"
    num_steps: int = 1
    eta: float = 1.0
    alphas: tuple[float, ...] = (0.0, 1.0)
    noise_min: float = 0.1
    clip: float = math.inf
    predicts: str = "epsilon"

    def __post_init__(self) -> None:
        if len(self.alphas) != self.num_steps + 1:
            raise ValueError(f"{self.num_steps} steps need {self.num_steps + 1} alphas.")
        if self.predicts not in ("epsilon", "sample"):
            raise UserError(
                f"A diffusion model that predicts {self.predicts!r} is not supported. Use one that "
                "predicts epsilon (noise) or sample (data)."
            )

    @property
    def num_noisy(self) -> int:
        """See ``DenoisingTransition``: DDPM's last step draws no noise of its own."""
        if self.eta == 0:
            return 0
        return self.num_steps if self.noise_min > 0 else self.num_steps - 1

    def mean_std(
        self, x: Tensor, velocity: Tensor, k: int | Tensor, log_std: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean and std of x_{k+1}: the second row of the table."""
        a, b = self._alphas_at(x, k)
        data, _ = self._estimates(x, velocity, a)
        noise = (x - a.sqrt() * data) / (1.0 - a).sqrt()
        std = self.eta * ((1.0 - b) / (1.0 - a) * (1.0 - a / b)).sqrt()
        mean = b.sqrt() * data + (1.0 - b - std**2).clamp_min(0.0).sqrt() * noise
        return mean, std.clamp_min(self.noise_min)

    def ode_step(self, x: Tensor, velocity: Tensor, k: int | Tensor) -> Tensor:
        """x_{k+1} without noise: the first row of the table."""
        a, b = self._alphas_at(x, k)
        # From the estimated data back to the noise of the next step.
        data, noise = self._estimates(x, velocity, a)
        return b.sqrt() * data + (1.0 - b).sqrt() * noise

    def noisy(self, data: Tensor, noise: Tensor, alpha: Tensor) -> Tensor:
        """X = sqrt(a) x0 + sqrt(1-a) e of chunks (B, C, D), at alpha-bars (B,)."""
        a = alpha[:, None, None]
        return a.sqrt() * data + (1.0 - a).sqrt() * noise

    def _estimates(self, x: Tensor, output: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """The clipped data and the noise that the network's output stands for."""
        if self.predicts == "sample":
            data = output
            noise = (x - a.sqrt() * data) / (1.0 - a).sqrt()
        else:
            noise = output
            data = (x - (1.0 - a).sqrt() * noise) / a.sqrt()
        return data.clamp(-self.clip, self.clip), noise

    def _alphas_at(self, x: Tensor, k: int | Tensor) -> tuple[Tensor, Tensor]:
        """Alpha-bar before and after step k, with two trailing dims that broadcast over a chunk."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        alphas = torch.tensor(self.alphas, dtype=dtype, device=x.device)
        # An int is no tensor here, so that the estimate of memory can follow it without data.
        index = k if isinstance(k, int) else k.to(x.device)
        return alphas[index][..., None, None], alphas[index + 1][..., None, None]
