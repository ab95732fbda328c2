"""The action expert: a transformer that predicts the velocity of a noisy action chunk.

Data flow, for N observations, K denoising steps each, C context tokens of width d, chunks (H, A)
and P = H / patch action tokens per chunk:

    context tokens (N, C, d)  --prefix-->   keys and values of every layer, once per observation
    noisy chunks (N, K, H, A) --embed-->    action tokens (N, K, P, d)
    times (N, K)              --modulate--> shift, scale and gate of every layer
    action tokens             --blocks-->   attend to the context and to their own chunk
    action tokens             --head-->     velocity (N, K, H, A)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


@dataclass
class Context:
    """What all denoising steps of an observation share; it is computed once.

    Attributes:
        keys: per layer (N, heads, C, d/heads), of the C context tokens.
        values: per layer, of the same shape.
        bias: (N, 1, 1, 1, C), added to the attention scores; minus infinity at padding.
        pooled: (N, d), a summary of the observation that is added to the time embedding; or
            (N, K, d), one for each of K noisy chunks.
        seen: (N, d), the summary before thinking (``policies.thinker``); None where nothing thinks.
    """

    keys: list[Tensor]
    values: list[Tensor]
    bias: Tensor
    pooled: Tensor
    seen: Tensor | None = None


class ActionExpert(nn.Module):
    """Self-attention over action tokens with the context as a prefix.

    The time of a denoising step modulates every layer (adaLN-single, as in DiT-style transformers).
    One call takes several denoising steps of an observation. They share one copy of the context's
    keys and values. The size of the step modulates them too, where the expert is told it.

    Args:
        width: d, of the tokens.
        layers: number of blocks.
        heads: attention heads.
        horizon: H, actions in a chunk.
        action_dim: A.
        patch: actions per token; must divide ``horizon``.
        noise: add a second output head, for learned noise.
        shortcut: tell it the size of the step (``StepSize``).
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
        shortcut: bool = False,
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
        # Outputs start at zero: an untrained expert predicts the velocity 0.
        self.head = nn.Linear(width, patch * action_dim)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        if noise:
            self.noise = nn.Linear(width, patch * action_dim)
            nn.init.zeros_(self.noise.weight)
            nn.init.zeros_(self.noise.bias)
        if shortcut:
            self.step = StepSize(width, width)

    def prefix(
        self,
        tokens: Float[Tensor, "n c d"],
        mask: Float[Tensor, "n c"],
        pooled: Float[Tensor, "n d"],
    ) -> Context:
        """The context's keys and values for every layer.

        Args:
            tokens: (N, C, d) context tokens.
            mask: (N, C), 1 at real tokens and 0 at padding.
            pooled: (N, d) summary of the observation.
        """
        pairs = [block.context(tokens) for block in self.blocks]  # type: ignore[operator]
        bias = torch.zeros_like(mask).masked_fill(mask == 0, -math.inf)[:, None, None, None, :]
        return Context([k for k, _ in pairs], [v for _, v in pairs], bias, pooled)

    def forward(
        self,
        context: Context,
        x: Float[Tensor, "n k h a"],
        t: Float[Tensor, "n k *p"],
        d: Tensor | None = None,
    ) -> Float[Tensor, "n k h a"]:
        """The velocity at K noisy chunks per observation.

        Args:
            context: of N observations.
            x: (N, K, H, A) noisy chunks.
            t: (N, K) their times, 1 is noise and 0 is data; or (N, K, P), a time for each of the
                P = H / patch action tokens.
            d: (N, K) the sizes of their steps, or what broadcasts to it; for ``shortcut``.
        """
        return self.head(self._features(context, x, t, d)).reshape(x.shape)

    def with_noise(
        self,
        context: Context,
        x: Float[Tensor, "n k h a"],
        t: Float[Tensor, "n k"],
        d: Tensor | None = None,
    ) -> tuple[Float[Tensor, "n k h a"], Float[Tensor, "n k h a"]]:
        """The velocity, and the raw output that ``flow.squash_log_std`` maps to a log-std.

        The raw output is zero until it is trained.
        """
        features = self._features(context, x, t, d)
        return self.head(features).reshape(x.shape), self.noise(features).reshape(x.shape)

    def _features(self, context: Context, x: Tensor, t: Tensor, d: Tensor | None) -> Tensor:
        """The last hidden states (N, K, P, d) of the action tokens."""
        # Each patch of actions becomes a token.
        n, k, h, a = x.shape
        tokens = self.embed(x.reshape(n, k, h // self.patch, self.patch * a)) + self.position
        # Time and observation give one modulation (N, K, 1 or P, 6 d), which all blocks share.
        t = t[..., None] if t.ndim == 2 else t
        # Times that all observations share (a tensor that was expanded) are embedded once.
        t = t[:1] if t.stride(0) == 0 else t
        pooled = context.pooled if context.pooled.ndim == 3 else context.pooled[:, None]
        condition = self.time(sinusoid(t, tokens.shape[-1])) + pooled[:, :, None]
        # So does the size of the step, where it is told.
        if d is not None:
            condition = condition + self.step(d)[..., None, :]
        modulation = self.modulate(F.silu(condition))
        for i, block in enumerate(self.blocks):
            tokens = block(tokens, modulation, context.keys[i], context.values[i], context.bias)
        return self.norm(tokens)


class _Block(nn.Module):
    """One layer: attention, then an MLP, each normed, modulated and added to its input."""

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
        # This layer's own offset to the modulation that all layers share.
        self.modulation = nn.Parameter(torch.zeros(6 * width))

    def context(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (N, heads, C, d/heads) of context tokens (N, C, d)."""
        keys, values = self.context_kv(self.norm_context(tokens)).chunk(2, dim=-1)
        per_head = (*tokens.shape[:2], self.heads, -1)
        return keys.reshape(per_head).transpose(1, 2), values.reshape(per_head).transpose(1, 2)

    def forward(
        self, x: Tensor, modulation: Tensor, keys: Tensor, values: Tensor, bias: Tensor
    ) -> Tensor:
        """Action tokens (N, K, P, d) to action tokens; ``modulation`` is (N, K, 1 or P, 6 d)."""
        modulation = modulation + self.modulation
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.chunk(6, dim=-1)
        # Attention, then the MLP. Gates start at 1: a zero modulation is a plain transformer.
        y = self.norm1(x) * (1 + scale1) + shift1
        x = x + (1 + gate1) * self.out(self._attend(y, keys, values, bias))
        y = self.norm2(x) * (1 + scale2) + shift2
        return x + (1 + gate2) * self.mlp(y)

    def _attend(self, y: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """Attention of action tokens (N, K, P, d) to the context and to their own chunk.

        The K denoising steps of an observation do not see each other.
        """
        # Queries, keys and values of the action tokens, each (N, K, heads, P, d/heads).
        n, k, p, d = y.shape
        head_dim = d // self.heads
        qkv = self.qkv(y).reshape(n, k, p, 3, self.heads, head_dim).permute(3, 0, 1, 4, 2, 5)
        q, own_keys, own_values = qkv
        # Scores for the C context tokens, then for the P tokens of the same chunk; one softmax
        # over both.
        context_scores = torch.einsum("nkhpe,nhce->nkhpc", q, keys) + bias
        own_scores = q @ own_keys.transpose(-1, -2)
        scores = torch.cat([context_scores, own_scores], dim=-1)
        weights = scores.mul(1 / math.sqrt(head_dim)).softmax(dim=-1)
        # The values, weighted in the same two parts.
        c = keys.shape[2]
        from_context = torch.einsum("nkhpc,nhce->nkhpe", weights[..., :c], values)
        from_own = weights[..., c:] @ own_values
        return (from_context + from_own).transpose(2, 3).reshape(n, k, p, d)


class StepSize(nn.Module):
    """What a velocity net is told of the size d of its step, as an offset of a hidden layer.

    offset(d) = W (sinusoid(d) - sinusoid(0)). It is 0 at d = 0, the ordinary flow. W begins at 0, so
    that a fresh offset changes nothing, and a trained flow can learn shortcuts.

    Args:
        features: of the sinusoid.
        width: of the hidden layer.
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.features = features
        self.linear = nn.Linear(features, width, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, d: Float[Tensor, "*n"]) -> Float[Tensor, "*n w"]:
        """The offsets of step sizes in [0, 1]."""
        told = sinusoid(d, self.features) - sinusoid(torch.zeros_like(d), self.features)
        return self.linear(told)


def sinusoid(t: Float[Tensor, "*n"], width: int) -> Float[Tensor, "*n d"]:
    """Sine and cosine features of times in [0, 1] (as in pi0, arXiv:2410.24164).

    The ``width`` / 2 periods lie between 4 and 0.004 on a logarithmic scale.
    """
    spacing = torch.linspace(0, 1, width // 2, device=t.device, dtype=t.dtype)
    periods = 4.0 * (0.004 / 4.0) ** spacing
    angle = 2 * math.pi * t[..., None] / periods
    return torch.cat([angle.sin(), angle.cos()], dim=-1)
