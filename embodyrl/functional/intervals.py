"""Confidence intervals of success rates, of mean returns, and of scores over training seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

import numpy as np

from embodyrl.errors import UserError


def wilson(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a success rate (Wilson 1927).

    It stays inside [0, 1] and keeps its coverage near 0 and 1 and for few episodes.

    Args:
        k: successes.
        n: episodes.
        confidence: of the two-sided interval.

    Returns:
        Lower and upper bound in [0, 1]; (0, 1) for no episodes.
    """
    if not 0 <= k <= n:
        raise UserError(f"There cannot be {k} successes among {n} episodes.")
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = k / n
    spread = z * z / n
    centre = (p + spread / 2) / (1 + spread)
    half_width = z * math.sqrt(p * (1 - p) / n + spread / (4 * n)) / (1 + spread)
    # For k = 0 the lower bound is exactly 0, and for k = n the upper one is exactly 1; rounding
    # would miss both.
    low = 0.0 if k == 0 else centre - half_width
    high = 1.0 if k == n else centre + half_width
    return low, high


def format_rate(k: int, n: int) -> str:
    """A success rate with its 95% Wilson interval, e.g. ``"83% [78, 87] (213/256)"``."""
    if n == 0:
        return "no episodes"
    low, high = wilson(k, n)
    return f"{k / n:.0%} [{low * 100:.0f}, {high * 100:.0f}] ({k}/{n})"


