"""Shortcut models: a velocity that is told the size of its step (Frans et al., arXiv:2410.12557).

In the convention of ``functional.flow``, the mean velocity over a step of size d leads there at once:

    x_{t-d} = x_t - d u(x_t, t, d)

d = 0 is the ordinary velocity, which flow matching learns. Longer steps learn self-consistency: one
step of d is two steps of d/2,

    u(x_t, t, d) = (u(x_t, t, d/2) + u(x_m, t - d/2, d/2)) / 2,    x_m = x_t - d/2 u(x_t, t, d/2)

For the exact u this holds at every t and d. Everything here is a pure function of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from embodyrl.functional.flow import Generators, random_uniform

StepVelocity = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Noisy samples (B, ...), times (B,) and step sizes (B,) -> mean velocity (B, ...)."""


def draw_shortcut_steps(
    batch: int, most: int, generator: Generators, device: torch.device | str = "cpu"
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    """Random steps at which self-consistency is learned: their times t, and their sizes d.

    d is one of 1, 1/2, 1/4, ... 1/most, and t one of the 1/d times at which sampling with steps of
    this size takes one. Both are uniform.

    Args:
        batch: B.
        most: the largest number of steps, a power of two.
        generator: one, or one per row.
        device: where the result lives.
    """
    # The size: a number of steps 1, 2, 4, ... most.
    u = random_uniform((batch, 2), generator, device)
    levels = int(math.log2(most)) + 1
    count = 2.0 ** (u[:, 0] * levels).floor().clamp_max(levels - 1)
    # Which of these steps. The clamps hold where a product rounds up.
    start = (u[:, 1] * count).floor().clamp_max(count - 1)
    return 1.0 - start / count, 1.0 / count


@torch.no_grad()
def shortcut_target(
    velocity: StepVelocity,
    x: Float[Tensor, "b ..."],
    t: Float[Tensor, " b"],
    d: Float[Tensor, " b"],
    finest: Bool[Tensor, " b"],
) -> Float[Tensor, "b ..."]:
    """The mean velocity over a step, from two steps of half its size; without gradients.

    Args:
        velocity: of the model itself.
        x: where the step begins.
        t: when.
        d: its size.
        finest: rows whose half steps are too short to be learned. They take the ordinary velocity
            (size 0), as in the paper.
    """
    # Two steps of half the size, the second from where the first one ends.
    half = d / 2
    size = torch.where(finest, 0.0, half)
    first = velocity(x, t, size)
    middle = x - half.view(-1, *[1] * (x.ndim - 1)) * first
    second = velocity(middle, t - half, size)
    # Together they move x by d times their mean.
    return (first + second) / 2
