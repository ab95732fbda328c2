"""Signals that compare the policy's own features with those of successful episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from embodyrl.detectors.signals import Signal
from embodyrl.errors import UserError
from embodyrl.functional.transport import mean_distances, transport_cost
from embodyrl.policy import HasFeatures, has_ability
from embodyrl.types import Obs

PAIRS_AT_ONCE = 2**22
"""Pairs of points whose transport is computed at once, which bounds the memory."""


class FeatureSignal(Signal):
    """Keeps the features of R successes of up to L decisions; a subclass compares.

    Attributes:
        mean: (F,) of the features.
        std: (F,) of the features, by which they are standardised.
        points: (R, L, F) standardised, zero beyond an episode's end.
        lengths: (R,) decisions of each.
    """

    def __init__(self) -> None:
        self.mean = torch.zeros(0)
        self.std = torch.zeros(0)
        self.points = torch.zeros(0, 0, 0)
        self.lengths = torch.zeros(0, dtype=torch.long)

    def check(self, policy: Any) -> None:
        """See ``Signal``."""
        if not has_ability(policy, HasFeatures):
            raise UserError(
                f"{policy.config.name} has no features that could be compared (`features`), which "
                f"a detector of the kind {self.kind} needs. Take --kind stac, or clock."
            )

    @torch.no_grad()
    def read(self, policy: Any, obs: Obs, chunk: Tensor, generator: torch.Generator) -> Tensor:
        """The policy's features (B, F)."""
        return policy.features(policy.encode(obs)).float().cpu()

    def fit(self, episodes: Sequence[Tensor]) -> None:
        """See ``Signal``."""
        every = torch.cat(list(episodes))
        self.mean = every.mean(0)
        # A feature that hardly changed has no scale of its own.
        self.std = every.std(0).clamp_min(1e-6 + 1e-3 * float(every.std()))
        # Episodes of other lengths side by side.
        self.lengths = torch.tensor([len(episode) for episode in episodes])
        self.points = torch.nn.utils.rnn.pad_sequence(
            [self.standard(episode) for episode in episodes], batch_first=True
        )

    def standard(self, readings: Tensor) -> Tensor:
        """Standardised features."""
        return (readings - self.mean) / self.std

    def tensors(self) -> dict[str, Tensor]:
        """See ``Signal``."""
        names = ("mean", "std", "points", "lengths")
        return {name: getattr(self, name) for name in names}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """See ``Signal``."""
        self.mean = tensors["mean"]
        self.std = tensors["std"]
        self.points = tensors["points"]
        self.lengths = tensors["lengths"]
        if self.points.ndim != 3 or self.points.shape[::2] != (len(self.lengths), len(self.mean)):
            raise ValueError(f"points have the shape {tuple(self.points.shape)}")


class FloatIndex(FeatureSignal):
    """FLOAT of ARMADA (arXiv:2510.02298): distance to the nearest successful episode.

    The running episode and a success are clouds of features, one point per decision. The distance
    is the cost of optimal transport between them, with equal masses. The score is the least over
    all fitted successes. Two details are ours: the cost is the distance of standardised features,
    not their cosine, and of a success the part counts that is no longer than the running episode.
    """

    kind = "float"

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
        costs = mean_distances(self.points, self.standard(readings).expand(references, -1, -1))
        # Every number of decisions with every success: K R problems.
        lengths = torch.minimum(self.lengths, counts[:, None]).flatten()
        costs = costs[:, : int(lengths.max()), : int(counts.max())].repeat(len(counts), 1, 1)
        found = transport_cost(costs, lengths, counts.repeat_interleave(references))
        found = found.view(len(counts), references)
        # An episode is not compared with itself.
        if without >= 0:
            found[:, without] = torch.inf
        return found.min(1).values


class NearestFeatures(FeatureSignal):
    """How far the newest features are from all that successes have shown, at any time.

    It is what is left of FLOAT without transport: cheaper, and blind to an episode that stands
    still in a place where successes have been.
    """

    kind = "nearest"

    def score(self, readings: Tensor, steps: Sequence[int], without: int = -1) -> float:
        """See ``Signal``."""
        return self.curve(readings[-1:], steps[-1:], without)[0]

    def curve(self, readings: Tensor, steps: Sequence[int], without: int = -1) -> list[float]:
        """See ``Signal``."""
        there = torch.arange(self.points.shape[1]) < self.lengths[:, None]
        # An episode is not compared with itself.
        if without >= 0:
            there[without] = False
        return mean_distances(self.standard(readings), self.points[there]).min(1).values.tolist()
