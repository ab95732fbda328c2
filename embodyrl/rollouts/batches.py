"""Storage for what a rollout produced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embodyrl.types import DenoisingTrace, Obs, TensorData


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


def success_rate(episodes: list[Episode]) -> float:
    """Share of the episodes that were solved; nan for none."""
    return sum(e.success for e in episodes) / len(episodes) if episodes else float("nan")


def mean_return(episodes: list[Episode]) -> float:
    """Mean undiscounted return of the episodes; nan for none."""
    return sum(e.reward for e in episodes) / len(episodes) if episodes else float("nan")


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
        return success_rate(self.episodes)


@dataclass
class Transitions(TensorData):
    """B chunks, each on its own: what off-policy algorithms learn from, and what a ``ReplayBuffer`` holds.

    Attributes:
        obs: before the chunk.
        choice: (B, H, A) what the policy decided: the actions, or for DSRL the noise.
        reward, valid: (B, H) per action.
        terminated, truncated: (B,).
        next_obs: after the chunk, before any reset.
        human: (B,) whether a person took any of its actions; None where nobody can.
    """

    obs: Obs
    choice: Float[Tensor, "b h a"]
    reward: Float[Tensor, "b h"]
    valid: Bool[Tensor, "b h"]
    terminated: Bool[Tensor, " b"]
    truncated: Bool[Tensor, " b"]
    next_obs: Obs
    human: Bool[Tensor, " b"] | None = None

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def env_steps(self) -> int:
        """Actions executed."""
        return int(self.valid.sum())


@dataclass
class EpisodeBatch:
    """B chunks of E whole episodes, on the device of the policy.

    Attributes:
        obs, trace, logprob: (B, ...) what the policy saw, did, and how likely that was.
        episode: (B,) which of the episodes a chunk belongs to.
        episodes: E, in the order of their initial states; None where the simulation broke.
        env_steps: actions executed.
    """

    obs: Obs
    trace: DenoisingTrace
    logprob: Float[Tensor, "b k"]
    episode: Int[Tensor, " b"]
    episodes: list[Episode | None]
    env_steps: int

    def select(self, wanted: list[int]) -> EpisodeBatch:
        """The episodes ``wanted`` and their chunks, numbered anew in that order."""
        place = torch.full((len(self.episodes),), -1, device=self.episode.device)
        place[wanted] = torch.arange(len(wanted), device=place.device)
        number = place[self.episode]
        rows = (number >= 0).nonzero().flatten()
        episodes = [self.episodes[i] for i in wanted]
        return EpisodeBatch(
            self.obs[rows],
            self.trace[rows],
            self.logprob[rows],
            number[rows],
            episodes,
            self.env_steps,
        )

    @classmethod
    def cat(cls, items: list[EpisodeBatch]) -> EpisodeBatch:
        """All episodes of ``items``, one batch after the other."""
        before = list(accumulate((len(i.episodes) for i in items), initial=0))
        return cls(
            Obs.cat([i.obs for i in items]),
            DenoisingTrace.cat([i.trace for i in items]),
            torch.cat([i.logprob for i in items]),
            torch.cat([i.episode + start for i, start in zip(items, before, strict=False)]),
            [e for i in items for e in i.episodes],
            sum(i.env_steps for i in items),
        )


def minibatches(rows: Tensor, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """The entries of ``rows`` in a random order, in pieces of about ``size`` that differ by one at most."""
    order = rows[torch.randperm(len(rows), generator=generator).to(rows.device)]
    yield from order.tensor_split(max(1, round(len(rows) / size)))
