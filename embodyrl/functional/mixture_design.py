"""Which mixture of data sets is best: a design of runs on the simplex, and a surrogate fitted to them.

The success of a policy is taken to be a smooth function of the weights w of its data sets, w_i >= 0 and
sum w = 1. Its logit is Scheffe's quadratic polynomial of mixtures (J. R. Stat. Soc. B 20, 1958):

    logit p(w) = sum_i b_i w_i + sum_{i<j} b_ij w_i w_j

b_i is what data set i is worth alone, b_ij > 0 says that i and j are worth more together. MoDoMoDo
(arXiv:2505.24871) predicts the outcome of a run from its mixture likewise, and takes the best predicted.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PRIOR_ALONE = 3.0
"""Standard deviation of b_i around 0, in logits: between 0.3 and 99.7% nothing is ruled out."""
PRIOR_TOGETHER = 4.0
"""Of b_ij: an even mixture of two differs by up to 2 logits from the mean of the two alone."""
STEPS = 100
"""Newton steps at most."""
CANDIDATES = 20_000
"""Mixtures among which the best is looked for, at most."""


def lattice(parts: int) -> Array:
    """The mixtures (R, q) to try: each data set alone, each even pair, and all alike.

    With two data sets the even pair is all alike. R is q (q + 1) / 2 + 1 for more.
    """
    alone = np.eye(parts)
    pairs = [(alone[i] + alone[j]) / 2 for i, j in itertools.combinations(range(parts), 2)]
    whole = [np.full(parts, 1 / parts)] if parts > 2 else []
    return np.array([*alone, *pairs, *whole])


def terms(weights: Array) -> Array:
    """The terms (R, q (q + 1) / 2) of the polynomial at weights (R, q)."""
    pairs = itertools.combinations(range(weights.shape[1]), 2)
    together = [weights[:, i] * weights[:, j] for i, j in pairs]
    return np.column_stack([weights, *together])


@dataclass(frozen=True)
class Surrogate:
    """The success that each mixture is expected to have.

    Attributes:
        mean: (M,) coefficients at the mode of the posterior.
        covariance: (M, M) of them, by Laplace's approximation.
        spread: how many times as much as binomial the runs vary; at least 1.
    """

    mean: Array
    covariance: Array
    spread: float

    def logits(self, weights: Array, coefficients: Array | None = None) -> Array:
        """Of weights (R, q): (R,), or (S, R) for S draws of coefficients."""
        given = self.mean if coefficients is None else coefficients
        return given @ terms(weights).T

    def draws(self, count: int, seed: int = 0) -> Array:
        """Coefficients (count, M) from the posterior."""
        rng = np.random.default_rng(seed)
        return rng.multivariate_normal(self.mean, self.covariance, count, method="cholesky")


def fit_surrogate(weights: Array, solved: Array, episodes: Array) -> Surrogate:
    """Fits the polynomial to runs: a binomial likelihood, and a wide Gaussian prior.

    Runs of the same mixture differ by more than their episodes tell, because training is noisy too.
    Where several seeds show that, the likelihood counts for as much less.

    Args:
        weights: (R, q) of the runs; a mixture may occur several times.
        solved: (R,) episodes.
        episodes: (R,) that were played.
    """
    # Rows of the design.
    x = terms(weights)
    parts = weights.shape[1]
    # The prior's precision, of data sets alone and together.
    together = x.shape[1] - parts
    precision = np.diag([PRIOR_ALONE**-2] * parts + [PRIOR_TOGETHER**-2] * together)
    spread = _spread(weights, solved, episodes)
    # Newton's method; a step is never longer than two logits.
    b = np.zeros(x.shape[1])
    for _ in range(STEPS):
        p = _sigmoid(x @ b)
        gradient = x.T @ (solved - episodes * p) / spread - precision @ b
        hessian = (x.T * (episodes * p * (1 - p) / spread)) @ x + precision
        step = np.linalg.solve(hessian, gradient)
        b = b + step * min(1.0, 2.0 / max(np.abs(step).max(), 1e-12))
        if np.abs(step).max() < 1e-10:
            break
    # Laplace: the curvature at the mode.
    p = _sigmoid(x @ b)
    hessian = (x.T * (episodes * p * (1 - p) / spread)) @ x + precision
    return Surrogate(b, np.asarray(np.linalg.inv(hessian), np.float64), spread)


def _spread(weights: Array, solved: Array, episodes: Array) -> float:
    """Pearson's statistic within runs of the same mixture, by its degrees of freedom; at least 1."""
    # Over the mixtures that have several runs.
    total, free = 0.0, 0
    for mixture in np.unique(weights.round(9), axis=0):
        same = (np.abs(weights - mixture) < 1e-8).all(axis=1)
        n, k = episodes[same], solved[same]
        p = k.sum() / n.sum()
        if same.sum() > 1 and 0 < p < 1:
            total += float(((k - n * p) ** 2 / (n * p * (1 - p))).sum())
            free += int(same.sum()) - 1
    return max(1.0, total / free) if free else 1.0


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def simplex_grid(parts: int) -> Array:
    """Mixtures (R, q) all over the simplex: in steps as fine as ``CANDIDATES`` allows."""
    # The finest step that is not too many.
    step = 20
    while step > 2 and _count(parts, step) > CANDIDATES:
        step -= 1
    # Stars and bars: every way to deal the steps out.
    rows = [
        np.diff([-1, *bars, step + parts - 1]) - 1
        for bars in itertools.combinations(range(step + parts - 1), parts - 1)
    ]
    return np.array(rows, dtype=np.float64) / step


def _count(parts: int, step: int) -> int:
    """Mixtures of ``parts`` data sets in steps of 1/step."""
    count = 1
    for i in range(1, parts):
        count = count * (step + i) // i
    return count


def best_mixture(surrogate: Surrogate, default: Array, seed: int = 0) -> dict[str, Any]:
    """The mixture of the highest predicted success, beside the one that would be used without.

    Args:
        surrogate: fitted.
        default: (q,).
        seed: of the draws behind the intervals.

    Returns:
        ``weights``; ``predicted`` and ``default``, each (middle, low, high) of the success with a
        95% interval; and ``better``, the probability that it is better than the default.
    """
    # The best of the grid.
    grid = simplex_grid(len(default))
    chosen = grid[int(surrogate.logits(grid).argmax())]
    # It and the default, by draws from the posterior.
    both = np.stack([chosen, default])
    drawn = _sigmoid(surrogate.logits(both, surrogate.draws(4000, seed)))
    middle = _sigmoid(surrogate.logits(both))
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    rates = [[float(m), float(a), float(z)] for m, a, z in zip(middle, low, high, strict=True)]
    return {
        "weights": [round(float(w), 4) for w in chosen],
        "predicted": rates[0],
        "default": rates[1],
        "better": float((drawn[:, 0] > drawn[:, 1]).mean()),
    }
