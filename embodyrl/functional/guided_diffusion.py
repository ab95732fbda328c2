"""Sampling from a diffusion model of vectors that a Gaussian pulls at.

Convention, as in ``functional.flow``: x_t = (1-t) x + t e with e ~ N(0, I), so that t = 1 is noise
and t = 0 is data. A model gives the estimate D(x_t, t) = E[x | x_t].

Wanted are samples of p(x) N(a; m, s^2)^w, where a is a part of x: Policy-Guided Diffusion
(arXiv:2404.06356) with a policy that is N(m, s^2), and the guidance w. Bayes' rule adds to the
score of x_t the gradient of log E[N(a; m, s^2)^w | x_t]. With a | x_t ~ N(D_a, V_t) that is

    g = (m - D_a) / (s^2 / w + V_t),        D' = D + t^2 / (1 - t) J^T g,     J = d D_a / d x_t

by Tweedie's formula, where t^2 / (1-t) J is the covariance of a and x given x_t. So where x is a
number, D moves by V / (s^2 / w + V) of the way to m, as in a Kalman filter, and never beyond: this
replaces the paper's normalised gradient and its schedule. Through J the states follow the actions.
V_t, which diffusion models do not know, is measured: it is the mean squared error of D on data. It
is exact for one Gaussian number, and for several a diagonal in place of a matrix (as in
Pi-GDM, arXiv:2209.14687, with a known V). m and s are taken as constants, so states do not move to
where the policy is right: the paper differentiates by the actions alone, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

Estimate = Callable[[Tensor, float], Tensor]
"""Noisy x (B, ...) and the time -> the estimate of the data, of x's shape."""
Pull = Callable[[Tensor], tuple[Tensor, Tensor]]
"""An estimate (B, ..., D) -> mean and std (B, ..., A) of the Gaussian that pulls at its part."""


def sample_pulled(
    estimate: Estimate,
    noise: Float[Tensor, "b *n d"],
    steps: int,
    *,
    pull: Pull | None = None,
    weight: float = 1.0,
    part: slice = slice(None),
    doubt: Callable[[float], Tensor] | None = None,
    bound: Callable[[Tensor], Tensor] = lambda x: x,
) -> Float[Tensor, "b *n d"]:
    """Samples by the deterministic steps of DDIM (arXiv:2010.02502).

    Args:
        estimate: the model; differentiable if something pulls.
        noise: x_1 ~ N(0, I).
        steps: K, at the times 1, 1 - 1/K, ..., 1/K.
        pull: the Gaussian; None leaves the data's distribution.
        weight: w; 0 leaves it, too.
        part: of the last dim, at which it pulls.
        doubt: V_t of that part (A,), at a time; needed where something pulls.
        bound: keeps estimates where data can be.
    """
    if pull is not None and doubt is None:
        raise ValueError("What pulls needs the doubt of the estimate.")
    guided = pull is not None and weight > 0
    x = noise
    for k in range(steps):
        t = 1.0 - k / steps
        # At t = 1 the estimate does not depend on x.
        if guided and k:
            assert pull is not None and doubt is not None
            data = guided_estimate(estimate, x, t, pull, weight, part, doubt(t))
        else:
            with torch.no_grad():
                data = estimate(x, t)
        data = bound(data)
        # From the estimated data back to the noise of the next step.
        after = 1.0 - (k + 1) / steps
        x = (1.0 - after) * data + after * (x - (1.0 - t) * data) / t
    return x


def guided_estimate(
    estimate: Estimate, x: Tensor, t: float, pull: Pull, weight: float, part: slice, doubt: Tensor
) -> Tensor:
    """D' of the module's docstring, of x's shape, for 0 < t < 1 and ``doubt`` V_t (A,)."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        data = estimate(x, t)
        actions = data[..., part]
        # The gradient by the estimated actions, and back to x.
        mean, std = pull(data.detach())
        gradient = (mean - actions.detach()) / (std**2 / weight + doubt)
        (back,) = torch.autograd.grad(actions, x, gradient)
    return data.detach() + t**2 / (1.0 - t) * back
