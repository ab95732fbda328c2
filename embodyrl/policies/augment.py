"""Random changes of pictures in training, under which the right action stays the same."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from embodyrl.types import Obs

# From red, green and blue to brightness and two axes of colour (NTSC's YIQ).
YIQ = ((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))
HUE = 0.25
"""Turns of hue per unit of strength: Octo (arXiv:2405.12213) has .05 where the others are .2."""


def augmented(obs: Obs, generator: torch.Generator, *, shift: int, jitter: float = 0.0) -> Obs:
    """``obs`` with pictures that are changed at random; each camera by draws of its own.

    Args:
        obs: B observations; of several frames the newest alone is changed.
        generator: of the changes.
        shift: see ``random_shift``.
        jitter: see ``colour_jitter``.
    """

    def change(image: Tensor) -> Tensor:
        return colour_jitter(random_shift(image, shift, generator), jitter, generator)

    return replace(obs, images={name: change(image) for name, image in obs.images.items()})


def random_shift(
    images: UInt8[Tensor, "b h w 3"], pixels: int, generator: torch.Generator
) -> UInt8[Tensor, "b h w 3"]:
    """Random-shift augmentation (DrQ, arXiv:2004.13649).

    Every image is shifted by up to ``pixels`` in both directions; border pixels are repeated.
    """
    if pixels == 0:
        return images
    batch, height, width, _ = images.shape
    device = images.device
    offsets = torch.randint(-pixels, pixels + 1, (2, batch, 1), generator=generator).to(device)
    # The source row and column of each pixel; clamping repeats the border.
    rows = (torch.arange(height, device=device) + offsets[0]).clamp(0, height - 1)
    columns = (torch.arange(width, device=device) + offsets[1]).clamp(0, width - 1)
    index = torch.arange(batch, device=device)[:, None, None]
    return images[index, rows[:, :, None], columns[:, None, :]]


def colour_jitter(
    images: UInt8[Tensor, "b h w 3"], strength: float, generator: torch.Generator
) -> UInt8[Tensor, "b h w 3"]:
    """Every image in other colours: brightness, contrast, saturation and hue.

    Args:
        images: RGB.
        strength: the first three are multiplied by 1 - strength to 1 + strength; hue is turned by
            up to strength * ``HUE``. A named colour is still the same at .2.
        generator: of the draws.
    """
    if strength == 0:
        return images
    # Four numbers in [-1, 1] for each image; all colours are changed by one matrix.
    draws = 2 * torch.rand(len(images), 4, generator=generator) - 1
    brightness, contrast, saturation = (1 + strength * draws[:, :3]).unbind(1)
    matrix = _turned(saturation, 2 * math.pi * HUE * strength * draws[:, 3])
    # Contrast is about the mean brightness of the image.
    pixels = images.float()
    weights = torch.tensor(YIQ[0], device=images.device)
    mean = (pixels.mean(dim=(1, 2)) @ weights)[:, None, None, None]
    gain = (brightness * contrast)[:, None, None] * matrix
    offset = (brightness * (1 - contrast)).to(images.device)[:, None, None, None] * mean
    changed = torch.einsum("bhwc,bdc->bhwd", pixels, gain.to(images.device)) + offset
    return changed.round().clamp(0, 255).to(torch.uint8)


def _turned(saturation: Float[Tensor, " b"], angle: Float[Tensor, " b"]) -> Float[Tensor, "b 3 3"]:
    """RGB matrices that turn and stretch colours, and leave brightness and greys as they are."""
    to_yiq = torch.tensor(YIQ)
    c, s = saturation * angle.cos(), saturation * angle.sin()
    zero, one = torch.zeros_like(c), torch.ones_like(c)
    turn = torch.stack([one, zero, zero, zero, c, -s, zero, s, c], dim=1).view(-1, 3, 3)
    return torch.linalg.inv(to_yiq) @ turn @ to_yiq
