"""``ChunkTransformer``: from a few frames and a chunk of actions to the frame after the chunk.

A policy sees one frame per chunk, so the model predicts one frame per chunk, in one forward pass.
An episode then takes five to ten predictions instead of fifty, and errors grow over fewer steps.
The number of the chunk's actions that count is an input (1 to H), so the same weights can also
predict every single step.

The context is the episode's first frame, the previous frame and the current one. The first frame
shows what the hand may cover now. The frames are stacked along the channels, because they show the
same place (Alonso et al., arXiv:2405.12399). The tokens are the cells of the latent map, and the
actions modulate the layers (Peebles and Xie, arXiv:2212.09748).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from embodyrl.world_models.nets.saved_network import SavedNetwork, record_arguments

CONTEXT = 3
"""Frames: first of the episode, previous, current."""


@runtime_checkable
class FlowMap(Protocol):
    """A backbone with its own way of sampling, and its own training targets for it.

    See ``AnyFlowBackbone``.
    """

    def denoise(
        self,
        context: Tensor,
        proprio: Tensor,
        actions: Tensor,
        count: Tensor,
        noise: Tensor,
        sample: Tensor,
        steps: int,
    ) -> tuple[Tensor, Tensor]:
        """The changes of latent and proprio that the noise ``sample`` becomes."""
        ...

    def shortcut_targets(
        self,
        context: Tensor,
        proprio: Tensor,
        actions: Tensor,
        count: Tensor,
        noise: Tensor,
        change: Tensor,
        sample: Tensor,
        time: Tensor,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Samples, their times t, the times r to go to, and the target changes."""
        ...


