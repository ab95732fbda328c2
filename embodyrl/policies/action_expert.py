"""The action expert: a transformer that turns a noisy action chunk and the context into a velocity."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


@dataclass
class Context:
    """What the denoising steps share: computed once per observation.

    Attributes:
        keys, values: per layer (N, heads, C, d/heads), of the C context tokens.
        bias: (N, 1, 1, 1, C), minus infinity at padding.
        pooled: (N, d), added to the time embedding.
    """

    keys: list[Tensor]
    values: list[Tensor]
    bias: Tensor
    pooled: Tensor


class ActionExpert(nn.Module):
    """Self-attention over action tokens with the context as a prefix, modulated by time (adaLN-single, DiT).

    Several denoising steps of one observation are scored in one call, against one copy of the
    context's keys.
    """

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        horizon: int,
        action_dim: int,
        patch: int,
        noise: bool = False,
    ) -> None:
        super().__init__()
        if horizon % patch:
            raise ValueError(f"action_patch {patch} does not divide horizon {horizon}.")
        self.patch = patch
        self.heads = heads
        self.embed = nn.Linear(patch * action_dim, width)
        self.position = nn.Parameter(torch.randn(horizon // patch, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.modulate = nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, patch * action_dim)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        if noise:
            self.noise = nn.Linear(width, patch * action_dim)
            nn.init.zeros_(self.noise.weight)
            nn.init.zeros_(self.noise.bias)

    def prefix(
        self,
        tokens: Float[Tensor, "n c d"],
        mask: Float[Tensor, "n c"],
        pooled: Float[Tensor, "n d"],
    ) -> Context:
        """The context's keys and values for every layer."""
        pairs = [block.context(tokens) for block in self.blocks]  # type: ignore[operator]
        bias = torch.zeros_like(mask).masked_fill(mask == 0, -math.inf)[:, None, None, None, :]
        return Context([k for k, _ in pairs], [v for _, v in pairs], bias, pooled)

    def forward(
        self, context: Context, x: Float[Tensor, "n k h a"], t: Float[Tensor, "n k *p"]
    ) -> Float[Tensor, "n k h a"]:
        """The velocity at K noisy chunks per observation.

        Args:
            context: of N observations.
            x: (N, K, H, A) noisy chunks.
            t: (N, K) their times, 1 is noise and 0 is data; or (N, K, P), each of the H / patch
                tokens its own.
        """
        return self.head(self._features(context, x, t)).reshape(x.shape)

    def with_noise(
        self, context: Context, x: Float[Tensor, "n k h a"], t: Float[Tensor, "n k"]
    ) -> tuple[Float[Tensor, "n k h a"], Float[Tensor, "n k h a"]]:
        """The velocity, and the unbounded output that ``flow.squash_log_std`` takes; zero until it is trained."""
        features = self._features(context, x, t)
        return self.head(features).reshape(x.shape), self.noise(features).reshape(x.shape)

    def _features(self, context: Context, x: Tensor, t: Tensor) -> Tensor:
        n, k, h, a = x.shape
        tokens = self.embed(x.reshape(n, k, h // self.patch, self.patch * a)) + self.position
        t = t[..., None] if t.ndim == 2 else t
        condition = self.time(sinusoid(t, tokens.shape[-1])) + context.pooled[:, None, None]
        modulation = self.modulate(F.silu(condition))
        for i, block in enumerate(self.blocks):
            tokens = block(tokens, modulation, context.keys[i], context.values[i], context.bias)
        return self.norm(tokens)


class _Block(nn.Module):
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
        self.modulation = nn.Parameter(torch.zeros(6 * width))

    def context(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.context_kv(self.norm_context(tokens)).chunk(2, dim=-1)
        split = (*tokens.shape[:2], self.heads, -1)
        return keys.reshape(split).transpose(1, 2), values.reshape(split).transpose(1, 2)

    def forward(
        self, x: Tensor, modulation: Tensor, keys: Tensor, values: Tensor, bias: Tensor
    ) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = (modulation + self.modulation).chunk(
            6, dim=-1
        )
        y = self.norm1(x) * (1 + scale1) + shift1
        x = x + (1 + gate1) * self.out(self._attend(y, keys, values, bias))
        y = self.norm2(x) * (1 + scale2) + shift2
        return x + (1 + gate2) * self.mlp(y)

    def _attend(self, y: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        # Tokens of one denoising step see the context and one another, never another step's.
        n, k, p, d = y.shape
        q, own_k, own_v = (
            self.qkv(y).reshape(n, k, p, 3, self.heads, d // self.heads).permute(3, 0, 1, 4, 2, 5)
        )
        to_context = torch.einsum("nkhpe,nhce->nkhpc", q, keys) + bias
        to_own = q @ own_k.transpose(-1, -2)
        weights = (
            torch.cat([to_context, to_own], dim=-1)
            .mul(1 / math.sqrt(d // self.heads))
            .softmax(dim=-1)
        )
        c = keys.shape[2]
        mixed = (
            torch.einsum("nkhpc,nhce->nkhpe", weights[..., :c], values) + weights[..., c:] @ own_v
        )
        return mixed.transpose(2, 3).reshape(n, k, p, d)


def sinusoid(t: Float[Tensor, "*n"], width: int) -> Float[Tensor, "*n d"]:
    """Sinusoidal features of times in [0, 1], with periods from 4 down to 0.004 (as pi0, arXiv:2410.24164)."""
    half = width // 2
    periods = 4.0 * (0.004 / 4.0) ** torch.linspace(0, 1, half, device=t.device, dtype=t.dtype)
    angle = 2 * math.pi * t[..., None] / periods
    return torch.cat([angle.sin(), angle.cos()], dim=-1)
