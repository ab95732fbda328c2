"""``Signal``: a number that grows as an episode leaves the way of those that succeeded.

A signal takes a reading at every decision, that is, before every chunk. Its score is a function of
all readings so far:

    kind    reading                      score
    float   features of the observation  optimal transport to the nearest success (ARMADA's FLOAT)
    stac    several sampled chunks       how far their overlaps differ, summed up (STAC)
    clock   nothing                      actions taken so far
    doubt   spread of a world model      the largest so far

``detector.Detector`` holds a signal against those of successful episodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.functional.transport import cosine_costs, transport_cost
from embodyrl.policy import HasFeatures, has_ability
from embodyrl.types import Obs

PAIRS_AT_ONCE = 2**22
"""Pairs of points whose transport is computed at once, which bounds the memory."""


class Signal(ABC):
    """See the module. A signal without ``fit`` has nothing to learn.

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

    @abstractmethod
    def read(self, policy: Any, obs: Obs, chunk: Tensor, generator: torch.Generator) -> Tensor:
        """The readings (B, ...) of B observations and the actions (B, H, A) that answered them."""

    @abstractmethod
    def score(self, readings: Tensor, steps: Sequence[int], without: int = -1) -> float:
        """The score of an episode so far.

        Args:
            readings: (T, ...) of its decisions.
            steps: T, the actions that had been taken before each.
            without: number of a fitted episode that is left aside.
        """

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


class Float(Signal):
    """FLOAT of ARMADA (arXiv:2510.02298): distance to the nearest successful episode.

    The running episode and a success are clouds of features, one point per decision. The distance is
    the cost of optimal transport between them, with equal masses and the cosine distance. The
    score is the least over all fitted successes. Two details are ours: features are standardised
    first, and of a success the part counts that is no longer than the running episode.
    """

    kind = "float"

    def __init__(self) -> None:
        self.mean = torch.zeros(0)
        self.std = torch.zeros(0)
        self.points = torch.zeros(0, 0, 0)  # (R, L, F), standardised, zero beyond the lengths
        self.lengths = torch.zeros(0, dtype=torch.long)

    def check(self, policy: Any) -> None:
        """See ``Signal``."""
        if not has_ability(policy, HasFeatures):
            raise UserError(
                f"{policy.config.name} has no features that could be compared (`features`), which "
                "a detector of the kind float needs. Take --kind stac, or clock."
            )

    @torch.no_grad()
    def read(self, policy: Any, obs: Obs, chunk: Tensor, generator: torch.Generator) -> Tensor:
        """The policy's features (B, F)."""
        return policy.features(policy.encode(obs)).float().cpu()

    def fit(self, episodes: Sequence[Tensor]) -> None:
        """See ``Signal``."""
        every = torch.cat(list(episodes))
        self.mean = every.mean(0)
        # A feature that never changed has no scale of its own.
        self.std = every.std(0).clamp_min(1e-6 + 1e-3 * float(every.std()))
        self.lengths = torch.tensor([len(episode) for episode in episodes])
        self.points = torch.nn.utils.rnn.pad_sequence(
            [self._standard(episode) for episode in episodes], batch_first=True
        )

    def score(self, readings: Tensor, steps: Sequence[int], without: int = -1) -> float:
        """See ``Signal``."""
        return float(self._nearest(readings, torch.tensor([len(readings)]), without))

    def curve(self, readings: Tensor, steps: Sequence[int], without: int = -1) -> list[float]:
        """See ``Signal``; many decisions at once."""
        counts = torch.arange(1, len(readings) + 1)
        at_once = max(1, PAIRS_AT_ONCE // (self.points[..., 0].numel() * len(readings)))
        found = [self._nearest(readings, some, without) for some in counts.split(at_once)]
        return torch.cat(found).tolist()

    def _nearest(self, readings: Tensor, counts: Tensor, without: int) -> Tensor:
        """The least cost (K,) after each of K numbers of decisions."""
        references = len(self.points)
        costs = cosine_costs(self.points, self._standard(readings).expand(references, -1, -1))
        # Every number of decisions with every success: (K R) problems.
        lengths = torch.minimum(self.lengths, counts[:, None]).flatten()
        costs = costs[:, : int(lengths.max()), : int(counts.max())].repeat(len(counts), 1, 1)
        found = transport_cost(costs, lengths, counts.repeat_interleave(references))
        found = found.view(len(counts), references)
        if without >= 0:
            found[:, without] = torch.inf
        return found.min(1).values

    def _standard(self, readings: Tensor) -> Tensor:
        return (readings - self.mean) / self.std

    def tensors(self) -> dict[str, Tensor]:
        """See ``Signal``."""
        return {
            "mean": self.mean,
            "std": self.std,
            "points": self.points,
            "lengths": self.lengths,
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """See ``Signal``."""
        self.mean = tensors["mean"]
        self.std = tensors["std"]
        self.points = tensors["points"]
        self.lengths = tensors["lengths"]
        if self.points.ndim != 3 or self.points.shape[::2] != (len(self.lengths), len(self.mean)):
            raise ValueError(f"points have the shape {tuple(self.points.shape)}")


class Clock(Signal):
    """How long an episode has taken; whatever is better than it has seen more than the time."""

    kind = "clock"
    by_time = False

    def read(self, policy: Any, obs: Obs, chunk: Tensor, generator: torch.Generator) -> Tensor:
        """Nothing, (B, 0)."""
        return torch.zeros(len(obs), 0)

    def score(self, readings: Tensor, steps: Sequence[int], without: int = -1) -> float:
        """See ``Signal``."""
        return float(steps[-1])
