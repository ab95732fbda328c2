"""How well estimates order policies: correlations, and what a wrong order costs.

An estimate need not be in the units of success: an error of actions, with its sign changed, orders
policies too. Only ``mmrv`` and ``regret`` have units, those of the truth.
"""

from __future__ import annotations

from torch import Tensor


def pearson(a: Tensor, b: Tensor) -> float:
    """Pearson's linear correlation; NaN if one of them does not vary."""
    x = a.double() - a.double().mean()
    y = b.double() - b.double().mean()
    scale = float((x.square().sum() * y.square().sum()).sqrt())
    return float((x * y).sum()) / scale if scale else float("nan")


def spearman(a: Tensor, b: Tensor) -> float:
    """Spearman's correlation of ranks; ties share their mean rank."""
    return pearson(_ranks(a), _ranks(b))


def kendall(a: Tensor, b: Tensor) -> float:
    """Kendall's tau-b: pairs in the same order less pairs in the other, as a share; NaN as above.

    A pair that is tied in one of them counts for neither (Kendall 1945).
    """
    x = (a[:, None] - a[None]).double().sign()
    y = (b[:, None] - b[None]).double().sign()
    scale = float((x.abs().sum() * y.abs().sum()).sqrt())
    return float((x * y).sum()) / scale if scale else float("nan")


def mmrv(imagined: Tensor, real: Tensor) -> float:
    """Mean maximum rank violation (SIMPLER, arXiv:2405.05941).

    It is the real success that a wrong order of policies costs; 0 is best.
    """
    wrong = (imagined[:, None] < imagined[None]) != (real[:, None] < real[None])
    return float(((real[:, None] - real[None]).abs() * wrong).amax(1).mean())


def regret(estimate: Tensor, real: Tensor) -> float:
    """Regret@1: real success of the best policy, less that of the policy estimated best.

    Of several that are estimated alike one is taken at random, so it is their mean.
    """
    chosen = estimate == estimate.max()
    return float(real.double().max() - real.double()[chosen].mean())


def ranking_errors(estimate: Tensor, real: Tensor) -> dict[str, float]:
    """``spearman``, ``kendall``, ``mmrv`` and ``regret`` of estimates (N,) of N policies."""
    measures = (spearman, kendall, mmrv, regret)
    return {measure.__name__: measure(estimate, real) for measure in measures}


def _ranks(x: Tensor) -> Tensor:
    """Ranks from 1; ties share their mean rank."""
    below = (x[:, None] > x[None]).double().sum(1)
    same = (x[:, None] == x[None]).double().sum(1)
    return below + (same + 1) / 2
