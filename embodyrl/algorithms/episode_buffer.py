"""``EpisodeBuffer``: a replay buffer of chunks that knows what critics see, and how episodes ended.

    chunks --encoder--> features before and after each
    the end of an episode --> return, outcome and later places, noted at all of its chunks

So a gradient step of the critics reads features alone, and hindsight has its labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from embodyrl.functional.hindsight import later_steps
from embodyrl.functional.returns import discounted_returns
from embodyrl.policies.found_features import FoundFeatures
from embodyrl.policies.localiser import ENDS, ON_THE_WAY, PLACES
from embodyrl.policies.shared_features import SharedFeatures
from embodyrl.rollouts.batches import Transitions
from embodyrl.rollouts.replay_buffer import ONLINE, ReplayBuffer
from embodyrl.types import EnvSpec

ENCODED_AT_ONCE = 512
FEATURES = ("features", "next_features")
"""Columns of what critics see, before and after a chunk."""
NO_EPISODE = -1
"""In place of the number of an episode, for chunks of a data set."""


class EpisodeBuffer(ReplayBuffer):
    """See the module's docstring.

    Beyond a transition it keeps for each chunk: ``features`` and ``next_features``; its
    ``episode``; whether that is ``solved`` so far, and ``over``. Of one that is over also the
    ``return`` from the chunk on, and ``places`` (J, P), where it led. Chunks of a data set belong to
    no episode, and have features alone.

    Args:
        capacity: chunks.
        spec: of the env.
        horizon: H.
        encoder: makes features of observations; None keeps none.
        gamma: discount per action.
        device: where all is kept.
        extra: see ``ReplayBuffer``.
    """

    def __init__(
        self,
        capacity: int,
        spec: EnvSpec,
        horizon: int,
        encoder: FoundFeatures | SharedFeatures | None,
        gamma: float,
        device: torch.device,
        extra: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None = None,
    ) -> None:
        columns: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "episode": ((), torch.int64),
            "solved": ((), torch.bool),
            "return": ((), torch.float32),
            "over": ((), torch.bool),
            "places": ((PLACES, spec.proprio_dim), torch.float32),
            **(extra or {}),
        }
        if encoder is not None:
            columns |= {name: ((encoder.dim,), torch.float32) for name in FEATURES}
        super().__init__(capacity, spec, horizon, privileged=False, device=device, extra=columns)
        self.encoder = encoder
        self.gamma = gamma

    def store(self, chunks: Transitions, source: int = ONLINE) -> Tensor:
        """Adds chunks in the order in which they were played.

        Args:
            chunks: of episodes, or of a data set.
            source: see ``ReplayBuffer``.

        Returns:
            Their places, of those that fit.
        """
        chunks = chunks[slice(max(0, len(chunks) - self.capacity), None)]
        # The transitions, and what critics see in them.
        rows = self.add(chunks, source)
        if chunks.episode is None or chunks.success is None:
            self.data["episode"][rows] = NO_EPISODE
            self.see(rows)
            return rows
        self.data["episode"][rows] = chunks.episode.to(self.device)
        self.see(rows)
        # Own successes: all chunks of the episodes that were solved now, and none of the others.
        solved = chunks.episode[chunks.success].to(self.device)
        self.data["solved"] |= torch.isin(self.data["episode"], solved)
        for ended in chunks.episode[chunks.terminated | chunks.truncated].tolist():
            self._look_back(ended)
        return rows

    def rows(self, rows: Tensor) -> Transitions:
        """The chunks at those places, with their features."""
        chunks = super().rows(rows)
        if self.encoder is None:
            return chunks
        seen = {name: self.data[name][rows] for name in FEATURES}
        return replace(chunks, **seen)

    def solved_ones(self) -> Tensor:
        """The places of chunks of episodes that are over and solved."""
        data = self.data
        solved = data["solved"][: len(self)] & data["over"][: len(self)]
        return solved.nonzero().flatten()

    def see(self, rows: Tensor) -> None:
        """What critics see before and after the chunks at those places, which were played in turn.

        Nothing before their first lesson in seeing.
        """
        if self.encoder is None or not self.encoder.fitted:
            return
        data = self.data
        # Before each chunk.
        for part in rows.split(ENCODED_AT_ONCE):
            data["features"][part] = self.encoder(self.rows(part).obs)
        # What is seen after a chunk is mostly what was seen before the next one.
        before, after = self.next_ones(rows)
        data["next_features"][before] = data["features"][after]
        for part in without(rows, before).split(ENCODED_AT_ONCE):
            data["next_features"][part] = self.encoder(self.rows(part).next_obs)

    def see_all(self) -> None:
        """The features of all observations, anew."""
        self.see(self._by_age(torch.arange(len(self), device=self.device)))

    def next_ones(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the rows whose next chunk is among them too, and the rows of these."""
        episode, order = self.data["episode"][rows].sort(stable=True)
        first, second = rows[order[:-1]], rows[order[1:]]
        # A chunk may be missing between two that were kept.
        same = self.data["next_obs/proprio"][first] == self.data["obs/proprio"][second]
        follows = (episode[:-1] == episode[1:]) & (episode[1:] != NO_EPISODE) & same.all(-1)
        return first[follows], second[follows]

    def _look_back(self, episode: int) -> None:
        """How an episode went on and ended, noted at those of its chunks that are still here."""
        data = self.data
        rows = self._by_age((data["episode"][: len(self)] == episode).nonzero().flatten())
        # What was earned from each chunk on.
        reward, valid = data["reward"][rows], data["valid"][rows]
        data["return"][rows] = discounted_returns(reward, valid, self.gamma)
        data["over"][rows] = True
        # Where it led.
        proprio = [data["obs/proprio"][rows], data["next_obs/proprio"][rows[-1:]]]
        data["places"][rows] = later_places(torch.cat(proprio))

    def _by_age(self, rows: Tensor) -> Tensor:
        """The oldest first: the oldest row follows the newest."""
        return rows[((rows - self.position) % self.capacity).argsort()]


def later_places(proprio: Float[Tensor, "t p"]) -> Float[Tensor, "n j p"]:
    """For all observations of an episode but the last one: where it led from there.

    Args:
        proprio: of all T = n + 1 observations, that after the last chunk included.
    """
    now = torch.arange(len(proprio) - 1, device=proprio.device)
    first, last = torch.zeros_like(now), torch.full_like(now, len(proprio) - 1)
    return proprio[later_steps(now, first, last, ends=ENDS, apart=1, on_the_way=ON_THE_WAY)]


def without(rows: Tensor, others: Tensor) -> Tensor:
    """The rows that are not among the others, in their order."""
    return rows[~torch.isin(rows, others)]
