"""``Mixture``: several data sets as one, each with its share of every batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embodyrl.data.demonstrations import Demonstrations
from embodyrl.errors import UserError
from embodyrl.rollouts.batches import Transitions
from embodyrl.types import Obs


class Mixture:
    """The frames of several data sets, one after the other.

    ``draw`` takes a frame of each data set with a probability proportional to its weight.

    Args:
        parts: of the same horizon and cameras.
        weights: one each, not all 0; None means the number of frames.

    Attributes:
        num_episodes: of all data sets.
        intervention_weight: how many times as often as others frames of a person's are drawn.
        proprio, actions: of all frames; a policy's normalisation is fitted on them, whatever the
            weights.
        success: (F,) bool, whether the episode of each frame was solved.

    Raises:
        UserError: the weights do not fit.
    """

    def __init__(
        self, parts: Sequence[Demonstrations], weights: Sequence[float] | None = None
    ) -> None:
        weights = [float(len(part)) for part in parts] if weights is None else list(weights)
        if len(weights) != len(parts) or min(weights) < 0 or sum(weights) <= 0:
            raise UserError(
                f"data.weights is {list(weights)}: give each of the {len(parts)} data sets "
                "(data.path, then data.more) a number of at least 0, and at least one of them a "
                "number above 0."
            )
        self.parts = list(parts)
        self.weights = torch.tensor(weights, dtype=torch.float64)
        self.intervention_weight = parts[0].intervention_weight
        self.num_episodes = sum(part.num_episodes for part in parts)
        self.offsets = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
        self.proprio = torch.cat([part.proprio for part in parts])
        self.actions = torch.cat([part.actions for part in parts])
        self.success = torch.cat([part.success for part in parts])

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def draw(self, count: int, generator: torch.Generator, *, without_last: int = 0) -> Tensor:
        """Numbers (B,) of frames: first a data set is drawn by weight, then a frame of it."""
        # Which data set each frame comes from; then each draws its frames.
        which = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        out = torch.empty_like(which)
        for k, part in enumerate(self.parts):
            rows = (which == k).nonzero().flatten()
            if not len(rows):
                continue  # a small data set is not in every batch
            drawn = part.draw(len(rows), generator, without_last=without_last)
            out[rows] = drawn + self.offsets[k]
        return out

    def batch(self, indices: Tensor, *, before: int = 0) -> tuple[Obs, Tensor, Tensor]:
        """See ``Demonstrations.batch``."""
        found, back = self._of_parts(indices, lambda part, rows: part.batch(rows, before=before))
        obs, actions, mask = zip(*found, strict=True)
        return Obs.cat(list(obs))[back], torch.cat(actions)[back], torch.cat(mask)[back]

    def later_proprio(
        self, indices: Tensor, ends: int, on_the_way: Sequence[float] = ()
    ) -> tuple[Tensor, Tensor]:
        """See ``Demonstrations.later_proprio``."""
        found, back = self._of_parts(
            indices, lambda part, rows: part.later_proprio(rows, ends, on_the_way)
        )
        proprio, solved = zip(*found, strict=True)
        return torch.cat(proprio)[back], torch.cat(solved)[back]

    def _of_parts(
        self, indices: Tensor, read: Callable[[Demonstrations, Tensor], tuple[Any, ...]]
    ) -> tuple[list[tuple[Any, ...]], Tensor]:
        """What each data set says of its frames, and the order that puts all back in place."""
        indices = indices.cpu()
        # The rows of every data set, in its own numbers.
        which = torch.bucketize(indices, self.offsets[1:], right=True)
        rows = [(which == k).nonzero().flatten() for k in range(len(self.parts))]
        found = [
            read(part, indices[r] - self.offsets[k])
            for k, (part, r) in enumerate(zip(self.parts, rows, strict=True))
            if len(r)
        ]
        return found, torch.cat(rows).argsort()

    def transitions(self, size: int = 1024, *, in_turn: bool = False) -> Iterator[Transitions]:
        """Every chunk of every data set once; see ``Demonstrations.transitions``."""
        shares = self.weights / self.weights.sum() * len(self)
        for part, share, offset in zip(self.parts, shares, self.offsets, strict=False):
            weights = _scaled(part.frame_weights, share)
            for chunks in part.transitions(size, weights, in_turn=in_turn):
                # No two data sets share an episode.
                if chunks.episode is not None:
                    chunks.episode += offset
                yield chunks


def _scaled(weights: Tensor, total: Tensor) -> Tensor:
    """Weights (F,) in the same proportions, with the sum ``total``."""
    return weights * (total / weights.sum())


class EpisodeSource(NamedTuple):
    """Where an episode comes from: the number of its data set, its task, who acted at its end."""

    data: int
    task: str
    person: bool


def episode_sources(demos: Demonstrations | Mixture) -> dict[int, EpisodeSource]:
    """The source of each episode, by its number."""
    found = {}
    mixed = demos if isinstance(demos, Mixture) else Mixture([demos])
    for k, (part, offset) in enumerate(zip(mixed.parts, mixed.offsets.tolist(), strict=False)):
        for end in part.end.unique().tolist():
            task = part.sentences[int(part.instruction[end - 1])]
            found[int(end + offset)] = EpisodeSource(k, task, bool(part.intervention[end - 1]))
    return found