def mean_interval(scores: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean with Student's t interval, which takes the small number of episodes into account.

    Args:
        scores: (n,), for example the returns of an evaluation's episodes.
        confidence: of the two-sided interval.

    Returns:
        The mean, and the lower and upper bound; they are infinite for one score.
    """
    n = len(scores)
    if n == 0:
        raise UserError("There is no mean of no scores.")
    mean = math.fsum(scores) / n
    if n == 1:
        return mean, -math.inf, math.inf
    variance = math.fsum((x - mean) ** 2 for x in scores) / (n - 1)
    standard_error = math.sqrt(variance / n)
    half_width = t_quantile(n - 1, confidence) * standard_error
    return mean, mean - half_width, mean + half_width


@cache
def t_quantile(dof: int, confidence: float = 0.95) -> float:
    """The t for which P(-t < T < t) = confidence, T of Student's distribution.

    The probability is the finite series of Abramowitz & Stegun 26.7.3-4 in the angle
    theta = arctan(t / sqrt(dof)). It is inverted by bisection.
    """
    low = 0.0
    high = math.pi / 2
    odd = dof % 2
    for _ in range(60):
        angle = (low + high) / 2
        # The series has dof // 2 terms, each a product of the one before it.
        term = math.cos(angle) ** odd
        total = 0.0
        for k in range(1, dof // 2 + 1):
            total += term
            term *= (2 * k - 1 + odd) / (2 * k + odd) * math.cos(angle) ** 2
        probability = math.sin(angle) * total
        if odd:
            probability = 2 / math.pi * (angle + probability)
        if probability < confidence:
            low = angle
        else:
            high = angle
    return math.sqrt(dof) * math.tan((low + high) / 2)


def format_return(scores: Sequence[float]) -> str:
    """A mean return with its 95% interval, e.g. ``"2,934 [2,810, 3,058] (8 episodes)"``."""
    n = len(scores)
    if n == 0:
        return "no episodes"
    mean, low, high = map(format_number, mean_interval(scores))
    return f"{mean} [{low}, {high}] ({n} episodes)" if n > 1 else f"{mean} (1 episode)"


def format_number(x: float) -> str:
    """A return as text with about three digits, e.g. ``"2,934"`` or ``"-4.21"``."""
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def interquartile_mean(scores: Sequence[float] | np.ndarray) -> float:
    """Mean of the middle half of the sorted scores.

    A score at a quartile counts with the part of it that lies inside the middle half.
    """
    values = np.sort(np.asarray(scores, dtype=np.float64).ravel())
    if len(values) == 0:
        raise UserError("There is no mean of no scores.")
    # The i-th of n sorted scores stands for the interval [i/n, (i+1)/n] of the distribution. Its
    # weight is the length of that interval inside [1/4, 3/4].
    n = len(values)
    edges = np.arange(n + 1) / n
    weights = np.clip(np.minimum(edges[1:], 0.75) - np.maximum(edges[:-1], 0.25), 0.0, None)
    return float((values * weights).sum() / weights.sum())


def bootstrap_iqm(
    scores: Sequence[float] | Sequence[Sequence[float]] | np.ndarray,
    confidence: float = 0.95,
    samples: int = 2000,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Interquartile mean over runs and tasks, with a bootstrap interval (arXiv:2108.13264).

    Args:
        scores: (runs, tasks), or (runs,) for one task. The bootstrap is stratified: runs are
            resampled within each task.
        confidence: of the percentile interval.
        samples: number of bootstrap resamples.
        seed: of the resampling.

    Returns:
        The interquartile mean, and the lower and upper bound.
    """
    values = np.asarray(scores, dtype=np.float64)
    values = values[:, None] if values.ndim == 1 else values
    if values.size == 0:
        raise UserError("There is no mean of no scores.")
    # Resample the runs of each task with replacement, and take the statistic of each resample.
    runs, tasks = values.shape
    rng = np.random.default_rng(seed)
    resamples = rng.integers(runs, size=(samples, runs, tasks))
    means = [interquartile_mean(np.take_along_axis(values, rows, axis=0)) for rows in resamples]
    # The percentile interval of these statistics.
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return interquartile_mean(values), float(low), float(high)


def latest_near_best(scores: Sequence[float], errors: Sequence[float]) -> int:
    """Which of several scores to keep: the latest within one standard error of the best.

    It is Breiman et al. 1984, section 3.4.3. So few episodes do not tell these apart, and the best
    of many scores owes more to luck than the latest one.

    Args:
        scores: in order.
        errors: the standard error of each.

    Raises:
        UserError: there is none.
    """
    if not scores:
        raise UserError("There is no best of no scores.")
    best = max(range(len(scores)), key=lambda i: scores[i])
    return max(i for i, x in enumerate(scores) if x >= scores[best] - errors[best])


def standard_error(scores: Sequence[float]) -> float:
    """Of the mean of ``scores``: their standard deviation / sqrt(n); 0 for one."""
    n = len(scores)
    mean = math.fsum(scores) / n
    return math.sqrt(math.fsum((x - mean) ** 2 for x in scores)) / n


def pass_at_k(
    solved: Sequence[int], attempts: int, confidence: float = 0.95, seed: int = 0
) -> list[tuple[float, float, float]]:
    """The share of initial states that are solved at least once in k attempts, k from 1 on.

    The estimate is free of bias (arXiv:2107.03374, eq. 1). The interval resamples initial states.
    Where all states have the same outcome, resampling tells nothing, and it is Wilson's.

    Args:
        solved: (n,) how many of its attempts solved each initial state.
        attempts: K, of each initial state.
        confidence: of the percentile interval.
        seed: of the resampling.

    Returns:
        For every k up to K: the share, and its lower and upper bound.
    """
    if not len(solved):
        raise UserError("There is no share of no initial states.")
    drawn = np.random.default_rng(seed).integers(len(solved), size=(2000, len(solved)))
    found = []
    for k in range(1, attempts + 1):
        misses = [math.comb(attempts - c, k) / math.comb(attempts, k) for c in range(attempts + 1)]
        each = 1 - np.asarray(misses)[np.asarray(solved)]
        low, high = np.quantile(
            each[drawn].mean(axis=1), [(1 - confidence) / 2, (1 + confidence) / 2]
        )
        share = float(each.mean())
        if share in (0.0, 1.0):
            low, high = wilson(round(share * len(each)), len(each), confidence)
        found.append((share, float(low), float(high)))
    return found
