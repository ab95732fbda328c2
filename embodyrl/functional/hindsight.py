"""Which later observations of an episode are labels for an earlier one (arXiv:1707.01495)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor


def later_steps(
    now: Int[Tensor, " b"],
    first: Int[Tensor, " b"],
    last: Int[Tensor, " b"],
    *,
    ends: int,
    apart: int,
    on_the_way: Sequence[float] = (),
) -> Int[Tensor, "b j"]:
    """The last observations of an episode, and those on the way to the last one.

    Args:
        now: where each of B observations stands.
        first: the first observation of its episode; in a short one it stands for those before it.
        last: the last one.
        ends: so many last ones, ``apart`` from each other, the last first.
        apart: distance between them.
        on_the_way: shares of the way from ``now`` to ``last``, in [0, 1], rounded.

    Returns:
        (B, J), of which ``ends`` are the last ones.
    """
    back = apart * torch.arange(ends, device=now.device)
    at_end = (last[:, None] - back).maximum(first[:, None])
    share = torch.tensor(on_the_way, dtype=torch.float64, device=now.device)
    way = now[:, None] + ((last - now)[:, None] * share).round().long()
    return torch.cat([at_end, way], dim=1)
