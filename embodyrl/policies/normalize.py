"""Feature normalisation, part of the policy and so of every checkpoint."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Normalizer(nn.Module):
    """Standardises features with statistics that were set once from data; the identity until then."""

    mean: Tensor
    std: Tensor

    def __init__(self, dim: int, min_std: float = 1e-2, clip: float = 10.0) -> None:
        super().__init__()
        self.min_std = min_std
        self.clip = clip
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("std", torch.ones(dim))

    @torch.no_grad()
    def fit(self, data: Tensor) -> None:
        """Takes mean and standard deviation of (B, dim) data; dims that hardly vary get ``min_std``."""
        self.mean.copy_(data.mean(0))
        self.std.copy_(data.std(0, correction=0).clamp_min(self.min_std))

    @property
    def fitted(self) -> bool:
        """Whether statistics were set."""
        return bool((self.mean != 0).any() or (self.std != 1).any())

    def forward(self, x: Tensor) -> Tensor:
        """Standardised and clipped, so that a value never seen in the data cannot blow up the net."""
        return ((x - self.mean) / self.std).clamp(-self.clip, self.clip)

    def inverse(self, x: Tensor) -> Tensor:
        """Back to the data's units (not clipped)."""
        return x * self.std + self.mean

    def log_det(self, x: Tensor) -> Tensor:
        """(N,) log |d inverse / dx| of x (N, H, dim): what turns a density of x into one in the data's units."""
        return self.std.log().sum().mul(x.shape[-2]).expand(x.shape[:-2])


class TanhSquash(nn.Module):
    """Actions in (-1, 1) as the tanh of unbounded ones, in the place of a ``Normalizer``."""

    def fit(self, data: Tensor) -> None:
        """Nothing to do: the units are fixed."""

    def forward(self, actions: Tensor) -> Tensor:
        """Atanh, of actions kept 1e-4 away from the ends, where it is infinite."""
        return torch.atanh(actions.clamp(-1 + 1e-4, 1 - 1e-4))

    def inverse(self, x: Tensor) -> Tensor:
        """Tanh."""
        return torch.tanh(x)

    def log_det(self, x: Tensor) -> Tensor:
        """(N,) log |d tanh(x) / dx| of x (N, H, A).

        log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2x)) is finite for every x; the left side is
        not beyond |x| = 9.
        """
        return (2.0 * (math.log(2.0) - x - F.softplus(-2.0 * x))).sum(dim=(-2, -1))
