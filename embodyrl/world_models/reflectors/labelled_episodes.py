"""``LabelledEpisodes``: frames with a label each, from a data set or from dreams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embodyrl.data.demonstrations import Demonstrations
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.errors import UserError
from embodyrl.world_models.reflectors.base import window_rows


@dataclass(frozen=True)
class LabelledEpisodes:
    """The frames of episodes, one episode after the other. Selecting episodes copies no frames.

    Attributes:
        frames: camera -> (R, h, w, 3) uint8, in memory or mapped from a file.
        rows: (F,) numbers of the frames in ``frames``, in order.
        label: (F,) bool, whether the task is solved as of that frame.
        episode: (F,) numbers of the episodes; the frames of an episode are contiguous.
        sentence: (F,) numbers of the instructions.
        sentences: the instructions.
    """

    frames: Mapping[str, np.ndarray]
    rows: np.ndarray
    label: np.ndarray
    episode: np.ndarray
    sentence: np.ndarray
    sentences: list[str]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def numbers(self) -> np.ndarray:
        """(E,) numbers of the episodes, in order."""
        return self.episode[self.first_frames]

    @cached_property
    def first_frames(self) -> np.ndarray:
        """(E,) each episode's first frame."""
        return np.flatnonzero(np.append(True, self.episode[1:] != self.episode[:-1]))

    @cached_property
    def first(self) -> np.ndarray:
        """(F,) the first frame of each frame's episode."""
        starts = self.first_frames
        return np.repeat(starts, np.diff(np.append(starts, len(self))))

    @property
    def solved(self) -> np.ndarray:
        """(E,) bool, whether any frame of the episode is solved."""
        return np.logical_or.reduceat(self.label, self.first_frames)

    def progress(self, discount: float) -> np.ndarray:
        """(F,) float32: 1 where solved, g**k where it will be k frames later, and 0 where never.

        That is the value of a sparse reward under whoever made the data.

        Args:
            discount: g; 0 gives the labels.
        """
        left = np.full(len(self), np.inf)
        ends = np.append(self.first_frames[1:], len(self))
        for start, end in zip(self.first_frames, ends, strict=True):
            solved = np.flatnonzero(self.label[start:end])
            if len(solved):
                # For each frame, the next one that is solved; after the last one there is none.
                after = np.searchsorted(solved, np.arange(end - start))
                there = after < len(solved)
                left[start:end][there] = solved[after[there]] - np.flatnonzero(there)
        return (discount**left).astype(np.float32)

    def windowed(self, values: np.ndarray, frame: np.ndarray, window: int) -> Tensor:
        """(B, T) the values of the frames that a reflector sees (``window_rows``).

        Args:
            values: (F,).
            frame: (B,) numbers of the frames to be judged.
            window: T.
        """
        first = torch.from_numpy(self.first[frame])
        return torch.from_numpy(values[window_rows(torch.from_numpy(frame), first, window).numpy()])

    def window(self, camera: str, frame: np.ndarray, window: int) -> Tensor:
        """(B, T, h, w, 3) uint8, the frames that a reflector sees; see ``windowed``."""
        return torch.from_numpy(
            self.frames[camera][self.windowed(self.rows, frame, window).numpy()]
        )

    def select(self, episodes: np.ndarray) -> LabelledEpisodes:
        """Only the episodes with these numbers."""
        mask = np.isin(self.episode, episodes)
        return replace(
            self,
            rows=self.rows[mask],
            label=self.label[mask],
            episode=self.episode[mask],
            sentence=self.sentence[mask],
        )

    def split(self, held_out: float, seed: int = 0) -> tuple[LabelledEpisodes, LabelledEpisodes]:
        """Splits off the share ``held_out`` of the episodes, chosen by ``seed``.

        Returns:
            The episodes to train on, and the held-out ones.

        Raises:
            UserError: one of the two would be empty.
        """
        numbers = np.random.default_rng(seed).permutation(self.numbers)
        count = round(held_out * len(numbers))
        if not 0 < count < len(numbers):
            raise UserError(
                f"{held_out:g} of {len(numbers)} episodes cannot be held out; both parts need one."
            )
        return self.select(numbers[count:]), self.select(numbers[:count])


def from_demonstrations(demos: Demonstrations, tail: int = 0) -> LabelledEpisodes:
    """Labels frames by the reward: frame t+1 is solved if the reward of action t is above 0.5.

    Args:
        demos: loaded with ``keep="all"``; a reflector learns most from failures.
        tail: also labels that many last frames of solved episodes as solved, for data that do not
            say when the task was solved.

    Raises:
        UserError: some episodes are solved, but no frame would be labelled so.
    """
    episode = torch.unique_consecutive(demos.end, return_inverse=True)[1].numpy()
    reward = demos.reward.numpy()
    end = demos.end.numpy()
    label = np.zeros(len(demos), dtype=bool)
    label[1:] = (reward[:-1] > 0.5) & (episode[1:] == episode[:-1])
    if tail:
        label |= (end - np.arange(len(demos)) <= tail) & demos.success.numpy()
    if not label.any() and demos.success.any():
        raise UserError(
            "The episodes of this data set end with the action that solves them, so no frame "
            "shows a solved task. Collect with env.terminate_on_success=false, or label the last "
            "frames of solved episodes: --tail 1."
        )
    return LabelledEpisodes(
        frames=demos.images,
        rows=np.arange(len(demos)),
        label=label,
        episode=episode,
        sentence=demos.instruction.numpy(),
        sentences=demos.sentences,
    )


def load_episodes(path: str | Path, cameras: Sequence[str] = (), tail: int = 0) -> LabelledEpisodes:
    """Reads a LeRobotDataset v3 with its failures.

    Args:
        path: folder or hub id.
        cameras: names; none means all.
        tail: see ``from_demonstrations``.

    Raises:
        UserError: no such data set or camera, no camera at all, or no label.
    """
    demos = load_demonstrations(
        path, 1, keep="all", cameras={name: name for name in cameras} or None
    )
    if not demos.images:
        raise UserError(f"The data set {path} has no camera, but a reflector judges frames.")
    return from_demonstrations(demos, tail)
