"""Camera images to token features: a small convolutional net, modulated by the instruction."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn


class FilmCNN(nn.Module):
    """Convolutions to 1/4 of the resolution, modulated by the instruction (FiLM, arXiv:1709.07871), then two heads.

    Keypoints say where things are: each channel becomes the expected position of its softmax over
    the map (arXiv: 1504.00702), which a few demonstrations suffice to learn. Tokens of 16x16 pixels
    say what is there: a 64x64 image becomes 4x4 of them, a 224x224 one 14x14.
    """

    def __init__(self, width: int, out_dim: int, text_dim: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, kernel_size=8, stride=4, padding=2)
        self.conv = nn.Conv2d(width, width, kernel_size=3, padding=1)
        self.film = nn.Linear(text_dim, 2 * width)
        self.keypoints = nn.Conv2d(width, width, kernel_size=1)
        self.tokens = nn.Conv2d(width, out_dim, kernel_size=4, stride=4)
        for conv in (self.stem, self.conv):
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            nn.init.zeros_(conv.bias)  # pyright: ignore[reportArgumentType] - it has a bias
        nn.init.zeros_(self.film.weight)
        nn.init.zeros_(self.film.bias)
        self.num_keypoints = width

    @staticmethod
    def num_tokens(size: tuple[int, int]) -> int:
        """Of an image of (height, width)."""
        return (size[0] // 16) * (size[1] // 16)

    def forward(
        self, images: UInt8[Tensor, "b h w 3"], text: Float[Tensor, "b e"]
    ) -> tuple[Float[Tensor, "b tokens d"], Float[Tensor, "b k2"]]:
        """Encodes B images.

        Returns:
            Tokens (B, h/16 * w/16, d) and keypoints (B, 2 * num_keypoints) in [-1, 1], all rows
            first.
        """
        x = images.permute(0, 3, 1, 2).to(self.stem.weight.dtype) / 127.5 - 1.0
        x = F.relu(self.stem(x))
        scale, shift = self.film(text)[:, :, None, None].chunk(2, dim=1)
        x = F.relu(self.conv(x) * (1.0 + scale) + shift)
        return as_sequence(self.tokens(x)), spatial_softmax(self.keypoints(x))


def spatial_softmax(x: Float[Tensor, "b k h w"]) -> Float[Tensor, "b k2"]:
    """The expected position of each channel's softmax over the map, in [-1, 1]: all rows, then all columns."""
    # Images come with channels last and stay so: positions are then a dimension of a view, and
    # nothing is copied.
    weight = as_sequence(x).softmax(dim=1)
    rows, columns = (torch.linspace(-1, 1, n, device=x.device, dtype=x.dtype) for n in x.shape[2:])
    grid = torch.stack([rows[:, None].expand(x.shape[2:]), columns.expand(x.shape[2:])]).flatten(1)
    return (grid @ weight).flatten(1)


def as_sequence(x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b hw c"]:
    """A map as a sequence of its positions."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def random_shift(
    images: UInt8[Tensor, "b h w 3"], pixels: int, generator: torch.Generator
) -> UInt8[Tensor, "b h w 3"]:
    """Shifts every image by up to ``pixels`` in both directions, repeating the border (DrQ, arXiv:2004.13649)."""
    if pixels == 0:
        return images
    batch, height, width, _ = images.shape
    offsets = torch.randint(-pixels, pixels + 1, (2, batch, 1), generator=generator).to(
        images.device
    )
    rows = (torch.arange(height, device=images.device) + offsets[0]).clamp(0, height - 1)
    columns = (torch.arange(width, device=images.device) + offsets[1]).clamp(0, width - 1)
    index = torch.arange(batch, device=images.device)[:, None, None]
    return images[index, rows[:, :, None], columns[:, None, :]]
