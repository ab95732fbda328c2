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

    Args:
        features: F.
        choice: numbers in a choice, H * A.
        count: E.
        width: of the hidden layers.
        layers: hidden layers.
        norm: one of ``NORMS``.
        prefixes: H, if the value after each action of a choice is learned too; 0 otherwise.
    """

    def __init__(
        self,
        features: int,
        choice: int,
        count: int,
        width: int,
        layers: int,
        norm: str,
        prefixes: int = 0,
    ) -> None:
        super().__init__()
        sizes = [features + choice] + [width] * layers + [1]
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for a, b in pairwise(sizes):
            self.weights.append(nn.Parameter(torch.empty(count, a, b)))
            self.biases.append(nn.Parameter(torch.empty(count, 1, b)))
        self.count = count
        self.norm = norm
        if norm == "batch":
            dims = [features + choice] + [count * width] * layers
            self.norms = nn.ModuleList(nn.BatchNorm1d(dim, momentum=0.01) for dim in dims)
        # An embedding of how many actions are seen. A whole choice has none, so its value is
        # computed as without prefixes.
        self.lengths = nn.Parameter(torch.zeros(count, prefixes - 1, width)) if prefixes else None
        self.forget()

    @torch.no_grad()
    def forget(self, generator: torch.Generator | None = None) -> None:
        """Draws the weights of all layers anew."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            bound = 1 / math.sqrt(weight.shape[1])
            # Drawn on the CPU, where the generator is.
            for part in (weight, bias):
                part.copy_(torch.empty(part.shape).uniform_(-bound, bound, generator=generator))
        if self.lengths is not None:
            self.lengths.zero_()

    def forward(
        self, features: Float[Tensor, "b f"], choice: Float[Tensor, "b h a"]
    ) -> Float[Tensor, "e b"]:
        """The value of each choice by each critic."""
        x = torch.cat([features, choice.flatten(1)], dim=-1)
        if self.norm == "batch":
            x = self.norms[0](x)
        return self._after_first(self._first(x))

    def after_each_action(
        self, features: Float[Tensor, "b f"], choice: Float[Tensor, "b h a"]
    ) -> Float[Tensor, "e b h"]:
        """The value of the first k actions of each choice, k = 1..H; the last is that of all.

        A value sees no action after the k-th (the causal critic of arXiv:2503.03660).
        """
        # Row k of the mask shows the first k + 1 actions.
        b, h, _ = choice.shape
        shown = torch.ones(h, h, dtype=choice.dtype, device=choice.device).tril()
        prefixes = (choice[:, None] * shown[..., None]).flatten(2)
        x = torch.cat([features[:, None].expand(-1, h, -1), prefixes], dim=-1)
        # All prefixes of all choices pass in one batch, with the embedding of their length.
        assert self.lengths is not None
        lengths = F.pad(self.lengths, (0, 0, 0, 1)).repeat(1, b, 1)
        x = self._first(x.flatten(0, 1)) + lengths
        return self._after_first(x).unflatten(1, (b, h))

    def _first(self, x: Float[Tensor, "b d"]) -> Float[Tensor, "e b w"]:
        """What the first layer makes of the input, before its nonlinearity."""
        return torch.baddbmm(self.biases[0], x.expand(self.count, *x.shape), self.weights[0])

    def _after_first(self, x: Float[Tensor, "e b w"]) -> Float[Tensor, "e b"]:
        """The other layers."""
        others = zip(list(self.weights)[1:], list(self.biases)[1:], strict=True)
        for i, (weight, bias) in enumerate(others):
            x = self._normalized(F.relu(x) if self.norm == "batch" else x, i)
            x = x if self.norm == "batch" else F.relu(x)
            x = torch.baddbmm(bias, x, weight)
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
