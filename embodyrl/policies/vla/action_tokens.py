"""Actions in the units of OpenVLA: between quantiles of the data, and as tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class QuantileScale(nn.Module):
    """Maps the range between two quantiles of the data to [-1, 1], for each of D dims.

    Args:
        statistics: ``q01`` and ``q99``, lists of D numbers, and perhaps ``mask``: dims without it
            are left as they are, as a rule the gripper.
    """

    low: Tensor
    high: Tensor
    mask: Tensor

    def __init__(self, statistics: dict[str, Any]) -> None:
        super().__init__()
        low = torch.tensor(statistics["q01"], dtype=torch.float32)
        self.register_buffer("low", low)
        self.register_buffer("high", torch.tensor(statistics["q99"], dtype=torch.float32))
        mask = statistics.get("mask", [True] * len(low))
        self.register_buffer("mask", torch.tensor(mask, dtype=torch.bool))

    @torch.no_grad()
    def fit(self, data: Tensor) -> None:
        """Sets the quantiles to those of ``data`` (B, D); the mask stays."""
        quantiles = torch.tensor([0.01, 0.99], dtype=torch.float64, device=data.device)
        low, high = torch.quantile(data.double(), quantiles, dim=0).float()
        self.low.copy_(low)
        self.high.copy_(high)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises (..., D) and clips to [-1, 1]. A dim that never changes becomes 0."""
        scaled = 2.0 * (x - self.low) / (self.high - self.low + 1e-8) - 1.0
        scaled = torch.where(self.low == self.high, torch.zeros_like(x), scaled)
        return torch.where(self.mask, scaled, x).clamp(-1.0, 1.0)

    def inverse(self, x: Tensor) -> Tensor:
        """Back to the data's units."""
        scaled = 0.5 * (x + 1.0) * (self.high - self.low) + self.low
        return torch.where(self.mask, scaled, x)


class ActionTokens(nn.Module):
    """Actions (..., A) to bin numbers and back, as OpenVLA's ``ActionTokenizer`` does.

    ``count`` edges at equal distances in [-1, 1] leave count - 1 intervals. The last number, which
    only an action of 1 or more has, stands for the last interval too.

    Args:
        statistics: of the actions, see ``QuantileScale``.
        count: number of edges, and of tokens.
    """

    edges: Tensor

    def __init__(self, statistics: dict[str, Any], count: int) -> None:
        super().__init__()
        self.scale = QuantileScale(statistics)
        edges = torch.linspace(-1, 1, count, dtype=torch.float64)
        self.register_buffer("edges", edges, persistent=False)

    def fit(self, actions: Tensor) -> None:
        """Sets the statistics to those of actions (B, A)."""
        self.scale.fit(actions)

    def forward(self, actions: Tensor) -> Tensor:
        """The number of the interval, as a float."""
        scaled = self.scale(actions).double().contiguous()
        return (torch.bucketize(scaled, self.edges, right=True) - 1).float()

    def inverse(self, number: Tensor) -> Tensor:
        """The middle of the interval."""
        first = number.long().clamp(0, len(self.edges) - 2)
        middle = (self.edges[first] + self.edges[first + 1]) / 2.0
        return self.scale.inverse(middle.float())
