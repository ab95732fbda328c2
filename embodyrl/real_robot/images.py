"""Camera images: fit to the policy's size, and encoded for the log and the operator's page."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]
"""(h, w, 3) RGB."""


def fit(image: Image, size: tuple[int, int]) -> Image:
    """Cuts the middle out of an image, with the aspect ratio of ``size``, and scales it to that.

    Args:
        image: (h, w, 3).
        size: (height, width).
    """
    height, width = size
    if image.shape[:2] == size:
        return image
    from PIL import Image as Pillow

    # Cut the largest centred part that has the aspect ratio.
    scale = min(image.shape[0] / height, image.shape[1] / width)
    tall = round(height * scale)
    wide = round(width * scale)
    top = (image.shape[0] - tall) // 2
    left = (image.shape[1] - wide) // 2
    part = Pillow.fromarray(np.ascontiguousarray(image[top : top + tall, left : left + wide]))
    # Average when shrinking; interpolate when enlarging.
    how = Pillow.Resampling.BOX if scale > 1 else Pillow.Resampling.BILINEAR
    return np.asarray(part.resize((width, height), how))


def to_png(image: Image) -> bytes:
    """An image as PNG, without loss."""
    return _encoded(image, "PNG", compress_level=1)


def to_jpeg(image: Image) -> bytes:
    """An image as JPEG, small enough to be shown ten times a second."""
    return _encoded(image, "JPEG", quality=85)


def _encoded(image: Image, kind: str, **options: int) -> bytes:
    from PIL import Image as Pillow

    out = io.BytesIO()
    Pillow.fromarray(image).save(out, kind, **options)
    return out.getvalue()
