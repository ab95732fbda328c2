"""The network of OpenVLA: a Prismatic VLM (arXiv:2402.07865), with its published parameter names.

    image --DINOv2, SigLIP--> patches (P, 2176) --projector--> P tokens of a Llama

    vision_backbone.featurizer, .fused_featurizer   DINOv2 and SigLIP (``timm_vit.py``)
    projector                                       three linear layers
    language_model                                  transformers' Llama

It is built from config.json and transformers' own Llama: no code of a checkpoint is run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from embodyrl.policies.vla.timm_vit import VisionTransformer, ViTSize


class PrismaticNet(nn.Module):
    """See the module's docstring.

    Args:
        sizes: of the two image encoders; both give the same number of patches.
        image_size: pixels of an image's side.
        text: transformers' ``LlamaConfig``.
    """

    def __init__(self, sizes: list[ViTSize], image_size: int, text: Any) -> None:
        super().__init__()
        from transformers import LlamaForCausalLM

        self.vision_backbone = FusedEncoders(sizes, image_size)
        self.projector = Projector(sum(size.width for size in sizes), text.hidden_size)
        self.language_model: Any = LlamaForCausalLM(text)

    def image_tokens(self, pixels: Float[Tensor, "n c s s"]) -> Float[Tensor, "n p w"]:
        """The tokens of V views: all patches of the first, then those of the next.

        Args:
            pixels: (N, 6 V, S, S) of each view three channels for DINOv2, then three for SigLIP.
        """
        views = [self.vision_backbone(view) for view in pixels.split(6, dim=1)]
        return self.projector(torch.cat(views, dim=1))

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids (N, L) to inputs (N, L, W) of the language model."""
        return self.language_model.get_input_embeddings()(ids)

    def freeze(self, train: str) -> None:
        """Freezes what ``train`` (see ``OpenVLAConfig``) leaves out, and what nothing reads."""
        backbone = self.vision_backbone
        backbone.requires_grad_(train == "all")
        for encoder in (backbone.featurizer, backbone.fused_featurizer):
            for p in encoder.unused_parameters():
                p.requires_grad_(False)


class FusedEncoders(nn.Module):
    """Two image encoders side by side."""

    def __init__(self, sizes: list[ViTSize], image_size: int) -> None:
        super().__init__()
        self.featurizer = VisionTransformer(sizes[0], image_size)
        self.fused_featurizer = VisionTransformer(sizes[1], image_size)

    def forward(self, pixels: Float[Tensor, "n 6 s s"]) -> Float[Tensor, "n p f"]:
        """The features of both encoders, one beside the other."""
        first, second = pixels.split(3, dim=1)
        return torch.cat([self.featurizer(first), self.fused_featurizer(second)], dim=-1)


class Projector(nn.Module):
    """From the image encoders' features to tokens of the language model."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, 4 * features)
        self.fc2 = nn.Linear(4 * features, width)
        self.fc3 = nn.Linear(width, width)

    def forward(self, patches: Float[Tensor, "n p f"]) -> Float[Tensor, "n p w"]:
        """Patch by patch."""
        hidden = F.gelu(self.fc1(patches))
        return self.fc3(F.gelu(self.fc2(hidden)))


class ImageTransform(nn.Module):
    """Turns camera pictures into what the image encoders read.

    Resizes to a square (antialiased bicubic, proportions change), takes the middle out, and
    normalises once for each encoder. Pictures that have the square's size are not resized.

    Args:
        size: S, pixels of the square's side.
        means: of the encoders, three channels each, for pixels in [0, 1].
        stds: as ``means``.
        crop_area: the share of the picture's area that is kept, and stretched to the square again.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, size: int, means: list[list[float]], stds: list[list[float]], crop_area: float
    ) -> None:
        super().__init__()
        self.size = size
        self.crop_area = crop_area
        # They come with the checkpoint's config, so they are not saved as weights.
        mean = torch.tensor(means).flatten()
        std = torch.tensor(stds).flatten()
        self.register_buffer("mean", mean[:, None, None], persistent=False)
        self.register_buffer("std", std[:, None, None], persistent=False)

    def forward(self, images: UInt8[Tensor, "n h w 3"]) -> Float[Tensor, "n 6 s s"]:
        """Pictures of one camera to normalised pixels."""
        x = images.permute(0, 3, 1, 2).float()
        # The public code resizes and crops pictures of 8 bits, by Pillow: columns, then rows, and
        # each step rounds.
        for size in ((x.shape[2], self.size), (self.size, self.size)):
            if x.shape[2:] != size:
                x = F.interpolate(x, size=size, mode="bicubic", antialias=True)
                x = x.round().clamp(0, 255)
        if self.crop_area < 1.0:
            x = crop_middle(x, self.crop_area, self.size).round().clamp(0, 255)
        return (torch.cat([x, x], dim=1) / 255.0 - self.mean) / self.std


def crop_middle(x: Float[Tensor, "n c h w"], area: float, size: int) -> Float[Tensor, "n c s s"]:
    """The middle of pictures, stretched to a square by bilinear interpolation.

    It is TensorFlow's ``crop_and_resize``, which OpenVLA's evaluation uses: the corners of the crop
    become the middles of the corner pixels.

    Args:
        x: pictures.
        area: share of the area that is kept.
        size: S, pixels of the square's side.
    """
    along = torch.linspace(-1, 1, size, device=x.device, dtype=x.dtype) * area**0.5
    grid = torch.stack(torch.meshgrid(along, along, indexing="xy"), dim=-1)
    return F.grid_sample(x, grid.expand(len(x), -1, -1, -1), align_corners=True)
