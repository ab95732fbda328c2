"""Storage for what a rollout produced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from embodyrl.types import DenoisingTrace, Obs


@dataclass
class Episode:
    """One finished episode.

    Attributes:
        init: the initial state it started from.
        task: its task's name.
        success: whether it was solved.
        reward: undiscounted sum.
        length: actions executed.
    """

    init: int
    task: str
    success: bool
    reward: float
    length: int


@dataclass
class RolloutBatch:
    """T chunks of N envs, on the device of the policy; the flat fields are in time-major order (T * N rows).

    Attributes:
        obs, trace, logprob: (T*N, ...) what the policy saw, did, and how likely that was.
        value: (T, N) the critic's value of obs.
        next_value: (T, N) its value of the observation after the chunk, before any reset.
        reward, valid: (T, N, H) per action.
        terminated, truncated: (T, N).
        episodes: that ended during the rollout.
        env_steps: actions executed.
    """

    obs: Obs
    trace: DenoisingTrace
    logprob: Float[Tensor, "tn k"]
    value: Float[Tensor, "t n"]
    next_value: Float[Tensor, "t n"]
    reward: Float[Tensor, "t n h"]
    valid: Bool[Tensor, "t n h"]
    terminated: Bool[Tensor, "t n"]
    truncated: Bool[Tensor, "t n"]
    episodes: list[Episode] = field(default_factory=list)
    env_steps: int = 0

    @property
    def success_rate(self) -> float:
        """Of the episodes that ended during the rollout; nan when none did."""
        return sum(e.success for e in self.episodes) / len(self.episodes) if self.episodes else float("nan")


def minibatches(rows: Tensor, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """The entries of ``rows`` in a random order, in pieces of about ``size`` that differ by one at most."""
    order = rows[torch.randperm(len(rows), generator=generator).to(rows.device)]
    yield from order.tensor_split(max(1, round(len(rows) / size)))
