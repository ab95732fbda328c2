"""Distances between samples: optimal transport (Sinkhorn), and maximum mean discrepancy."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def mean_distances(x: Float[Tensor, "... n d"], y: Float[Tensor, "... m d"]) -> Tensor:
    """Root mean square over the dims of the difference, (..., n, m), of all points of x and y."""
    return torch.cdist(x, y) / x.shape[-1] ** 0.5


def sinkhorn_plan(
    cost: Float[Tensor, "b n m"],
    rows: Int[Tensor, " b"],
    columns: Int[Tensor, " b"],
    *,
    blur: float = 0.05,
    iterations: int = 50,
) -> Float[Tensor, "b n m"]:
    """Transport plans of least cost, with entropic regularisation (arXiv:1306.0895), in log space.

    Args:
        cost: of moving mass from point n to point m, finite everywhere.
        rows: how many of the n points each problem has, at least 1; they carry the same mass.
        columns: how many of the m points.
        blur: strength of the regularisation, in units of the cost. The plan tends to the optimal
            one as it goes to 0, and needs more iterations.
        iterations: of Sinkhorn. The last one ends with the columns, whose sums are then exact.

    Returns:
        The mass that moves; 0 beyond ``rows`` and ``columns``.
    """
    log_a = _log_uniform(rows, cost.shape[1])
    log_b = _log_uniform(columns, cost.shape[2])
    scaled = -cost / blur
    # Alternate between the potentials of the rows and of the columns, each in units of the blur.
    g = torch.zeros_like(log_b).masked_fill(log_b.isinf(), -torch.inf)
    f = torch.zeros_like(log_a)
    for _ in range(iterations):
        f = log_a - torch.logsumexp(scaled + g[:, None, :], dim=2)
        g = log_b - torch.logsumexp(scaled + f[:, :, None], dim=1)
    return (scaled + f[:, :, None] + g[:, None, :]).exp()


def transport_cost(
    cost: Float[Tensor, "b n m"],
    rows: Int[Tensor, " b"],
    columns: Int[Tensor, " b"],
    *,
    blur: float = 0.05,
    iterations: int = 50,
) -> Float[Tensor, " b"]:
    """The mean cost per unit of mass of ``sinkhorn_plan``."""
    plan = sinkhorn_plan(cost, rows, columns, blur=blur, iterations=iterations)
    return (plan * cost).sum((1, 2))


def _log_uniform(counts: Int[Tensor, " b"], size: int) -> Float[Tensor, "b n"]:
    """Logarithms of equal masses on the first ``counts`` of ``size`` points."""
    there = torch.arange(size, device=counts.device) < counts[:, None]
    mass = -counts.float().log()[:, None].expand(-1, size)
    return torch.where(there, mass, -torch.inf)


def mean_discrepancy(
    x: Float[Tensor, "n d"], y: Float[Tensor, "m d"], bandwidth: float
) -> Float[Tensor, ""]:
    """Squared maximum mean discrepancy of two samples (Gretton et al. 2012), biased, so never below 0.

    Args:
        x: one sample.
        y: the other.
        bandwidth: of the Gaussian kernel exp(-|x - y|^2 / (2 bandwidth^2)).
    """

    # The expectation of the kernel over all pairs, those of a point with itself among them.
    def kernel(p: Tensor, q: Tensor) -> Tensor:
        return (-torch.cdist(p, q).square() / (2.0 * bandwidth**2)).exp().mean()

    return (kernel(x, x) + kernel(y, y) - 2.0 * kernel(x, y)).clamp_min(0.0)
