"""``Detector``: a signal, held against successful episodes, with a threshold for false alarms.

    readings --Signal--> score --Band--> deviation --> above the threshold: the episode will fail

The threshold comes from episodes that nothing was fitted to (``functional.conformal``): of those
that succeed, at most the share ``false_alarms`` is ever called a failure. That is promised for
episodes of the same kind as those, and on average over which were recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embodyrl.detectors.episodes import TooFewSuccessesError, Watched
from embodyrl.detectors.signals import Signal
from embodyrl.errors import UserError
from embodyrl.functional.conformal import conformal_threshold, scores_needed

FLOOR = 0.1
"""The least spread of a band, as a share of its mean spread."""


@dataclass
class Band:
    """Mean and spread of a score over the time of an episode.

    Attributes:
        mean: (K,) by the number of the decision; later ones take the last.
        std: (K,) above 0.
    """

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, curves: Sequence[Sequence[float]]) -> Band:
        """Of the scores of successful episodes; one that has ended keeps its last score."""
        # All curves as long as the longest, so that late times have as many of them.
        longest = max(map(len, curves))
        rows = torch.tensor([[*c, *[c[-1]] * (longest - len(c))] for c in curves])
        # Where all scores are the same, such as at the start, any difference would be huge.
        std = rows.std(0, correction=0)
        return cls(rows.mean(0), std.clamp_min(max(FLOOR * float(std.mean()), 1e-6)))

    @classmethod
    def none(cls) -> Band:
        """For a score that means the same at any time."""
        return cls(torch.zeros(1), torch.ones(1))

    def deviation(self, score: float, decision: int) -> float:
        """By how many spreads a score lies above the mean."""
        k = min(decision, len(self.mean) - 1)
        return (score - float(self.mean[k])) / float(self.std[k])


@dataclass
class Detector:
    """See the module.

    Attributes:
        signal: fitted.
        band: of the scores of successes.
        threshold: deviation above which an episode is called a failure.
        false_alarms: the rate that it was calibrated for.
        every: H, actions from one decision to the next.
        fitted: successes that the signal and the band were fitted to.
        calibrated: successes that the threshold comes from.
        policy: checkpoint that it watches.
        fingerprint: of that checkpoint.
    """

    signal: Signal
    band: Band
    threshold: float
    false_alarms: float
    every: int
    fitted: int
    calibrated: int
    policy: str = ""
    fingerprint: str = ""

    def deviation(self, readings: Tensor, steps: Sequence[int]) -> float:
        """How far an episode so far is from those that succeed.

        Args:
            readings: (T, ...) of its decisions.
            steps: T, the actions that had been taken before each.
        """
        return self.band.deviation(self.signal.score(readings, steps), steps[-1] // self.every)

    def deviations(self, episode: Watched) -> list[float]:
        """The same at every decision of a recorded episode."""
        curve = self.signal.curve(episode.readings, episode.steps)
        return [self.band.deviation(score, k) for k, score in enumerate(curve)]

    def alarm(self, episode: Watched) -> int | None:
        """Actions that had been taken when a recorded episode was called a failure, if ever."""
        found = zip(episode.steps, self.deviations(episode), strict=True)
        return next((step for step, deviation in found if deviation > self.threshold), None)


def fit_detector(
    signal: Signal,
    successes: Sequence[Watched],
    false_alarms: float,
    every: int,
    held_out: float = 0.5,
    seed: int = 0,
) -> Detector:
    """Fits a signal and its threshold to successful episodes, each to its own part of them.

    Args:
        signal: not fitted yet.
        successes: recorded episodes that were solved.
        false_alarms: share of successes that may be called failures.
        every: H, actions from one decision to the next.
        held_out: share of the successes that the threshold is calibrated on.
        seed: of the split.

    Raises:
        UserError: a rate or a share outside (0, 1).
        TooFewSuccessesError: too few successes for that rate.
    """
    needed = scores_needed(false_alarms)
    if not 0.0 < held_out < 1.0:
        raise UserError(f"--held-out is {held_out:g}; it is a share between 0 and 1.")
    # 1. Split.
    order = torch.randperm(len(successes), generator=torch.Generator().manual_seed(seed)).tolist()
    count = int(held_out * len(order) + 0.5)
    if count < needed or len(order) - count < 2:
        more = max(-(-needed // held_out), needed + 2)
        raise TooFewSuccessesError(
            f"A rate of {false_alarms:.3g} false alarms takes at least {needed} successful "
            f"episodes to calibrate and 2 to fit. Of {len(order)} successes {count} calibrate "
            f"(--held-out {held_out:g}). Record at least {more:.0f}, or allow more false alarms."
        )
    tune = [successes[i] for i in order[:count]]
    learn = [successes[i] for i in order[count:]]
    # 2. Fit the signal, and the band to what each success would score were it a new episode.
    signal.fit([episode.readings for episode in learn])
    band = Band.none()
    if signal.by_time:
        curves = [signal.curve(one.readings, one.steps, k) for k, one in enumerate(learn)]
        band = Band.of(curves)
    # 3. Calibrate: the largest deviation of each held-out success.
    detector = Detector(signal, band, 0.0, false_alarms, every, len(learn), len(tune))
    largest = [max(detector.deviations(episode)) for episode in tune]
    detector.threshold = conformal_threshold(largest, false_alarms)
    return detector
