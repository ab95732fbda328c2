"""The two image encoders of OpenVLA, with the parameter names of timm 0.9.

DINOv2 with registers (arXiv:2304.07193, 2309.16588) and SigLIP (arXiv:2303.15343) are plain vision
transformers. They differ in the tokens beside the patches, in the layer scale and in the pooling
head:

                class token, registers   layer scale   pooling head
    DINOv2      yes                      yes           no
    SigLIP      no                       no            yes (its weights are stored, but not used)

OpenVLA reads the patches after the last but one block, without the final norm. Layer scale is
called ``scale_factor`` there, not ``gamma``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

EPSILON = 1e-6
"""Of every layer norm."""


@dataclass(frozen=True)
class ViTSize:
    """The size of an image encoder.

    Attributes:
        width: of the tokens.
        depth: number of blocks.
        heads: attention heads.
        hidden: width of the MLPs.
        patch: pixels of a patch's side.
        registers: register tokens beside a class token; 0 for none, and no class token.
        scaled: whether blocks have a layer scale.
        pooled: whether there is a pooling head.
    """

    width: int
    depth: int
    heads: int
    hidden: int
    patch: int
    registers: int
    scaled: bool
    pooled: bool


SIZES = {
    "vit_large_patch14_reg4_dinov2.lvd142m": ViTSize(1024, 24, 16, 4096, 14, 4, True, False),
    "vit_so400m_patch14_siglip_224": ViTSize(1152, 27, 16, 4304, 14, 0, False, True),
}
"""timm's name of a model -> its size (timm 0.9.16, models/vision_transformer.py)."""


class VisionTransformer(nn.Module):
    """See the module's docstring.

    Args:
        size: of the encoder.
        image_size: pixels of an image's side, a multiple of the patch.
    """

    def __init__(self, size: ViTSize, image_size: int) -> None:
        super().__init__()
        self.num_prefix_tokens = 1 + size.registers if size.registers else 0
        if size.registers:
            self.cls_token = nn.Parameter(torch.randn(1, 1, size.width) * 1e-6)
            self.reg_token = nn.Parameter(torch.randn(1, size.registers, size.width) * 1e-6)
        patches = (image_size // size.patch) ** 2
        self.pos_embed = nn.Parameter(torch.randn(1, patches, size.width) * 0.02)
        self.patch_embed = PatchEmbed(size)
        self.blocks = nn.ModuleList(EncoderBlock(size) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width, EPSILON)
        self.attn_pool = AttentionPool(size) if size.pooled else None

    def unused_parameters(self) -> list[nn.Parameter]:
        """Weights that a checkpoint holds and ``forward`` does not read."""
        parts = [self.blocks[-1], self.norm, self.attn_pool]
        return [p for part in parts if part is not None for p in part.parameters()]

    def forward(self, images: Float[Tensor, "b 3 s s"]) -> Float[Tensor, "b p w"]:
        """The patches after the last but one block, from normalised images."""
        x = self.patch_embed(images) + self.pos_embed
        # Class token and registers have no position. They stand before the patches.
        if self.num_prefix_tokens:
            before = torch.cat([self.cls_token, self.reg_token], dim=1)
            x = torch.cat([before.expand(len(x), -1, -1), x], dim=1)
        # A VLA reads the last block but one, as it was trained to.
        for block in self.blocks[:-1]:
            x = block(x)
        return x[:, self.num_prefix_tokens :]


class PatchEmbed(nn.Module):
    """Patches as tokens, row by row."""

    def __init__(self, size: ViTSize) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, size.width, size.patch, stride=size.patch)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, S, S) to (B, P, W)."""
        return self.proj(images).flatten(2).transpose(1, 2)


class EncoderBlock(nn.Module):
    """Attention and an MLP, each after a norm and around a residual connection."""

    def __init__(self, size: ViTSize) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width, EPSILON)
        self.attn = Attention(size)
        self.ls1 = LayerScale(size.width) if size.scaled else nn.Identity()
        self.norm2 = nn.LayerNorm(size.width, EPSILON)
        self.mlp = MLP(size)
        self.ls2 = LayerScale(size.width) if size.scaled else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, W) to (B, T, W)."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class Attention(nn.Module):
    """Attention of all tokens to all."""

    def __init__(self, size: ViTSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.proj = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, W) to (B, T, W)."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        out = F.scaled_dot_product_attention(query, key, value)
        return self.proj(out.transpose(1, 2).flatten(2))


class LayerScale(nn.Module):
    """A learned factor for each channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, W) to (B, T, W)."""
        return x * self.scale_factor


class MLP(nn.Module):
    """Two layers with a GELU between."""

    def __init__(self, size: ViTSize) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size.width, size.hidden)
        self.fc2 = nn.Linear(size.hidden, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, W) to (B, T, W)."""
        return self.fc2(F.gelu(self.fc1(x)))


class AttentionPool(nn.Module):
    """SigLIP's pooling head: weights of a checkpoint that a VLA does not read."""

    def __init__(self, size: ViTSize) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.zeros(1, 1, size.width))
        self.q = nn.Linear(size.width, size.width)
        self.kv = nn.Linear(size.width, 2 * size.width)
        self.proj = nn.Linear(size.width, size.width)
        self.norm = nn.LayerNorm(size.width, EPSILON)
        self.mlp = MLP(size)
