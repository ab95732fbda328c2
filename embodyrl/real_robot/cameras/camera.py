"""A camera: a thread of its own reads a source and keeps the newest picture."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from embodyrl.functional.pictures import Image, fit

Depth = NDArray[np.uint16]
"""(h, w) mm along the camera's axis, as in ROS (REP 118); 0 where nothing was measured."""
AGAIN = 0.05
"""s between two attempts to read a source that gave nothing."""


@dataclass(frozen=True)
class CameraPicture:
    """A picture.

    Attributes:
        stamp: s by ``time.monotonic``, when it was taken as far as the camera tells; else when it
            came.
        image: (h, w, 3).
        depth: (h, w), pixel by pixel of what ``image`` shows; None without depth.
    """

    stamp: float
    image: Image
    depth: Depth | None = None


class Source(Protocol):
    """Where a camera's pictures come from; one thread uses it."""

    def read(self) -> CameraPicture | None:
        """Waits for the next picture; None if none came within a second or so."""
        ...

    def close(self) -> None:
        """Lets go of the device."""
        ...


class Camera(Protocol):
    """The newest picture of a camera.

    Attributes:
        name: the policy's, for messages.
        fps: pictures per second that it was asked for; 0 where nobody said.
        noisy: whether two of its pictures always differ, as those of a real sensor do.
        has_depth: whether its pictures come with depth.
        problem: why no more pictures come, as far as it is known; empty while they do.
    """

    name: str
    fps: float
    noisy: bool
    has_depth: bool
    problem: str

    @property
    def newest(self) -> CameraPicture | None:
        """The newest picture; None before the first one."""
        ...

    def close(self) -> None:
        """Lets go of the camera."""
        ...


class SourceCamera:
    """See ``Camera``. Reads a source until ``close``.

    Args:
        name: the policy's, for messages.
        source: of the pictures; ``close`` closes it.
        size: (height, width) that pictures are cut and scaled to.
        fps: pictures per second that the source was asked for; 0 where nobody said.
        noisy: whether two pictures always differ; False for a file.
        has_depth: whether the source gives depth.

    Attributes:
        newest: the newest picture.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        size: tuple[int, int],
        fps: float,
        noisy: bool,
        has_depth: bool = False,
    ) -> None:
        self.name = name
        self.fps = fps
        self.noisy = noisy
        self.has_depth = has_depth
        self.newest: CameraPicture | None = None
        self.problem = ""
        self._source = source
        self._size = size
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=f"camera {name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._closing:
            try:
                picture = self._source.read()
            except Exception as error:  # of a driver; the age of the newest picture shows it, too
                self.problem = f"{type(error).__name__}: {str(error)[:200]}"
                picture = None
            if picture is None:
                time.sleep(AGAIN)
                continue
            depth = None if picture.depth is None else fit_depth(picture.depth, self._size)
            self.newest = replace(picture, image=fit(picture.image, self._size), depth=depth)
            self.problem = ""

    def close(self) -> None:
        """See ``Camera``."""
        self._closing = True
        self._thread.join(timeout=3.0)
        self._source.close()


def fit_depth(depth: Depth, size: tuple[int, int]) -> Depth:
    """A depth map cut and scaled as ``fit`` does the picture, to (height, width).

    A pixel takes the depth in its middle: a mean over an edge would be a surface that is not there.
    """
    height, width = size
    scale = min(depth.shape[0] / height, depth.shape[1] / width)
    # The middle part with the proportions of ``size``, as in ``functional.pictures.fit``.
    tall, wide = round(height * scale), round(width * scale)
    top = (depth.shape[0] - tall) // 2
    left = (depth.shape[1] - wide) // 2
    rows = top + ((np.arange(height) + 0.5) * tall / height).astype(int)
    columns = left + ((np.arange(width) + 0.5) * wide / width).astype(int)
    return np.ascontiguousarray(depth[np.ix_(rows, columns)])
