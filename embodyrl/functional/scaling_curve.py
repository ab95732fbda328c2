"""How success grows with compute: a saturating curve, fitted and continued.

ScaleRL (arXiv:2510.13786, eq. 1) writes success after compute C as

    R(C) = R_0 + (A - R_0) / (1 + (C_mid / C)^B)

R_0 is where it starts, A where it ends however long it goes on, C_mid where half of the rise is
done, and B how steep that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FEWEST = 4
"""Evaluations of a run at least: the curve has four parameters."""
BENT = 0.9
"""Share of the resamples that must rise half as fast at the end as at their fastest, or slower."""
SLOPES = np.geomspace(0.25, 8.0, 31)
"""Values of B that are tried."""
MIDDLES = np.geomspace(1 / 30, 100.0, 81)
"""Values of C_mid that are tried, as multiples of the last evaluation's compute."""


@dataclass(frozen=True)
class Curves:
    """S fitted curves, each field (S,)."""

    start: Array
    asymptote: Array
    middle: Array
    slope: Array

    def at(self, compute: Array) -> Array:
        """Success (S, m) after compute (m,)."""
        share = rise(compute, self.middle[:, None], self.slope[:, None])
        return self.start[:, None] + (self.asymptote - self.start)[:, None] * share


def rise(compute: Array, middle: Array | float, slope: Array | float) -> Array:
    """The share of the rise that is done after some compute; 0 at the start."""
    with np.errstate(divide="ignore"):
        return 1.0 / (1.0 + np.exp(slope * (np.log(middle) - np.log(compute))))


def fit_curves(compute: Array, rates: Array, weights: Array) -> Curves:
    """Fits S curves by weighted least squares; R_0 and A stay within [0, 1].

    For given C_mid and B the curve is linear in R_0 and A, so these are solved for exactly, and the
    others searched on a grid (variable projection). A weak prior keeps B near 1 where few
    evaluations say nothing about it: log B counts as one measurement of 0 with standard deviation 1.

    Args:
        compute: (n,) of each evaluation; 0 at the start.
        rates: (S, n) success rates.
        weights: (S, n) one over their variances; 0 leaves an evaluation out.
    """
    # The grid, flat, and the share of the rise that each of its points has done when.
    middles, slopes = (
        x.ravel() for x in np.meshgrid(MIDDLES * compute.max(), SLOPES, indexing="ij")
    )
    done = rise(compute, middles[:, None], slopes[:, None])  # (G, n)
    left = 1.0 - done
    # Sums over evaluations, (S, G): of the normal equations.
    ll = weights @ (left * left).T + 1e-9
    ld = weights @ (left * done).T
    dd = weights @ (done * done).T + 1e-9
    ly = (weights * rates) @ left.T
    dy = (weights * rates) @ done.T
    # The least squares solution, and those on the edges of the square where it lies outside.
    determinant = ll * dd - ld * ld
    inner = ((ly * dd - dy * ld) / determinant, (dy * ll - ly * ld) / determinant)
    inside = (np.minimum(*inner) >= 0) & (np.maximum(*inner) <= 1)
    found = [inner]
    for edge in (0.0, 1.0):
        fixed = np.full_like(ll, edge)
        found.append((fixed, np.clip((dy - edge * ld) / dd, 0, 1)))
        found.append((np.clip((ly - edge * ld) / ll, 0, 1), fixed))
    losses = [r * r * ll + 2 * r * a * ld + a * a * dd - 2 * (r * ly + a * dy) for r, a in found]
    losses[0] = np.where(inside, losses[0], np.inf)
    which = np.argmin(losses, axis=0)
    total = np.min(losses, axis=0) + np.log(slopes) ** 2
    # The best point of the grid, for each of the S.
    best = total.argmin(axis=1)
    rows = np.arange(len(rates))
    start, asymptote = (np.choose(which, [f[part] for f in found])[rows, best] for part in (0, 1))
    return Curves(start, asymptote, middles[best], slopes[best])


def extrapolate(
    compute: Array,
    successes: Array,
    episodes: Array,
    runs: NDArray[np.int64],
    *,
    ahead: tuple[float, ...] = (2.0, 4.0),
    samples: int = 500,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, Any]:
    """Fits evaluations of one or several runs, and continues the curve.

    The intervals are a bootstrap: runs are drawn with replacement, and each success rate from
    Beta(k + 1/2, n - k + 1/2). With one run they say nothing about training anew.

    Args:
        compute: (n,) of each evaluation, 0 at the start.
        successes: (n,) k.
        episodes: (n,) n.
        runs: (n,) the number of the run that it is of.
        ahead: multiples of the largest compute at which the curve is read.
        samples: S, of the bootstrap.
        confidence: of the intervals.
        seed: of the bootstrap.

    Returns:
        ``last``, the largest compute; ``refused``, why there is no curve, in words, and otherwise
        empty; then also ``start``, ``asymptote``, ``middle`` and ``slope``, each a value with lower
        and upper bound; ``ahead``, multiple -> the same of success there; and ``curve``, points
        (compute, success, lower, upper) up to the first multiple.
    """
    last = float(compute.max(initial=0.0))
    # Too little to fit anything to.
    most = max((int((runs == run).sum()) for run in np.unique(runs)), default=0)
    if last <= 0:
        return {"last": last, "refused": "no evaluation after the start"}
    if most < FEWEST:
        text = f"{most} evaluations, and the curve takes {FEWEST} of a run"
        return {"last": last, "refused": text}
    # The curve itself, and those of the resamples.
    rng = np.random.default_rng(seed)
    names, run = np.unique(runs, return_inverse=True)
    times = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=samples)
    drawn = rng.beta(successes + 0.5, episodes - successes + 0.5, size=(samples, len(compute)))
    smooth = (successes + 1) / (episodes + 2)
    weight = episodes / (smooth * (1 - smooth))
    one = fit_curves(compute, (successes / episodes)[None], weight[None])
    many = fit_curves(compute, drawn, times[:, run] * weight)
    # What the evaluations must show.
    rises = many.at(np.array([last]))[:, 0] - many.start
    if np.quantile(rises, (1 - confidence) / 2) <= 0:
        return {"last": last, "refused": "success does not rise"}
    speed = np.diff(many.at(last * np.arange(41.0) / 40), axis=1)
    if (speed[:, -1] <= 0.5 * speed.max(axis=1)).mean() < BENT:
        return {"last": last, "refused": "no bend yet: it may still rise far or end soon"}

    def spread(value: Array, of: Array) -> list[float]:
        tail = (1 - confidence) / 2
        return [float(value[0]), *(float(q) for q in np.quantile(of, [tail, 1 - tail]))]

    def read(at: float) -> list[float]:
        point = np.array([at])
        return spread(one.at(point)[:, 0], many.at(point)[:, 0])

    return {
        "last": last,
        "refused": "",
        **{
            name: spread(getattr(one, name), getattr(many, name))
            for name in ("start", "asymptote", "middle", "slope")
        },
        "ahead": {f"{multiple:g}": read(multiple * last) for multiple in ahead},
        "curve": [[float(x), *read(x)] for x in np.linspace(0, ahead[0] * last, 61)],
    }
