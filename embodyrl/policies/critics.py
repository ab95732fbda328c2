"""Critics of (observation features, action chunk)."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

NORMS = ("none", "layer", "batch")


class Critics(nn.Module):
    """E independent nets, each layer one batched matrix product.

    ``norm="layer"`` bounds the values of actions that were never tried (RLPD, arXiv:2302.02948).
    ``"batch"`` is that of CrossQ (arXiv:1902.05605): with the statistics of a batch of current and
    next pairs, no target net is needed.
    """

    def __init__(
        self, features: int, choice: int, count: int, width: int, layers: int, norm: str
    ) -> None:
        super().__init__()
        sizes = [features + choice] + [width] * layers + [1]
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for a, b in pairwise(sizes):
            bound = 1 / math.sqrt(a)
            self.weights.append(nn.Parameter(torch.empty(count, a, b).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(torch.empty(count, 1, b).uniform_(-bound, bound)))
        self.count = count
        self.norm = norm
        if norm == "batch":
            dims = [features + choice] + [count * width] * layers
            self.norms = nn.ModuleList(nn.BatchNorm1d(dim, momentum=0.01) for dim in dims)

    def forward(
        self, features: Float[Tensor, "b f"], choice: Float[Tensor, "b h a"]
    ) -> Float[Tensor, "e b"]:
        """The value of each choice by each critic."""
        x = torch.cat([features, choice.flatten(1)], dim=-1)
        if self.norm == "batch":
            x = self.norms[0](x)
        x = x.expand(self.count, *x.shape)
        last = len(self.weights) - 1
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x, weight)
            if i < last:
                x = self._normalized(F.relu(x) if self.norm == "batch" else x, i)
                x = x if self.norm == "batch" else F.relu(x)
        return x.squeeze(-1)

    def _normalized(self, x: Tensor, layer: int) -> Tensor:
        if self.norm == "layer":
            return F.layer_norm(x, x.shape[-1:])
        if self.norm == "none":
            return x
        e, b, d = x.shape
        return (
            self.norms[layer + 1](x.transpose(0, 1).reshape(b, e * d)).view(b, e, d).transpose(0, 1)
        )

    @torch.no_grad()
    def follow(self, other: Critics, tau: float) -> None:
        """Moves these weights towards those of ``other`` by the share ``tau``."""
        for mine, theirs in zip(self.parameters(), other.parameters(), strict=True):
            mine.lerp_(theirs, tau)
