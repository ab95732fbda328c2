"""Encodes camera images: a small convolutional network, modulated by the instruction."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn


class FilmCNN(nn.Module):
    """Convolutions to 1/4 of the resolution, FiLM by the instruction, then two heads.

    FiLM (arXiv:1709.07871) scales and shifts each channel by numbers computed from the instruction.

    The keypoint head says where things are: each channel becomes the expected position of its
    softmax over the image (arXiv:1504.00702). A few demonstrations are enough to learn it.
    The token head says what is there, with one token per 16x16 pixels: a 64x64 image has 4x4
    tokens, a 224x224 image 14x14.

    Args:
        width: channels, and number of keypoints.
        out_dim: width of a token.
        text_dim: width of the instruction's summary.
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
        # At the start the instruction changes nothing: scale 1 and shift 0.
        nn.init.zeros_(self.film.weight)
        nn.init.zeros_(self.film.bias)
        self.num_keypoints = width

    @staticmethod
    def num_tokens(size: tuple[int, int]) -> int:
        """Number of tokens of an image of size (height, width)."""
        return (size[0] // 16) * (size[1] // 16)

    def forward(
        self, images: UInt8[Tensor, "b h w 3"], text: Float[Tensor, "b e"]
    ) -> tuple[Float[Tensor, "b tokens d"], Float[Tensor, "b k2"]]:
        """Encodes B images.

        Args:
            images: (B, h, w, 3).
            text: (B, text_dim) summaries of the instructions.

        Returns:
            Tokens (B, h/16 * w/16, d), and keypoints (B, 2 * num_keypoints) in [-1, 1]: first the
            row of each keypoint, then the column of each.
        """
        x = F.relu(self.stem(as_pixels(images).to(self.stem.weight.dtype)))
        scale, shift = self.film(text)[:, :, None, None].chunk(2, dim=1)
        x = F.relu(self.conv(x) * (1.0 + scale) + shift)
        return as_sequence(self.tokens(x)), spatial_softmax(self.keypoints(x))


def as_pixels(images: UInt8[Tensor, "b h w 3"]) -> Float[Tensor, "b 3 h w"]:
    """Pictures as numbers in [-1, 1]."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1.0


def spatial_softmax(x: Float[Tensor, "b k h w"]) -> Float[Tensor, "b k2"]:
    """The expected position of each channel's softmax over the image.

    Returns:
        (B, 2 * k), in [-1, 1]: the row of each channel, then the column of each.
    """
    # Memory is in channels-last order, so as_sequence is a view and nothing is copied.
    weight = as_sequence(x).softmax(dim=1)
    rows, columns = (torch.linspace(-1, 1, n, device=x.device, dtype=x.dtype) for n in x.shape[2:])
    grid = torch.stack([rows[:, None].expand(x.shape[2:]), columns.expand(x.shape[2:])]).flatten(1)
    return (grid @ weight).flatten(1)


def as_sequence(x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b hw c"]:
    """A feature map as a sequence of its h * w positions."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)
