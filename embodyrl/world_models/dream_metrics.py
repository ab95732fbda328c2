"""Measures of the quality of dreamt pictures."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor


def psnr(a: UInt8[Tensor, "b h w 3"], b: UInt8[Tensor, "b h w 3"]) -> Float[Tensor, " b"]:
    """Peak signal-to-noise ratio of each pair in dB; identical pictures give 100."""
    error = (a.float() - b.float()).square().flatten(1).mean(1)
    return 10 * torch.log10(255.0**2 / error.clamp_min(255.0**2 * 1e-10))


def ssim(
    a: UInt8[Tensor, "b h w 3"], b: UInt8[Tensor, "b h w 3"], sigma: float = 1.5
) -> Float[Tensor, " b"]:
    """Structural similarity of each pair (Wang et al. 2004).

    It uses a Gaussian window of 11 pixels, and the mean over the colours.
    """
    x, y = (v.permute(0, 3, 1, 2).double() for v in (a, b))
    grid = torch.arange(-5, 6, dtype=x.dtype, device=x.device)
    line = torch.exp(-(grid**2) / (2 * sigma**2))
    window = torch.outer(line, line) / line.sum() ** 2

    def mean(v: Tensor) -> Tensor:
        weighted = F.conv2d(v.flatten(0, 1)[:, None], window[None, None])
        return weighted.unflatten(0, v.shape[:2])[:, :, 0]

    c1 = (0.01 * 255) ** 2
    c2 = (0.03 * 255) ** 2
    mx = mean(x)
    my = mean(y)
    vx = mean(x * x) - mx**2
    vy = mean(y * y) - my**2
    cov = mean(x * y) - mx * my
    index = (2 * mx * my + c1) * (2 * cov + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
    return index.flatten(1).mean(1).float()
