"""Copies of a policy that share its frozen weights, which are most of a large model's weights."""

from __future__ import annotations

import copy
from typing import Any, Self

from torch import Tensor, nn


class SharesFrozenWeights:
    """A mixin for policies: ``copy.deepcopy`` copies what is trained and shares the rest."""

    _frozen: list[nn.Parameter]

    def note_frozen(self, module: nn.Module) -> None:
        """Takes down which weights of ``module`` are not trained; call it once all are settled."""
        self._frozen = [p for p in module.parameters() if not p.requires_grad]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # What is in the memo counts as copied already.
        shared: dict[int, Tensor] = {id(p): p for p in self._frozen}
        memo |= shared
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied
