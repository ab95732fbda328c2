"""``WeightAverage``: a policy acts by the moving average of the weights that are trained.

What a policy proposes then changes slowly, and it is better: single gradient steps are noise
(Polyak and Juditsky, 1992).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """The parameters hold the average, and inside ``trained()`` the weights that are trained.

    Args:
        parameters: those that are trained.
        decay: share of the average that stays in each step; 0 makes it the trained weights.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self.parameters = list(parameters)
        self.decay = decay
        self._others = [p.detach().clone() for p in self.parameters]

    @contextmanager
    def trained(self) -> Iterator[None]:
        """A gradient step belongs into this block; the average follows at its end."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()
        with torch.no_grad():
            for average, trained in zip(self.parameters, self._others, strict=True):
                average.lerp_(trained, 1.0 - self.decay)

    def state_dict(self) -> list[Tensor]:
        """The trained weights; the average is in the policy's own state."""
        return self._others

    def load_state_dict(self, state: list[Tensor]) -> None:
        """The inverse of ``state_dict``."""
        for weights, saved in zip(self._others, state, strict=True):
            weights.copy_(saved)

    def _exchange(self) -> None:
        # No copy: each parameter and its other weights swap their memory.
        for i, parameter in enumerate(self.parameters):
            self._others[i], parameter.data = parameter.data, self._others[i]
