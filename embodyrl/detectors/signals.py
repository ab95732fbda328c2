"""``Signal``: a number that grows as an episode leaves the way of those that succeeded.

A signal takes a reading at every decision, that is, before every chunk. Its score is a function of
all readings so far:

    kind     reading                      score
    float    features of the observation  optimal transport to the nearest success (ARMADA's FLOAT)
    nearest  the same                     distance of the newest to the nearest of all successes
    stac     several sampled chunks       how far their overlaps differ, summed up (STAC)
    clock    nothing                      actions taken so far
    doubt    spread of a world model      the largest so far

``detector.Detector`` holds a signal against those of successful episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from embodyrl.types import Obs


class Signal:
    """Base of the signals; see the module. One without ``fit`` has nothing to learn.

    Attributes:
        kind: its name.
        by_time: whether a success has another score early than late, so that it is compared with
            those of the same time.
    """

    kind: ClassVar[str]
    by_time: ClassVar[bool] = True

    def check(self, policy: Any) -> None:
        """Refuses a policy that it cannot be read of.

        Raises:
            UserError: what the policy lacks.
        """

    def read(self, policy: Any, obs: Obs, chunk: Tensor, generator: torch.Generator) -> Tensor:
        """The readings (B, ...) of B observations and the actions (B, H, A) that answered them."""
        raise NotImplementedError

    def score(self, readings: Tensor, steps: Sequence[int], without: int = -1) -> float:
        """The score of an episode so far.

        Args:
            readings: (T, ...) of its decisions.
            steps: T, the actions that had been taken before each.
            without: number of a fitted episode that is left aside.
        """
        raise NotImplementedError

    def curve(self, readings: Tensor, steps: Sequence[int], without: int = -1) -> list[float]:
        """The score at each of the T decisions, which knows those before it alone."""
        every = range(1, len(steps) + 1)
        return [self.score(readings[:k], steps[:k], without) for k in every]

    def fit(self, episodes: Sequence[Tensor]) -> None:
        """Learns from the readings (T, ...) of successful episodes."""

    def tensors(self) -> dict[str, Tensor]:
        """What was learned."""
        return {}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Takes what was learned back.

        Raises:
            KeyError: something is missing.
            ValueError: a tensor of another shape.
        """


class TimeTaken(Signal):
    """How long an episode has taken; whatever is better than it has seen more than the time."""

    kind = "clock"
    by_time = False

    def read(self, policy: Any, obs: Obs, chunk: Tensor, generator: torch.Generator) -> Tensor:
        """Nothing, (B, 0)."""
        return torch.zeros(len(obs), 0)

    def score(self, readings: Tensor, steps: Sequence[int], without: int = -1) -> float:
        """See ``Signal``."""
        return float(steps[-1])
