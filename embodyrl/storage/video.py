"""Writes rollout videos that every browser can play."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.storage.atomic_files import replacing

TARGET = 256
"""Small frames are enlarged to about this height, in pixels."""


def enlarge(frames: np.ndarray, target: int = TARGET) -> np.ndarray:
    """Enlarges small frames (T, h, w, 3) by a whole factor, up to the height ``target``.

    Pixels are repeated, not smoothed.
    """
    factor = max(1, target // frames.shape[1])
    return frames.repeat(factor, axis=1).repeat(factor, axis=2)


def write_video(frames: np.ndarray | Tensor, path: str | Path, fps: float) -> Path:
    """Writes an H.264 MP4 (yuv420p, index at the front), which all browsers can play.

    Args:
        frames: (T, h, w, 3) uint8. Small frames are enlarged. H.264 needs even sizes, so an odd
            one loses a row or column.
        path: of the file. It appears only when it is complete.
        fps: frames per second; ``EnvSpec.control_hz`` plays in real time if there is a frame for
            each action.

    Raises:
        UserError: there are no frames, or they have another shape or dtype.
    """
    import av

    pixels = frames.cpu().numpy() if isinstance(frames, Tensor) else np.asarray(frames)
    if pixels.ndim != 4 or pixels.shape[-1] != 3 or pixels.dtype != np.uint8 or len(pixels) == 0:
        raise UserError(
            f"A video needs frames of shape (T, h, w, 3) in uint8, not {pixels.shape} in "
            f"{pixels.dtype}."
        )
    pixels = enlarge(pixels)
    height, width = (size - size % 2 for size in pixels.shape[1:3])
    path = Path(path)
    options = {"crf": "20", "preset": "veryfast"}
    with replacing(path) as unfinished:
        movflags = {"movflags": "+faststart"}
        with av.open(str(unfinished), "w", format="mp4", options=movflags) as container:
            stream: Any = container.add_stream(
                "libx264", rate=Fraction(fps).limit_denominator(1000), options=options
            )
            stream.width = width
            stream.height = height
            stream.pix_fmt = "yuv420p"
            for image in pixels[:, :height, :width]:
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
                container.mux(stream.encode(frame))
            # The encoder still holds some frames.
            container.mux(stream.encode())
    return path
