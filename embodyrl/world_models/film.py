"""``Film``: the frames of each dream that a reflector looks at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Film:
    """Of every camera the episode's first frame, then the newest ones; T frames in all.

    The frames are (N, T, h, w, 3) uint8.
    """

    def __init__(self) -> None:
        self._frames: dict[str, Tensor] = {}

    def begin(
        self, images: Mapping[str, Tensor], rows: Tensor, cameras: Sequence[str], window: int
    ) -> None:
        """Fills the windows of new episodes with their first frame.

        Args:
            images: camera -> (N, h, w, 3).
            rows: numbers of the dreams that begin.
            cameras: those that the reflector looks at.
            window: T.
        """
        for name in cameras:
            first = images[name][:, None].repeat(1, window, 1, 1, 1)
            if name in self._frames:
                self._frames[name][rows] = first[rows]
            else:
                self._frames[name] = first

    def append(self, images: Mapping[str, Tensor]) -> None:
        """Adds a frame to every dream; the first frame stays, the oldest of the others goes."""
        for name, film in self._frames.items():
            longer = torch.cat([film[:, :1], film[:, 2:], images[name][:, None]], dim=1)
            self._frames[name] = longer[:, -film.shape[1] :]

    def frames(self, rows: Tensor) -> dict[str, Tensor]:
        """The windows of the dreams in ``rows``."""
        return {name: film[rows] for name, film in self._frames.items()}
