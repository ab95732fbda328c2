"""Intervals for success rates, for mean returns and for scores over training seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

import numpy as np

from embodyrl.errors import UserError


def wilson(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for a proportion (Wilson 1927); honest near 0 and 1, and for few episodes.

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
    half = z * math.sqrt(p * (1 - p) / n + spread / (4 * n)) / (1 + spread)
    # At the ends the bound is 0 or 1 exactly, which rounding would miss.
    return (0.0 if k == 0 else centre - half), (1.0 if k == n else centre + half)


def format_rate(k: int, n: int) -> str:
    """A success rate with its 95% Wilson interval and its counts, e.g. ``"83% [78, 87] (213/256)"``."""
    if n == 0:
        return "no episodes"
    low, high = wilson(k, n)
    return f"{k / n:.0%} [{low * 100:.0f}, {high * 100:.0f}] ({k}/{n})"


def mean_interval(scores: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean with Student's t interval, which is honest for few episodes.

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
    error = math.sqrt(math.fsum((x - mean) ** 2 for x in scores) / (n - 1) / n)
    half = t_quantile(n - 1, confidence) * error
    return mean, mean - half, mean + half


@cache
def t_quantile(dof: int, confidence: float = 0.95) -> float:
    """The t within which Student's distribution holds ``confidence``: Abramowitz & Stegun 26.7.3-4, by bisection."""
    low = 0.0
    high = math.pi / 2
    odd = dof % 2
    for _ in range(60):
        angle = (low + high) / 2
        term = math.cos(angle) ** odd
        total = 0.0
        for k in range(1, dof // 2 + 1):
            total += term
            term *= (2 * k - 1 + odd) / (2 * k + odd) * math.cos(angle) ** 2
        inside = math.sin(angle) * total
        inside = 2 / math.pi * (angle + inside) if odd else inside
        low, high = (angle, high) if inside < confidence else (low, angle)
    return math.sqrt(dof) * math.tan((low + high) / 2)


def format_return(scores: Sequence[float]) -> str:
    """A mean return with its 95% interval, e.g. ``"2,934 [2,810, 3,058] (8 episodes)"``."""
    n = len(scores)
    if n == 0:
        return "no episodes"
    mean, *bounds = map(short, mean_interval(scores))
    return f"{mean} [{bounds[0]}, {bounds[1]}] ({n} episodes)" if n > 1 else f"{mean} (1 episode)"


def short(x: float) -> str:
    """A return as text with some three digits, e.g. ``"2,934"`` or ``"-4.21"``."""
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def interquartile_mean(scores: Sequence[float] | np.ndarray) -> float:
    """Mean of the middle half of the sorted scores, those at the quartiles weighted by the part that lies inside."""
    values = np.sort(np.asarray(scores, dtype=np.float64).ravel())
    if len(values) == 0:
        raise UserError("There is no mean of no scores.")
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
    """Interquartile mean over runs and tasks with a stratified bootstrap interval (arXiv:2108.13264).

    Args:
        scores: (runs, tasks), or (runs,) for one task. Runs are resampled within each task.
        confidence: of the percentile interval.
        samples: bootstrap resamples.
        seed: of the resampling.

    Returns:
        The interquartile mean, and the lower and upper bound.
    """
    values = np.asarray(scores, dtype=np.float64)
    values = values[:, None] if values.ndim == 1 else values
    if values.size == 0:
        raise UserError("There is no mean of no scores.")
    runs, tasks = values.shape
    rng = np.random.default_rng(seed)
    picks = rng.integers(runs, size=(samples, runs, tasks))
    means = [interquartile_mean(np.take_along_axis(values, pick, axis=0)) for pick in picks]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return interquartile_mean(values), float(low), float(high)
