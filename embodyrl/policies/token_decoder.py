"""A small transformer that says tokens after an observation.

    context tokens (N, C, d) --prompt--> keys and values of every layer, once per observation
    summary (N, d)           --prompt--> shift, scale and gate of every layer, once per observation
    places (N, L, d)         --layers--> attend to the context, and to the places before them or
                                         to all places --> (N, L, d)

It keeps the keys and values of the places that it has seen, so that a token costs one pass of its
own. The context's tokens do not see each other: what they say together is in the summary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


@dataclass
class LayerCache:
    """Keys and values (N, heads, C + L, d / heads) of one layer, and its modulation (N, 1, 6 d)."""

    keys: Tensor
    values: Tensor
    modulation: Tensor


@dataclass
class TokenCache:
    """What a decoder knows of N observations, and of the places after them."""

    layers: list[LayerCache]


class TokenDecoder(nn.Module):
    """See the module's docstring.

    Args:
        width: d.
        layers: of the transformer.
        heads: attention heads.
    """

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def prompt(self, context: Float[Tensor, "n c d"], summary: Float[Tensor, "n d"]) -> TokenCache:
        """Keys, values and modulations of N observations."""
        return TokenCache([layer.prompt(context, summary) for layer in self.layers])  # type: ignore[operator]

    def forward(
        self,
        cache: TokenCache,
        mask: Float[Tensor, "n k"],
        x: Float[Tensor, "n l d"],
        causal: bool,
    ) -> Float[Tensor, "n l d"]:
        """The last hidden states of L further places, which are appended to ``cache``.

        Args:
            cache: of N observations, and of places before.
            mask: (N, K) of all keys in the cache: 1, and 0 at padding.
            x: the input at L places.
            causal: whether a place sees only those before it.
        """
        n, length = x.shape[:2]
        # Every place sees the keys of the cache that are no padding, and some of the new places.
        sees = (mask > 0)[:, None].expand(n, length, -1)
        among = torch.ones(length, length, dtype=torch.bool, device=x.device)
        among = (among.tril() if causal else among).expand(n, -1, -1)
        bias = torch.zeros(n, 1, length, mask.shape[1] + length, dtype=x.dtype, device=x.device)
        bias.masked_fill_(~torch.cat([sees, among], dim=2)[:, None], -math.inf)
        # The layers; each appends the keys and values of the new places to its cache.
        for i, layer in enumerate(self.layers):
            x, cache.layers[i] = layer(x, cache.layers[i], bias)
        return self.norm(x)


class _Layer(nn.Module):
    """Attention, then an MLP, each normed, modulated by the observation and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm_context = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.context_kv = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        # A zero modulation, as at the start, is a plain transformer.
        self.modulate = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)

    def prompt(self, context: Tensor, summary: Tensor) -> LayerCache:
        """What the layer knows of N observations."""
        keys, values = self.context_kv(self.norm_context(context)).chunk(2, dim=-1)
        modulation = self.modulate(F.silu(summary))[:, None]
        return LayerCache(self._split(keys), self._split(values), modulation)

    def forward(self, x: Tensor, cache: LayerCache, bias: Tensor) -> tuple[Tensor, LayerCache]:
        """Places (N, L, d) to places, and the cache with their keys and values."""
        shift1, scale1, gate1, shift2, scale2, gate2 = cache.modulation.chunk(6, dim=-1)
        # Attention to the context and to the places.
        query, key, value = self.qkv(self.norm1(x) * (1 + scale1) + shift1).chunk(3, dim=-1)
        keys = torch.cat([cache.keys, self._split(key)], dim=2)
        values = torch.cat([cache.values, self._split(value)], dim=2)
        seen = F.scaled_dot_product_attention(self._split(query), keys, values, attn_mask=bias)
        x = x + (1 + gate1) * self.out(seen.transpose(1, 2).flatten(2))
        # The MLP.
        x = x + (1 + gate2) * self.mlp(self.norm2(x) * (1 + scale2) + shift2)
        return x, LayerCache(keys, values, cache.modulation)

    def _split(self, x: Tensor) -> Tensor:
        """(N, L, d) to (N, heads, L, d / heads)."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)
