"""What episodes that nothing was learned from say of critics, and of a step that they made.

The chunks of an episode share its outcome. So whole episodes are held out, and whole episodes are
resampled for an interval.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

SHARES = (0.0, 0.25, 0.5, 0.75)
"""Shares of an episode at which its value is compared with those of others."""
RESAMPLES = 1000
Interval = tuple[float, float]


def folds(strata: Sequence[Hashable], count: int, rng: np.random.Generator) -> np.ndarray:
    """Deals whole episodes out to folds that are alike.

    Episodes are shuffled, put in the order of their strata, and dealt in turn. So each stratum, and
    all strata that begin alike, are spread evenly to within one episode.

    Args:
        strata: (E,) of each episode, such as (outcome, data set, task).
        count: of folds.
        rng: of the shuffle.

    Returns:
        (E,) the fold of each, from 0 on.
    """
    order = rng.permutation(len(strata))
    order = order[np.argsort([repr(strata[i]) for i in order], kind="stable")]
    found = np.empty(len(strata), dtype=np.int64)
    found[order] = (rng.integers(count) + np.arange(len(strata))) % count
    return found


def auroc(score: np.ndarray, label: np.ndarray) -> float:
    """The probability that a positive scores higher than a negative (Mann-Whitney).

    Ties count half. It is NaN if there are no positives or no negatives.
    """
    label = label.astype(bool)
    positive = int(label.sum())
    negative = int((~label).sum())
    if not positive or not negative:
        return float("nan")
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]
    return float((rank[label].sum() - positive * (positive + 1) / 2) / (positive * negative))


def resamples(strata: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The bootstrap's draws of episodes: as many of each stratum as there are.

    Args:
        strata: (E,) of each episode, such as its outcome.
        rng: of the draws.

    Returns:
        (``RESAMPLES``, E) numbers of episodes.
    """
    parts = [np.flatnonzero(strata == k) for k in np.unique(strata)]
    return np.concatenate([rng.choice(p, (RESAMPLES, len(p))) for p in parts], axis=1)


def interval(statistic: np.ndarray) -> Interval:
    """The 95% percentile interval of a statistic of all resamples (R,)."""
    low, high = np.quantile(statistic, [0.025, 0.975])
    return float(low), float(high)


def outcome_auroc(
    value: np.ndarray, episode: np.ndarray, solved: np.ndarray, draws: np.ndarray
) -> tuple[float, Interval]:
    """How well values tell solved from failed episodes, compared at the same share of both.

    Args:
        value: (B,) of the chunks, in the order in which they were played.
        episode: (B,) number of the episode of each, from 0 on.
        solved: (E,) bool.
        draws: of ``resamples``.

    Returns:
        The mean of the AUROC over ``SHARES``, and its interval.
    """
    rows = [value[episode == k] for k in range(len(solved))]
    table = np.array([[v[round(s * (len(v) - 1))] for s in SHARES] for v in rows])

    def mean(drawn: np.ndarray) -> float:
        return float(np.mean([auroc(column, solved[drawn]) for column in table[drawn].T]))

    return mean(np.arange(len(solved))), interval(np.array([mean(drawn) for drawn in draws]))


def within(x: np.ndarray, control: np.ndarray, group: np.ndarray) -> np.ndarray:
    """What is left of x (B,) after its regression on a constant and on ``control``, in each group."""
    left = np.empty(len(x))
    for k in np.unique(group):
        rows = group == k
        known = np.stack([np.ones(rows.sum()), control[rows]], axis=1)
        left[rows] = x[rows] - known @ np.linalg.lstsq(known, x[rows])[0]
    return left


def slope_sums(
    z: np.ndarray, x: np.ndarray, y: np.ndarray, episode: np.ndarray, count: int
) -> np.ndarray:
    """The sums from which the slope of y on x follows, with z as instrument.

    Errors of z, x and y that are independent of one another do not bias it.

    Args:
        z: (B,).
        x: (B,).
        y: (B,).
        episode: (B,) number of the episode of each, from 0 on.
        count: E.

    Returns:
        (E, 2): the sums of z y and of z x over each episode. The slope is the ratio of their totals.
    """
    return np.stack([np.bincount(episode, z * part, count) for part in (y, x)], axis=1)


def slope(sums: np.ndarray) -> np.ndarray:
    """Slopes (...) of totals (..., 2) of ``slope_sums``; 0 where z says nothing of x."""
    return np.divide(
        sums[..., 0], sums[..., 1], out=np.zeros(sums.shape[:-1]), where=sums[..., 1] > 0
    )
