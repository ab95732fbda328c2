"""How a picture is turned and fitted: the same in training, in an env and on a robot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]
"""(h, w, 3)."""
FLIPS: dict[str, tuple[bool, bool]] = {
    "upright": (False, False),
    "upside_down": (True, False),
    "mirrored": (False, True),
    "turned_180": (True, True),
}
"""Orientation -> whether top and bottom, and left and right, are exchanged."""


def flips_between(one: str, other: str) -> tuple[bool, bool]:
    """The flips (of rows, of columns) that lead from an orientation to another one, and back."""
    return (
        FLIPS[one][0] != FLIPS[other][0],
        FLIPS[one][1] != FLIPS[other][1],
    )


def orientation_after(start: str, rows: bool, columns: bool) -> str:
    """The orientation of a picture in the orientation ``start`` once it is flipped."""
    flips = (FLIPS[start][0] != rows, FLIPS[start][1] != columns)
    return next(name for name, both in FLIPS.items() if both == flips)


def turn(images: NDArray[np.uint8], rows: bool, columns: bool, channels: bool) -> NDArray[np.uint8]:
    """Pictures (..., h, w, 3) flipped in rows or columns, or with the colours in reverse order."""
    images = images[..., ::-1, :, :] if rows else images
    images = images[..., ::-1, :] if columns else images
    return images[..., ::-1] if channels else images


def fit(image: Image, size: tuple[int, int], how: str = "crop") -> Image:
    """A picture in another size.

    Args:
        image: (h, w, 3).
        size: (height, width).
        how: ``"crop"`` cuts out the middle part with the proportions of ``size``; ``"squeeze"``
            changes the proportions; ``"pad"`` puts black bars beside the picture.
    """
    if image.shape[:2] == size:
        return image
    from PIL import Image as Pillow

    height, width = size
    # The part of the picture that is kept, and its size in the result.
    across = image.shape[0] / height, image.shape[1] / width
    scale = {"crop": min(across), "squeeze": 0.0, "pad": max(across)}[how]
    tall, wide = image.shape[:2]
    inner = [height, width]
    if how == "crop":
        tall, wide = round(height * scale), round(width * scale)
    elif how == "pad":
        inner = [max(1, round(tall / scale)), max(1, round(wide / scale))]
    top = (image.shape[0] - tall) // 2
    left = (image.shape[1] - wide) // 2
    part = Pillow.fromarray(np.ascontiguousarray(image[top : top + tall, left : left + wide]))
    # Average when shrinking; interpolate when enlarging.
    shrinks = tall > inner[0] or wide > inner[1]
    sampling = Pillow.Resampling.BOX if shrinks else Pillow.Resampling.BILINEAR
    small = np.asarray(part.resize((inner[1], inner[0]), sampling))
    if how != "pad":
        return small
    # In the middle of a black picture.
    padded = np.zeros((height, width, 3), dtype=np.uint8)
    top = (height - inner[0]) // 2
    left = (width - inner[1]) // 2
    padded[top : top + inner[0], left : left + inner[1]] = small
    return padded
