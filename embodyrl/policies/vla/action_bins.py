"""Actions as the numbers of equal bins between two quantiles of the data."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ActionBins(nn.Module):
    """Maps actions (..., A) to bin numbers, and back.

    The bins divide the range between the 1% and the 99% quantile of the data; before ``fit``, the
    range [-1, 1].

    Args:
        dims: A.
        count: bins per dim.
    """

    low: Tensor
    high: Tensor

    def __init__(self, dims: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.register_buffer("low", -torch.ones(dims))
        self.register_buffer("high", torch.ones(dims))

    @torch.no_grad()
    def fit(self, actions: Tensor) -> None:
        """Sets the range from actions (B, A); it is at least .1 wide in every dim."""
        quantiles = torch.tensor([0.01, 0.99], dtype=torch.float64)
        low, high = torch.quantile(actions.double(), quantiles, dim=0).float()
        middle = (low + high) / 2
        half_width = ((high - low) / 2).clamp_min(0.05)
        self.low.copy_(middle - half_width)
        self.high.copy_(middle + half_width)

    def forward(self, actions: Tensor) -> Tensor:
        """The number of the bin whose middle is nearest, as a float."""
        fraction = (actions - self.low) / (self.high - self.low)
        return (fraction * self.count - 0.5).round().clamp(0, self.count - 1)

    def inverse(self, number: Tensor) -> Tensor:
        """The middle of the bin."""
        return self.low + (number + 0.5) / self.count * (self.high - self.low)
