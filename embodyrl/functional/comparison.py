"""Is one policy better than another? Tests, intervals, and how many episodes or runs it takes.

Evaluations are paired: both policies begin in the same initial states. An episode says something
about the difference only where one policy succeeds and the other does not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from embodyrl.errors import UserError
from embodyrl.functional.intervals import mean_interval, t_quantile

MOST = 20_000
"""Arrangements that are counted one by one; of more, so many are drawn."""


def mcnemar(only_a: int, only_b: int) -> float:
    """The two-sided p-value of McNemar's exact test.

    Args:
        only_a: pairs of episodes that A alone solved.
        only_b: that B alone solved.
    """
    n = only_a + only_b
    # If neither is better, each such pair is a toss of a coin.
    tail = sum(math.comb(n, k) for k in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / 2**n)


def paired_interval(
    only_a: int, only_b: int, n: int, confidence: float = 0.95
) -> tuple[float, float]:
    """Tango's score interval of the difference of success rates, B less A (Tango 1998).

    Args:
        only_a: pairs of episodes that A alone solved.
        only_b: that B alone solved.
        n: all pairs.
        confidence: of the two-sided interval.
    """
    if n == 0:
        return -1.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)

    def score(d: float) -> float:
        # The most likely rate of "only A", if the difference were d.
        linear = -only_a - only_b + (2 * n - only_b + only_a) * d
        constant = -only_a * d * (1 - d)
        rate = (math.sqrt(max(0.0, linear**2 - 8 * n * constant)) - linear) / (4 * n)
        variance = n * (2 * rate + d * (1 - d))
        apart = only_b - only_a - n * d
        if variance <= 0:
            return math.copysign(math.inf, apart) if apart else 0.0
        return apart / math.sqrt(variance)

    def where(wanted: float) -> float:
        """The difference whose score is ``wanted``; the score falls with the difference."""
        low, high = -1.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if score(middle) > wanted else (low, middle)
        return (low + high) / 2

    return where(z), where(-z)


def pairs_needed(only_a: int, only_b: int, n: int, alpha: float = 0.05, power: float = 0.8) -> int:
    """Pairs of episodes with which a difference as large as the one seen is shown (Connor 1987).

    Args:
        only_a: as in ``paired_interval``.
        only_b: likewise.
        n: likewise.
        alpha: of the two-sided test.
        power: probability that it then shows the difference.

    Returns:
        0 where no difference was seen.
    """
    if only_a == only_b:
        return 0
    apart = abs(only_b - only_a) / n
    split = (only_a + only_b) / n
    z_test = NormalDist().inv_cdf(1 - alpha / 2)
    z_power = NormalDist().inv_cdf(power)
    root = z_test * math.sqrt(split) + z_power * math.sqrt(max(0.0, split - apart**2))
    return math.ceil((root / apart) ** 2)


def holm(p: Sequence[float]) -> list[float]:
    """P-values of several tests, raised so that all hold at once (Holm 1979)."""
    # The smallest counts as often as there are tests, the next once less, and so on.
    order = sorted(range(len(p)), key=lambda i: p[i])
    out = [1.0] * len(p)
    most = 0.0
    for rank, i in enumerate(order):
        most = max(most, min(1.0, (len(p) - rank) * p[i]))
        out[i] = most
    return out


def sign_flip(differences: Sequence[float], seed: int = 0) -> float:
    """The two-sided p-value that paired differences are 0 on average, by flipping their signs.

    Args:
        differences: (n,), one of each pair.
        seed: of the flips, where there are too many to count all.
    """
    d = np.asarray(differences, dtype=np.float64)
    d = d[d != 0]
    if not len(d):
        return 1.0
    if 2 ** len(d) <= MOST:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(d))))
        return _share_as_large(signs @ d, d.sum())
    rng = np.random.default_rng(seed)
    signs = rng.choice((-1.0, 1.0), size=(MOST, len(d)))
    return _share_as_large(np.r_[d.sum(), signs @ d], d.sum())


def _share_as_large(sums: np.ndarray, seen: float) -> float:
    return float((np.abs(sums) >= abs(seen) - 1e-9).mean())


def paired_difference(
    a: np.ndarray, b: np.ndarray, confidence: float = 0.95, success: bool = True
) -> dict[str, Any]:
    """How far apart two policies are in the same initial states, B less A.

    Args:
        a: (runs, episodes), a score of each: 1 for a solved episode and 0 for another; or a return.
        b: likewise, with the same episodes.
        confidence: of the interval; 1 less the error for which ``needed`` is computed.
        success: whether the scores are successes.

    Returns:
        ``episodes``, ``means`` (of A and B), ``difference`` with its ``interval``, ``p``, and
        ``needed`` pairs, see ``pairs_needed`` (0 where that is not known).
    """
    n = a.shape[1]
    found: dict[str, Any] = {"episodes": n, "means": [float(a.mean()), float(b.mean())]}
    # One run of each side: a pair is solved by A alone, by B alone, by both or by none.
    if success and len(a) == len(b) == 1:
        only_a, only_b = int((a > b).sum()), int((b > a).sum())
        return found | {
            "difference": (only_b - only_a) / n,
            "interval": paired_interval(only_a, only_b, n, confidence),
            "p": mcnemar(only_a, only_b),
            "needed": pairs_needed(only_a, only_b, n, 1 - confidence),
        }
    # Several runs of a side: their mean in each initial state.
    apart = (b.mean(axis=0) - a.mean(axis=0)).tolist()
    mean, low, high = mean_interval(apart, confidence)
    return found | {
        "difference": mean,
        "interval": (low, high),
        "p": sign_flip(apart),
        "needed": 0,
    }


def difference_text(of: dict[str, Any], success: bool = True) -> str:
    """What ``paired_difference`` found, e.g. ``"+57.8 points [50.8, 64.2], p < 0.0001"``."""
    p = "p < 0.0001" if of["p"] < 1e-4 else f"p = {of['p']:.2g}"
    return f"{range_text(of, success)}, {p}"


def range_text(of: dict[str, Any], success: bool = True) -> str:
    """A difference with its interval, in points where scores are successes."""
    middle, low, high = of["difference"], *of["interval"]
    if success:
        return f"{100 * middle:+.1f} points [{100 * low:.1f}, {100 * high:.1f}]"
    return f"{middle:+.4g} [{low:.4g}, {high:.4g}]"


def runs_interval(
    a: Sequence[float], b: Sequence[float], paired: bool, confidence: float = 0.95
) -> tuple[float, float, float]:
    """The mean difference of the scores of training runs, B less A, with Student's t interval.

    Args:
        a: one score of each run.
        b: likewise.
        paired: whether the runs belong together, such as those of one seed; otherwise Welch's
            interval.
        confidence: of the two-sided interval.
    """
    if paired:
        return mean_interval([y - x for x, y in zip(a, b, strict=True)], confidence)
    mean = float(np.mean(b) - np.mean(a))
    # The variance of each side's mean.
    parts = [float(np.var(x, ddof=1)) / len(x) if len(x) > 1 else math.inf for x in (a, b)]
    variance = sum(parts)
    if math.isinf(variance):
        return mean, -math.inf, math.inf
    if variance == 0:
        return mean, mean, mean
    # Welch and Satterthwaite's degrees of freedom, rounded down to be on the safe side.
    dof = variance**2 / sum(p**2 / (len(x) - 1) for p, x in zip(parts, (a, b), strict=True))
    half = t_quantile(max(1, math.floor(dof)), confidence) * math.sqrt(variance)
    return mean, mean - half, mean + half


def adastop(
    a: Sequence[float], b: Sequence[float], groups: int, alpha: float = 0.05, seed: int = 0
) -> tuple[int, bool, bool]:
    """AdaStop's group-sequential permutation test of two sets of training runs (arXiv:2306.10882).

    After each of ``groups`` groups of runs one may look, and stop if the difference is shown; the
    probability to stop by chance is at most ``alpha`` over all looks.

    Args:
        a: one score of each run, in the order in which they were made.
        b: as many, and a whole number of them in each group.
        groups: planned looks.
        alpha: error over all looks.
        seed: of the arrangements, where there are too many to count all.

    Returns:
        The group after which one stops, from 1 on; whether a difference is shown; and whether so
        few runs could show any.

    Raises:
        UserError: the runs do not make groups.
    """
    size, rest = divmod(len(a), groups)
    if len(a) != len(b) or rest or not size:
        raise UserError(
            f"{len(a)} and {len(b)} runs do not make {groups} groups of equal size: there must be "
            "as many of both, and a multiple of the number of groups."
        )
    both = np.stack([np.reshape(a, (groups, size)), np.reshape(b, (groups, size))], axis=1)
    both = both.reshape(groups, 2 * size).astype(np.float64)
    # Which runs of a group count as B's: every choice is as likely if there is no difference.
    count = math.comb(2 * size, size)
    if count**groups <= MOST:
        choices = list(itertools.combinations(range(2 * size), size))
        signs = np.full((count, 2 * size), -1.0)
        for row, chosen in enumerate(choices):
            signs[row, list(chosen)] = 1.0
        picks = np.array(list(itertools.product(range(count), repeat=groups)))
        apart = (both @ signs.T)[np.arange(groups), picks]
    else:
        half = np.repeat((-1.0, 1.0), size)
        signs = np.broadcast_to(half, (MOST, groups, 2 * size))
        apart = (np.random.default_rng(seed).permuted(signs, axis=-1) * both).sum(-1)
    sums = np.abs(np.cumsum(apart, axis=1))
    seen = np.abs(np.cumsum(both[:, size:].sum(1) - both[:, :size].sum(1)))
    # At each look a share alpha / groups of all arrangements may stop that has not stopped before.
    left = np.ones(len(sums), dtype=bool)
    # The best arrangement and its mirror image are as far apart.
    could = math.floor(alpha / groups * len(sums) + 1e-9) >= 2
    for k in range(groups):
        allowed = math.floor(alpha / groups * len(sums) + 1e-9)
        values = np.sort(sums[left, k])[::-1]
        bound = values[allowed] if allowed < len(values) else -1.0
        if seen[k] > bound + 1e-9:
            return k + 1, True, could
        left &= sums[:, k] <= bound + 1e-9
    return groups, False, could
