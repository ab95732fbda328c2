"""What a rollout produced: the batches that algorithms learn from.

Every batch is a dataclass of tensors with ``episodes``, ``env_steps``, ``to`` and ``merge``: the
runner, workers and the network ask for no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embodyrl.types import DenoisingTrace, Movable, Obs, TensorData


@dataclass
class Episode:
    """One finished episode.

    Attributes:
        init: the initial state it started from.
        task: its task's name.
        success: whether the task was solved at its end.
        reward: undiscounted sum.
        length: actions executed.
        success_once: whether the task was solved at any time; ``success`` says the same where an
            episode ends on success.
        person: whether a person took any of its actions. It then says nothing about the policy, and
            no rate counts it.
        weight: how often an even draw would have begun it, compared with the draw that did
            (``start_sampling.Draws.weight``); rates count it so much. 1 where all states are drawn
            alike.
        instruction: the sentence that it was played with.
    """

    init: int
    task: str
    success: bool
    reward: float
    length: int
    success_once: bool = False
    person: bool = False
    weight: float = 1.0
    instruction: str = ""

    def __post_init__(self) -> None:
        self.success_once = self.success_once or self.success


def by_policy(episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes that count: those that the policy played alone."""
    return [e for e in episodes if not e.person]


def success_rate(episodes: Sequence[Episode], once: bool = False) -> float:
    """Share of the counted episodes that were solved at their end; nan for none.

    It is that of an even draw of initial states, however these episodes were drawn
    (``Episode.weight``).

    Args:
        episodes: those with a person's actions do not count.
        once: the share that was solved at any time.
    """
    return _mean(episodes, lambda e: float(e.success_once if once else e.success))


def mean_return(episodes: Sequence[Episode]) -> float:
    """Mean undiscounted return of the counted episodes, weighted likewise; nan for none."""
    return _mean(episodes, lambda e: e.reward)


def drawn_success_rate(episodes: Sequence[Episode]) -> float:
    """Share of the counted episodes that were solved, as they were drawn; nan for none."""
    solved = [e.success for e in by_policy(episodes)]
    return sum(solved) / len(solved) if solved else float("nan")


def effective_episodes(episodes: Sequence[Episode]) -> int:
    """How many evenly drawn episodes a rate over the counted ones is worth (Kish 1965).

    (sum w)^2 / sum w^2 of their weights: all of them, where they were drawn evenly.
    """
    weights = [e.weight for e in by_policy(episodes)]
    squares = sum(w * w for w in weights)
    return round(sum(weights) ** 2 / squares) if squares else 0


def _mean(episodes: Sequence[Episode], score: Callable[[Episode], float]) -> float:
    counted = by_policy(episodes)
    total = sum(e.weight for e in counted)
    return sum(e.weight * score(e) for e in counted) / total if total else float("nan")


