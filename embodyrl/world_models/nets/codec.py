"""``FrameCodec``: camera frames to small latent maps and back, one frame at a time.

A frame is painted over the background, which is the median of the training data. The decoder
predicts colours, and how far they hide the background. So a latent need not hold the grain of a
table.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from embodyrl.world_models.nets.saved_network import SavedNetwork, record_arguments

FACTOR = 8
"""Pixels per latent cell along each edge."""


class FrameCodec(SavedNetwork):
    """A convolutional autoencoder: (h, w, 3) bytes <-> (latent_channels, h/8, w/8).

    The latents are normalised to unit variance.

    Args:
        num_views: cameras; each has its own background, the rest is shared.
        height: of a frame in pixels, a multiple of 8.
        width: of a frame in pixels, a multiple of 8.
        latent_channels: c.
        channels: of the widest map; at a quarter of the resolution there are half as many.
    """

    background: Tensor
    shift: Tensor
    scale: Tensor

    @record_arguments
    def __init__(
        self,
        num_views: int = 1,
        height: int = 64,
        width: int = 64,
        latent_channels: int = 16,
        channels: int = 128,
    ) -> None:
        super().__init__()
        half = channels // 2
        self.encoder = nn.Sequential(
            nn.Conv2d(6, half, 8, stride=4, padding=2),
            ResidualConv(half),
            nn.Conv2d(half, channels, 4, stride=2, padding=1),
            ResidualConv(channels),
            nn.Conv2d(channels, latent_channels, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(latent_channels, channels, 1),
            ResidualConv(channels),
            ResidualConv(channels),
            nn.Conv2d(channels, 4 * half, 1),
            nn.PixelShuffle(2),
            ResidualConv(half),
            nn.Conv2d(half, 4 * 16, 3, padding=1),
            nn.PixelShuffle(4),
        )
        self.register_buffer("background", torch.zeros(num_views, 3, height, width))
        self.register_buffer("shift", torch.zeros(latent_channels, 1, 1))
        self.register_buffer("scale", torch.ones(latent_channels, 1, 1))

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(c, rows, columns) of one view's latent."""
        c = self.config
        return c["latent_channels"], c["height"] // FACTOR, c["width"] // FACTOR

    def encode(self, frames: UInt8[Tensor, "b v h w 3"]) -> Float[Tensor, "b v c y x"]:
        """Latents of B frames of every view."""
        x = brightness(frames)
        x = torch.cat([x - self.background, x - 0.5], dim=2)
        z = self.encoder(x.flatten(0, 1).contiguous(memory_format=torch.channels_last))
        return ((z - self.shift) / self.scale).unflatten(0, frames.shape[:2])

    def decode(self, latents: Float[Tensor, "b v c y x"]) -> UInt8[Tensor, "b v h w 3"]:
        """The frames of latents."""
        painted, _ = self.paint(latents)
        pixels = (painted * 255.0).round().clamp(0, 255).to(torch.uint8)
        return pixels.permute(0, 1, 3, 4, 2)

    def paint(self, latents: Float[Tensor, "b v c y x"]) -> tuple[Tensor, Float[Tensor, "b v h w"]]:
        """Decodes latents without rounding to bytes.

        Returns:
            (B, V, 3, h, w) brightness, which may lie a little outside of 0 to 1; and for each pixel
            the logit of how far the background is hidden.
        """
        z = (latents * self.scale + self.shift).flatten(0, 1).to(memory_format=torch.channels_last)
        decoded = self.decoder(z).unflatten(0, latents.shape[:2]).float()
        colour, mask_logit = decoded.split([3, 1], dim=2)
        mask_logit = mask_logit - 2.0  # an untrained decoder hides little
        return self.background.lerp(colour + 0.5, mask_logit.sigmoid()), mask_logit[:, :, 0]


def brightness(frames: UInt8[Tensor, "b v h w 3"]) -> Float[Tensor, "b v 3 h w"]:
    """Bytes as numbers from 0 to 1."""
    return frames.permute(0, 1, 4, 2, 3).float() / 255.0


class ResidualConv(nn.Module):
    """x plus two convolutions of the normalised x."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(math.gcd(8, channels), channels)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.zeros_(self.second.weight)
        nn.init.zeros_(self.second.bias)  # pyright: ignore[reportArgumentType] - it has a bias

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + self.second(F.silu(self.first(F.silu(self.norm(x)))))
