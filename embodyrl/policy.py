"""The policy API: sample an action chunk, and score the path that led to it."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from embodyrl.types import ActionSample, DenoisingTrace, Obs, PolicyEval

Mode = Literal["train", "eval"]


@runtime_checkable
class Policy(Protocol):
    """A flow or diffusion action-chunk policy (an ``nn.Module`` as well)."""

    def sample(
        self, obs: Obs, *, generator: torch.Generator | list[torch.Generator], mode: Mode
    ) -> ActionSample:
        """Draws a chunk for every row of obs.

        Args:
            obs: N observations.
            generator: source of all noise; a list gives each row its own.
            mode: ``"train"`` follows the stochastic transition and returns the trace, its
                log-probability and the critic's value; ``"eval"`` integrates the ODE (only the
                initial noise is random) and returns actions.
        """
        ...

    def evaluate(self, obs: Obs, trace: DenoisingTrace) -> PolicyEval:
        """Scores a trace under the current parameters, with gradients; equal to ``sample`` for the same ones."""
        ...

    def value(self, obs: Obs) -> Tensor:
        """The critic's estimate (N,) of the discounted return from obs, with gradients."""
        ...
