"""Rollout videos that every browser plays."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from embodyrl.errors import UserError

TARGET = 256  # pixels: small pictures are enlarged to about that height


def enlarge(frames: np.ndarray, target: int = TARGET) -> np.ndarray:
    """Repeats the pixels of small frames (T, h, w, 3) a whole number of times, up to a height of about ``target``."""
    factor = max(1, target // frames.shape[1])
    return frames.repeat(factor, axis=1).repeat(factor, axis=2)


def write_video(frames: np.ndarray | Tensor, path: str | Path, fps: float) -> Path:
    """Writes an H.264 MP4 (yuv420p, index first), which all browsers play.

    Args:
        frames: (T, h, w, 3) uint8; small ones are enlarged without smoothing, odd sizes lose a row
            or column.
        path: of the file; a reader never sees a half-written one.
        fps: frames per second; the rate at which actions were executed (``EnvSpec.control_hz``)
            plays in real time.

    Raises:
        UserError: no frames, or not of that shape and dtype.
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
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    options = {"crf": "20", "preset": "veryfast"}
    try:
        with av.open(
            str(unfinished), "w", format="mp4", options={"movflags": "+faststart"}
        ) as container:
            stream: Any = container.add_stream(
                "libx264", rate=Fraction(fps).limit_denominator(1000), options=options
            )
            stream.width = width
            stream.height = height
            stream.pix_fmt = "yuv420p"
            for picture in pixels[:, :height, :width]:
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path