@dataclass
class RolloutBatch(Movable):
    """T chunks of N envs, on the device of the policy.

    Flat fields have T * N rows, in time-major order.

    Attributes:
        obs, trace, logprob: (T*N, ...) what the policy saw, did, and how likely that was.
        value: (T, N) the critic's value of obs.
        next_value: (T, N) its value of the observation after the chunk, before any reset.
        reward, valid: (T, N, H) per action.
        terminated, truncated: (T, N).
        episodes: whose time limit passed during the rollout (``EpisodeStream.scored``).
        env_steps: actions executed.
        chunks: the same as loose transitions, where hindsight learns from them; otherwise None.
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
    chunks: Transitions | None = None

    @property
    def success_rate(self) -> float:
        """Of ``episodes``; nan when there are none."""
        return success_rate(self.episodes)

    @classmethod
    def merge(cls, parts: list[Self]) -> Self:
        """One rollout of the envs of all ``parts``, which are equally long."""
        # Flat rows are in time-major order over all envs: (T, N1 + N2 + ...) flattened.
        numbers = []
        before = 0
        for part in parts:
            numbers.append(torch.arange(part.value.numel()).view(part.value.shape) + before)
            before += part.value.numel()
        rows = torch.cat(numbers, dim=1).flatten()
        per_env = ("value", "next_value", "reward", "valid", "terminated", "truncated")
        chunks = [part.chunks for part in parts if part.chunks is not None]
        return cls(
            obs=Obs.cat([part.obs for part in parts])[rows],
            trace=DenoisingTrace.cat([part.trace for part in parts])[rows],
            logprob=torch.cat([part.logprob for part in parts])[rows],
            **{name: torch.cat([getattr(part, name) for part in parts], dim=1) for name in per_env},
            episodes=[episode for part in parts for episode in part.episodes],
            env_steps=sum(part.env_steps for part in parts),
            chunks=Transitions.cat(chunks) if chunks else None,
        )


@dataclass
class Transitions(TensorData):
    """B chunks, each on its own: what a ``ReplayBuffer`` holds.

    Attributes:
        obs: before the chunk.
        choice: (B, H, A) what the policy decided: the actions, or for DSRL the noise.
        reward, valid: (B, H) per action.
        terminated, truncated: (B,).
        next_obs: after the chunk, before any reset.
        human: (B,) whether a person took any of its actions; None where nobody can.
        episode: (B,) int64, the number of its episode, which no other episode of the run has; None
            for chunks of a data set.
        success: (B,) whether the task was solved in this chunk; None with ``episode``.
        weight: (B,) how often a buffer draws it, compared with others; None means 1.
        features, next_features: (B, F) what critics see of obs and next_obs, where a buffer keeps
            it; otherwise None.
    """

    obs: Obs
    choice: Float[Tensor, "b h a"]
    reward: Float[Tensor, "b h"]
    valid: Bool[Tensor, "b h"]
    terminated: Bool[Tensor, " b"]
    truncated: Bool[Tensor, " b"]
    next_obs: Obs
    human: Bool[Tensor, " b"] | None = None
    episode: Int[Tensor, " b"] | None = None
    success: Bool[Tensor, " b"] | None = None
    weight: Float[Tensor, " b"] | None = None
    features: Float[Tensor, "b f"] | None = None
    next_features: Float[Tensor, "b f"] | None = None

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def env_steps(self) -> int:
        """Actions executed."""
        return int(self.valid.sum())


@dataclass
class TransitionBatch(Movable):
    """What an iteration of an off-policy algorithm collected.

    Attributes:
        chunks: the chunks of all envs.
        episodes: whose time limit passed meanwhile (``EpisodeStream.scored``).
    """

    chunks: Transitions
    episodes: list[Episode] = field(default_factory=list)

    @property
    def env_steps(self) -> int:
        """Actions executed."""
        return self.chunks.env_steps

    @classmethod
    def merge(cls, parts: list[Self]) -> Self:
        """The chunks and episodes of all ``parts``, one after the other."""
        episodes = [episode for part in parts for episode in part.episodes]
        return cls(Transitions.cat([part.chunks for part in parts]), episodes)


@dataclass
class EpisodeBatch(Movable):
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


@dataclass
class GroupBatch(Movable):
    """The groups of one iteration.

    Attributes:
        kept: the episodes that are learned from, group after group.
        episodes: all that were played, those of dropped groups too: their success rate is the
            policy's.
        env_steps: actions executed in them.
        rounds: how often groups were drawn.
        failed: the groups in which every episode failed, where a kept success may stand in; else
            None.
    """

    kept: EpisodeBatch
    episodes: list[Episode]
    env_steps: int
    rounds: int
    failed: EpisodeBatch | None = None

    @classmethod
    def merge(cls, parts: list[Self]) -> Self:
        """The groups of all ``parts``, one after the other."""
        failed = [part.failed for part in parts if part.failed is not None]
        return cls(
            EpisodeBatch.cat([part.kept for part in parts]),
            [episode for part in parts for episode in part.episodes],
            sum(part.env_steps for part in parts),
            max(part.rounds for part in parts),
            EpisodeBatch.cat(failed) if failed else None,
        )
