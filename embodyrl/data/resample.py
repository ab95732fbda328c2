"""Episodes at another rate: ``data.rate=resample``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embodyrl.errors import UserError


@dataclass
class Resampled:
    """Which frames an episode has at another rate.

    Attributes:
        rows: (G,) the frame before it that each new one shows.
        start: (G,) the time of each new frame, in frames of before.
        step: length of a new frame, in frames of before.
        episode: (F,) the episode of each frame of before.
        last: (G,) the last frame of before of the new frame's episode.
        target: (F,) the new frame in which each frame of before ends.
    """

    rows: np.ndarray
    start: np.ndarray
    step: float
    episode: np.ndarray
    last: np.ndarray
    target: np.ndarray

    @classmethod
    def plan(cls, episode: np.ndarray, rate: float, wanted: float) -> Resampled:
        """The plan for all frames.

        Args:
            episode: (F,) of each frame; frames of an episode stand together.
            rate: frames per second.
            wanted: frames per second of the result.
        """
        # Each episode for itself.
        step = rate / wanted
        firsts = np.flatnonzero(np.r_[True, episode[1:] != episode[:-1]])
        ends = np.r_[firsts[1:], len(episode)]
        rows, start, last, target, made = [], [], [], [], 0
        for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
            length = end - first
            count = max(1, round(length / step))
            # Times of the new frames, in frames of before.
            times = np.arange(count) * step
            rows.append(first + np.minimum(np.floor(times + 1e-6), length - 1).astype(np.int64))
            start.append(first + times)
            last.append(np.full(count, end - 1))
            # The new frame in which each frame of before is over.
            into = np.ceil((np.arange(length) + 1) / step - 1e-6).astype(np.int64) - 1
            target.append(made + into.clip(0, count - 1))
            made += count
        frames = [np.concatenate(parts) for parts in (rows, start, last, target)]
        return cls(frames[0], frames[1], step, episode, frames[2], frames[3])

    def of_state(self, state: np.ndarray) -> np.ndarray:
        """States (F, P), interpolated at the time of each new frame: (G, P)."""
        after = np.minimum(self.rows + 1, self.last)
        share = np.clip(self.start - self.rows, 0.0, 1.0)[:, None]
        return ((1 - share) * state[self.rows] + share * state[after]).astype(state.dtype)

    def of_actions(self, actions: np.ndarray, kind: str, name: str) -> np.ndarray:
        """Actions (F, A) at the new rate: (G, A).

        Changes are divided, or added up, so that an episode moves as far as before. Absolute
        targets are interpolated, velocities averaged. The last dim, the gripper's, keeps the value
        that it has at the time.

        Args:
            actions: of the frames of before.
            kind: ``"delta"``, ``"absolute"`` or ``"velocity"``.
            name: of the data set, for messages.

        Raises:
            UserError: the kind is not known.
        """
        if kind == "absolute":
            moved = self.of_state(actions)
        elif kind in ("delta", "velocity"):
            # The integral of the actions up to a time; a new action is a difference of two.
            total = np.r_[np.zeros((1, actions.shape[1])), actions.cumsum(axis=0, dtype=np.float64)]
            edges = np.arange(len(total))
            end = np.minimum(self.start + self.step, self.last + 1)
            at = [
                np.column_stack([np.interp(when, edges, column) for column in total.T])
                for when in (self.start, end)
            ]
            # What happens between the edges of a new frame.
            moved = at[1] - at[0]
            if kind == "velocity":
                moved = moved / self.step
        else:
            raise UserError(
                f"The data set {name} does not say whether its actions are changes, absolute "
                "targets or velocities, so they cannot be resampled. Say it: "
                "data.convention={actions: delta}."
            )
        moved[:, -1] = actions[self.rows, -1]
        return moved.astype(actions.dtype)

    def of_flags(self, flags: np.ndarray) -> np.ndarray:
        """Flags (F,): a new frame has one where a frame of before that ends in it has one."""
        out = np.zeros(len(self.rows), dtype=bool)
        np.logical_or.at(out, self.target, flags)
        return out

    def of_rewards(self, rewards: np.ndarray) -> np.ndarray:
        """Rewards (F, 1), added up in the new frame in which each frame of before ends."""
        out = np.zeros((len(self.rows), 1), dtype=np.float32)
        np.add.at(out, self.target, rewards.reshape(-1, 1).astype(np.float32))
        return out
