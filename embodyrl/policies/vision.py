"""Camera images to token features: a small convolutional net, modulated by the instruction."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn


class FilmCNN(nn.Module):
    """Four stride-2 convolutions; the instruction scales and shifts the later ones (FiLM, arXiv:1709.07871).

    A 64x64 image becomes 4x4 tokens, a 128x128 one 8x8, a 224x224 one 14x14.
    """

    STRIDE = 16

    def __init__(self, width: int, out_dim: int, text_dim: int) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 2 * width, 4 * width]
        self.convs = nn.ModuleList(nn.Conv2d(i, o, kernel_size=3, stride=2, padding=1) for i, o in pairwise(sizes))
        for conv in self.convs:
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")  # type: ignore[union-attr]
            nn.init.zeros_(conv.bias)  # type: ignore[union-attr]
        self.film = nn.Linear(text_dim, 2 * sum(sizes[2:]))
        nn.init.zeros_(self.film.weight)
        nn.init.zeros_(self.film.bias)
        self.project = nn.Linear(sizes[-1], out_dim)
        self.feature_dim = sizes[-1]

    def forward(
        self, images: UInt8[Tensor, "b h w 3"], text: Float[Tensor, "b e"]
    ) -> tuple[Float[Tensor, "b tokens d"], Float[Tensor, "b c 4 4"]]:
        """Encodes B images.

        Returns:
            Tokens (B, h/16 * w/16, d) and the feature map averaged to 4x4 (B, c, 4, 4), which keeps where things are.
        """
        x = images.permute(0, 3, 1, 2).to(self.project.weight.dtype) / 127.5 - 1.0
        film = self.film(text)[:, :, None, None]
        used = 0
        for i, conv in enumerate(self.convs):
            x = conv(x)
            if i > 0:
                channels = x.shape[1]
                scale, shift = film[:, used : used + channels], film[:, used + channels : used + 2 * channels]
                x = x * (1.0 + scale) + shift
                used += 2 * channels
            x = F.relu(x)
        tokens = self.project(x.flatten(2).transpose(1, 2))
        return tokens, x if x.shape[-2:] == (4, 4) else F.adaptive_avg_pool2d(x, (4, 4))


def random_shift(images: UInt8[Tensor, "b h w 3"], pixels: int, generator: torch.Generator) -> UInt8[Tensor, "b h w 3"]:
    """Shifts every image by up to ``pixels`` in both directions, repeating the border (DrQ, arXiv:2004.13649)."""
    if pixels == 0:
        return images
    batch, height, width, _ = images.shape
    offsets = torch.randint(-pixels, pixels + 1, (2, batch, 1), generator=generator).to(images.device)
    rows = (torch.arange(height, device=images.device) + offsets[0]).clamp(0, height - 1)
    columns = (torch.arange(width, device=images.device) + offsets[1]).clamp(0, width - 1)
    index = torch.arange(batch, device=images.device)[:, None, None]
    return images[index, rows[:, :, None], columns[:, None, :]]
