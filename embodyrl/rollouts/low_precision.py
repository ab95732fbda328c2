"""Rollouts in low precision, updates in full precision (Jet-RL, arXiv:2601.14243).

The policy that acts then differs a little from the one that is trained:

    exact   the same
    bf16    matrix products and convolutions in bfloat16 (autocast), fast on a GPU
    int8    weights of linear and convolutional layers rounded to 8 bits, one scale for each output

What was drawn is scored by the policy that drew it. An update scores it again, exactly, and weights
each decision by the ratio of the two (``algorithm.behaviour_cap``). The weights of ``int8`` are
computed with in full precision: it shows what 8 bits do to learning, and saves no time here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from embodyrl.types import Movable

PRECISIONS = ("exact", "bf16", "int8")
LEVELS = 127
"""Weights become -127 to 127 times a scale."""


@contextlib.contextmanager
def acting_in(policy: Any, precision: str) -> Iterator[None]:
    """Lets a policy act in one of ``PRECISIONS`` in this block; behind it, it is as it was."""
    if precision == "exact":
        yield
    elif precision == "bf16":
        device = next(policy.parameters()).device.type
        with torch.autocast(device, dtype=torch.bfloat16):
            yield
    else:
        # Rounded in place, so that whatever holds the policy acts so, and put back behind.
        kept = [(p, p.detach().clone()) for p in _rounded_weights(policy)]
        try:
            with torch.no_grad():
                for weight, exact in kept:
                    weight.copy_(to_int8(exact))
            yield
        finally:
            with torch.no_grad():
                for weight, exact in kept:
                    weight.copy_(exact)


def to_int8(weight: Tensor) -> Tensor:
    """Weights (outputs, ...) rounded to the nearest of 255 levels, symmetric, with a scale for each output."""
    largest = weight.flatten(1).abs().amax(1).clamp_min(1e-30)
    scale = (largest / LEVELS).view(-1, *[1] * (weight.ndim - 1))
    return (weight / scale).round() * scale


def in_float32[Data: Movable](data: Data) -> Data:
    """The same data without bfloat16, which a block of ``bf16`` leaves in values."""
    return data._map(lambda x: x.float() if _is_bf16(x) else x)


def _is_bf16(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.bfloat16


def _rounded_weights(policy: Any) -> list[Tensor]:
    """The matrices of layers, but for those of the value head, which must be exact."""
    kept = set(policy.critic_parameters()) if hasattr(policy, "critic_parameters") else set()
    layers = (nn.Linear, nn.Conv2d)
    found = [m.weight for m in policy.modules() if isinstance(m, layers)]
    return [weight for weight in found if weight not in kept]
