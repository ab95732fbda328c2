"""Which initial states training plays again: those that the policy neither never nor always solves.

A simulator has more initial states than a run plays, so most are played once. With
``run.start_sampling=difficulty`` a run remembers the last ones and what came of them. Half of the
episodes (``NEW``) begin at any state, drawn evenly; so nothing is forgotten, and new states come in.
The other half begins at a remembered state, drawn in proportion to

    E[p (1 - p)] = a b / ((a + b) (a + b + 1)),     a = 2 m + solved,  b = 2 (1 - m) + failed

which is the variance of success under the Beta(a, b) posterior of its success rate p. The prior is
worth two episodes with the mean m of all remembered states. SFL (Rutherford et al. 2024,
arXiv:2408.15099) plays half of its levels anew and half by p (1 - p); PLR (Jiang et al. 2021,
arXiv:2010.03934) remembers levels; VADE and XRPO do so for the prompts of language models.

Success over what was drawn is no success rate of the policy. ``Draws.weight`` is the importance
weight that makes it one: no larger than 1 / NEW, because half of the draws are even.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from embodyrl.rollouts.batches import Episode, by_policy
from embodyrl.rollouts.task_sampling import Record, expected_variance
from embodyrl.types import EnvSpec

NEW = 0.5
"""Share of the episodes that begin at any initial state."""
POOL = 512
"""Initial states that are remembered; those of the smallest variance are forgotten first."""
MEMORY = 16
"""Episodes of a state after which an older one counts 1/e as much."""
PRIOR = 2.0
"""Episodes that the prior is worth."""
EVERY = 2**31
"""Initial states of an env that has one for every number."""
GROWN = 0.5
"""Share of a run after which its episodes have their whole length."""


@dataclass(frozen=True)
class Draws:
    """How an iteration draws the initial states of its episodes, and how long these are.

    Attributes:
        tasks: the probability of each task (``task_sampling``); empty draws all states alike.
        starts: remembered states that are drawn again; none for ``run.start_sampling=uniform``.
        odds: the probability of each of them, given that it is one of them.
        length: share of its time limit after which an episode ends.
    """

    tasks: tuple[float, ...] = ()
    starts: tuple[int, ...] = ()
    odds: tuple[float, ...] = ()
    length: float = 1.0

    @cached_property
    def _again(self) -> dict[int, float]:
        return dict(zip(self.starts, self.odds, strict=True))

    def weight(self, spec: EnvSpec, init: int) -> float:
        """How likely an even draw of ``init`` is, compared with this one; 0 below .001."""
        if not self.tasks and not self.starts:
            return 1.0
        # The probability of an even draw; by the odds of tasks; and with what is drawn again.
        limit = spec.num_init_states or EVERY
        drawn = 1.0 / limit
        if self.tasks:
            task = init % len(self.tasks)
            drawn = self.tasks[task] / states_of(task, limit, len(self.tasks))
        if self.starts:
            drawn = NEW * drawn + (1.0 - NEW) * self._again.get(init, 0.0)
        weight = 1.0 / (limit * drawn)
        return weight if weight > 1e-3 else 0.0

    def steps(self, spec: EnvSpec, init: int) -> int:
        """Actions after which an episode from ``init`` ends; 0 leaves that to the env."""
        return math.ceil(self.length * spec.steps_of(init)) if self.length < 1.0 else 0

    def tensors(self) -> dict[str, Tensor]:
        """As what workers are sent."""
        return {
            "tasks": torch.tensor(self.tasks, dtype=torch.float64),
            "starts": torch.tensor(self.starts, dtype=torch.int64),
            "odds": torch.tensor(self.odds, dtype=torch.float64),
            "length": torch.tensor(self.length, dtype=torch.float64),
        }

    @classmethod
    def of_tensors(cls, found: Mapping[str, Tensor]) -> Draws:
        """The inverse of ``tensors``."""
        lists = {name: tuple(found[name].tolist()) for name in ("tasks", "starts", "odds")}
        return cls(**lists, length=float(found["length"]))


def states_of(task: int, limit: int, count: int) -> int:
    """How many of ``limit`` initial states are of ``task``, one of ``count``."""
    return -(-(limit - task) // count)


def start_draws(record: Mapping[str, Sequence[float]]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The remembered states and the probability of each; see the module."""
    variances = _variances(record)
    total = sum(variances.values())
    return tuple(map(int, variances)), tuple(v / total for v in variances.values())


def remembered(record: Mapping[str, Sequence[float]], episodes: Iterable[Episode]) -> Record:
    """The record of initial states after further episodes; those of a person do not count."""
    new: Record = {init: (solved, played) for init, (solved, played) in record.items()}
    keep = 1.0 - 1.0 / MEMORY
    for episode in by_policy(list(episodes)):
        # What was played last stands last, and outlives others of the same variance.
        solved, played = new.pop(str(episode.init), (0.0, 0.0))
        new[str(episode.init)] = keep * solved + episode.success, keep * played + 1.0
    # More than there is room for: those of the smallest variance go.
    variances = _variances(new)
    spare = sorted(variances, key=lambda init: variances[init])[: max(0, len(new) - POOL)]
    for init in spare:
        del new[init]
    return new


def _variances(record: Mapping[str, Sequence[float]]) -> dict[str, float]:
    # The prior's mean, by Laplace's rule over all states.
    solved = sum(pair[0] for pair in record.values())
    played = sum(pair[1] for pair in record.values())
    mean = (solved + 1.0) / (played + 2.0)
    return {
        init: expected_variance(solved, played, mean, PRIOR)
        for init, (solved, played) in record.items()
    }


def grown_length(first: float, progress: float) -> float:
    """Share of their time limit that episodes have: from ``first`` to 1 over half of a run.

    Longer and longer episodes are ScalingInter-RL's (AgentGym-RL, arXiv:2509.08755).
    """
    return min(1.0, first + (1.0 - first) * progress / GROWN)