class ChunkTransformer(SavedNetwork):
    """Predicts the change of latent and proprio over a chunk, in normalised units.

    Args:
        num_views: V cameras.
        latent_channels: c.
        rows: of a latent map.
        columns: of a latent map.
        action_dim: A.
        horizon: H, the most actions of a chunk.
        proprio_dim: P.
        width: d of the transformer.
        layers: of it.
        heads: of its attention.
        stochastic: also denoises: from a noisy change it predicts the clean one (flow matching,
            arXiv:2210.02747, with data prediction). Without a noisy change it predicts the mean,
            as an untrained one does.
        body_dim: D, of the full state, which a ``StateModel`` gives before and after the chunk; 0
            without one.
    """

    @record_arguments
    def __init__(
        self,
        num_views: int = 1,
        latent_channels: int = 16,
        rows: int = 8,
        columns: int = 8,
        action_dim: int = 4,
        horizon: int = 5,
        proprio_dim: int = 7,
        width: int = 128,
        layers: int = 5,
        heads: int = 4,
        stochastic: bool = False,
        body_dim: int = 0,
    ) -> None:
        super().__init__()
        if body_dim:
            self.embed_body = nn.Sequential(
                nn.Linear(2 * body_dim, width), nn.SiLU(), nn.Linear(width, width)
            )
            nn.init.zeros_(self.embed_body[-1].weight)  # pyright: ignore[reportArgumentType]
            nn.init.zeros_(self.embed_body[-1].bias)  # pyright: ignore[reportArgumentType]
        if stochastic:
            self.embed_sample = nn.Conv2d(latent_channels, width, 1, bias=False)
            self.embed_time = nn.Linear(2, width, bias=False)
            nn.init.zeros_(self.embed_sample.weight)
            nn.init.zeros_(self.embed_time.weight)
        self.embed = nn.Conv2d(CONTEXT * latent_channels, width, 1)
        self.position = nn.Parameter(torch.randn(num_views, width, rows, columns) * 0.02)
        self.condition = nn.Sequential(
            nn.Linear(horizon * (action_dim + 1) + proprio_dim + 1, width),
            nn.SiLU(),
            nn.Linear(width, width),
        )
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.to_latent = nn.Linear(width, latent_channels)
        self.to_proprio = nn.Sequential(
            nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, proprio_dim)
        )
        for last in (self.to_latent, self.to_proprio[-1]):
            nn.init.zeros_(last.weight)  # pyright: ignore[reportArgumentType]
            nn.init.zeros_(last.bias)  # pyright: ignore[reportArgumentType]

    def forward(
        self,
        context: Float[Tensor, "b 3 v c y x"],
        proprio: Float[Tensor, "b p"],
        actions: Float[Tensor, "b h a"],
        count: Int[Tensor, " b"],
        noise: Float[Tensor, " b"],
        sample: Float[Tensor, "b v c y x"] | None = None,
        time: Float[Tensor, " b"] | None = None,
        full_states: Float[Tensor, "b e"] | None = None,
    ) -> tuple[Float[Tensor, "b v c y x"], Float[Tensor, "b p"]]:
        """Changes of latent and proprio.

        Args:
            context: latents of the first, the previous and the current frame.
            proprio: normalised.
            actions: of the chunk; those from ``count`` on are ignored.
            count: how many are executed, 1 to H.
            noise: level of the noise that was added to ``context``, 0 for none.
            sample: a noisy change of the latent: (1 - time) times the change plus ``time`` times
                Gaussian noise. None asks for the mean, and so does a row of zeros with time 0.
            time: 1 is noise and 0 is data.
            full_states: (B, 2 D) the full states before and after the chunk, normalised.
        """
        batch, _, views = context.shape[:3]
        # What conditions the layers: actions with a flag of whether they count, proprio, noise.
        executed = torch.arange(actions.shape[1], device=actions.device) < count[:, None]
        taken = torch.cat(
            [actions * executed[..., None], executed[..., None].to(actions.dtype)], dim=-1
        )
        condition = self.condition(torch.cat([taken.flatten(1), proprio, noise[:, None]], dim=1))
        # The frames of the context, stacked along the channels.
        stacked = context.permute(0, 2, 1, 3, 4, 5).flatten(2, 3)  # b v (3 c) y x
        x = self.embed(stacked.flatten(0, 1)).unflatten(0, (batch, views))
        # The noisy change and its time, and the full states.
        if sample is not None and time is not None:
            x = x + self.embed_sample(sample.flatten(0, 1)).unflatten(0, (batch, views))
            condition = condition + self.embed_time(
                torch.stack([time, (time > 0).to(time.dtype)], dim=1)
            )
        if full_states is not None:
            condition = condition + self.embed_body(full_states)
        # The transformer. Everything between the products has their precision, because on a CPU
        # that is most of the time.
        x = (x + self.position.to(x.dtype)).permute(0, 1, 3, 4, 2)  # b v y x d
        for block in self.blocks:
            x = block(x, condition)
        # The changes; that of proprio comes from all cells and the condition.
        x = self.norm(x)
        change = self.to_latent(x).permute(0, 1, 4, 2, 3)
        return change, self.to_proprio(torch.cat([x.mean((1, 2, 3)), condition], dim=1))


class Block(nn.Module):
    """Attention among all cells, a 3x3 depthwise convolution and an MLP.

    The condition scales, shifts and gates them (adaLN-zero).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulate = nn.Linear(width, 6 * width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.local = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)
        )
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)

    def forward(
        self, x: Float[Tensor, "b v y x d"], condition: Float[Tensor, "b d"]
    ) -> Float[Tensor, "b v y x d"]:
        """The same shape."""
        batch, views, rows, columns, width = x.shape
        shift, scale, gate, shift2, scale2, gate2 = (
            m[:, None] for m in self.modulate(F.silu(condition)).chunk(6, dim=1)
        )
        # Attention.
        tokens = x.flatten(1, 3)
        y = self.norm(tokens) * (1 + scale) + shift
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        tokens = tokens + gate * self.project(attention(q, k, v).transpose(1, 2).flatten(2))
        # The MLP, with the convolution's neighbourhood added to its input.
        y = self.norm(tokens) * (1 + scale2) + shift2
        maps = y.unflatten(1, (batch and views, rows, columns)).flatten(0, 1).permute(0, 3, 1, 2)
        local = self.local(maps).permute(0, 2, 3, 1).reshape(batch, -1, width)
        return (tokens + gate2 * self.mlp(y + local)).unflatten(1, (views, rows, columns))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention.

    On a CPU it is written out: the fused kernel's backward pass is 10 times slower in bfloat16.
    """
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v)
    return (q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2)).softmax(dim=-1) @ v
