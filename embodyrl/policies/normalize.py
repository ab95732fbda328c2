"""Normalisation of inputs and actions. It is part of the policy, and so of every checkpoint."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Normalizer(nn.Module):
    """Subtracts the mean and divides by the standard deviation of the data.

    Until ``fit`` sets these statistics it changes nothing (but clips).

    Args:
        dim: number of features.
        min_std: smallest standard deviation, for features that hardly vary in the data.
        clip: normalised features are clipped to [-clip, clip].
    """

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
        """Sets the statistics to those of ``data`` (B, dim)."""
        self.mean.copy_(data.mean(0))
        self.std.copy_(data.std(0, correction=0).clamp_min(self.min_std))

    @property
    def fitted(self) -> bool:
        """Whether ``fit`` has set the statistics."""
        return bool((self.mean != 0).any() or (self.std != 1).any())

    def forward(self, x: Tensor) -> Tensor:
        """Normalises and clips, so that values far from the data cannot disturb the network."""
        return ((x - self.mean) / self.std).clamp(-self.clip, self.clip)

    def inverse(self, x: Tensor) -> Tensor:
        """Back to the data's units (not clipped)."""
        return x * self.std + self.mean

    def log_det(self, x: Tensor) -> Tensor:
        """(N,) log |d inverse(x) / dx| of x (N, H, dim).

        Subtracting it from the log-density of x gives the log-density in the data's units.
        """
        return self.std.log().sum().mul(x.shape[-2]).expand(x.shape[:-2])


class TanhSquash(nn.Module):
    """Maps unbounded numbers to actions in (-1, 1) by tanh; used in place of a ``Normalizer``."""

    def fit(self, data: Tensor) -> None:
        """Does nothing: the units are fixed."""

    def forward(self, actions: Tensor) -> Tensor:
        """Atanh of the actions, which are kept 1e-4 away from -1 and 1, where it is infinite."""
        return torch.atanh(actions.clamp(-1 + 1e-4, 1 - 1e-4))

    def inverse(self, x: Tensor) -> Tensor:
        """Tanh."""
        return torch.tanh(x)

    def log_det(self, x: Tensor) -> Tensor:
        """(N,) log |d tanh(x) / dx| of x (N, H, A).

        Computed as 2 (log 2 - x - softplus(-2x)), which is finite for every x. The equal
        log(1 - tanh(x)^2) is minus infinity in float32 beyond |x| = 9.
        """
        return (2.0 * (math.log(2.0) - x - F.softplus(-2.0 * x))).sum(dim=(-2, -1))
