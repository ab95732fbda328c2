"""``Estimate``: what one way of judging says of a policy, and of two of them in pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from embodyrl.functional.comparison import paired_difference
from embodyrl.functional.fitted_q import bootstrap_interval
from embodyrl.functional.intervals import mean_interval, wilson
from embodyrl.judge.logged import Logged

WAYS = {
    "fitted_q": "fitted Q",
    "agreement": "agreement",
    "dream": "dream",
}
"""Way -> what it is called in the table."""


@dataclass(frozen=True)
class Estimate:
    """Of one policy; a higher value is better.

    Attributes:
        way: one of ``WAYS``.
        each: of each critic (``fitted_q``), solved episode (``agreement``) or dream (``dream``); the
            same ones for all policies.
    """

    way: str
    each: np.ndarray

    def summary(self) -> dict[str, Any]:
        """``value`` and its 95% ``interval``, both in [0, 1]."""
        if self.way == "dream":
            k, n = int(self.each.sum()), len(self.each)
            return {"value": k / n, "interval": list(wilson(k, n))}
        if self.way == "fitted_q":
            value, *bounds = bootstrap_interval(self.each)
        else:
            value, *bounds = mean_interval(self.each.tolist())
        return {"value": value, "interval": [min(1.0, max(0.0, bound)) for bound in bounds]}

    def less(self, other: Estimate, confidence: float) -> tuple[float, float, float]:
        """The difference to another policy in pairs, and its interval."""
        apart = self.each - other.each
        if self.way == "fitted_q":
            value, low, high = bootstrap_interval(apart, confidence)
        elif self.way == "agreement":
            value, low, high = mean_interval(apart.tolist(), confidence)
        else:
            found = paired_difference(other.each[None], self.each[None], confidence)
            value, (low, high) = found["difference"], found["interval"]
        return value, low, high


def agreement(logged: Logged, proposals: Float[Tensor, "b m h a"]) -> np.ndarray:
    """How near a policy is to what was done in the episodes that were solved.

    It is 1 less half the mean absolute difference of actions, which lie in [-1, 1]: 1 for the same
    actions. What labs look at where they look at the loss of held-out demonstrations.

    Returns:
        (E',) of each solved episode.
    """
    error = (proposals - logged.choice[:, None]).abs().mean((1, 3))  # (B, H)
    # Over the actions that were carried out, in each episode.
    sums = (error * logged.valid).sum(1).double().cpu().numpy()
    counts = logged.valid.sum(1).double().cpu().numpy()
    episode = logged.episode.cpu().numpy()
    each = 1 - np.bincount(episode, sums) / np.bincount(episode, counts) / 2
    return each[logged.success.cpu().numpy()]


def differences(estimates: list[Estimate]) -> list[dict[str, Any]]:
    """All pairs of policies, given with the best first.

    The intervals are so wide that all of them hold at once, 95 times of 100 (Bonferroni).

    Returns:
        For each pair the places ``a`` and ``b`` of the two, a first; the ``difference``, A less B,
        with its ``interval``; and ``better``: ``"a"``, ``"b"`` or, where it contains 0, empty.
    """
    count = len(estimates)
    confidence = 1 - 0.05 / max(1, count * (count - 1) // 2)
    found = []
    for a in range(count):
        for b in range(a + 1, count):
            value, low, high = estimates[a].less(estimates[b], confidence)
            better = "a" if low > 0 else "b" if high < 0 else ""
            pair = {"a": a, "b": b, "difference": value, "interval": [low, high]}
            found.append(pair | {"better": better})
    return found
