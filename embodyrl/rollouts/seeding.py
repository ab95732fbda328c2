"""Everything random about an iteration: a function of the run's seed, its number and the shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from embodyrl.rollouts.start_sampling import EVERY, NEW, Draws, states_of
from embodyrl.types import EnvSpec


def seeded(seed: int, iteration: int, shard: int = 0) -> torch.Generator:
    """The generator of one iteration's noise."""
    state = np.random.SeedSequence([seed, iteration, shard]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> 1))


def init_states(
    spec: EnvSpec,
    seed: int,
    iteration: int,
    shard: int = 0,
    draws: Draws | None = None,
) -> Iterator[int]:
    """An endless stream of the initial states in which one iteration's episodes begin.

    Args:
        spec: of the env.
        seed: of the run.
        iteration: its number.
        shard: of the envs.
        draws: the odds of tasks and of states that were played before; None draws all states alike.
    """
    draws = draws or Draws()
    rng = np.random.default_rng([seed, iteration, shard])
    limit = spec.num_init_states or EVERY
    count = len(spec.tasks)
    while True:
        if draws.starts and rng.random() >= NEW:
            # A state that was played before.
            yield draws.starts[_drawn(rng, draws.odds)]
        elif not draws.tasks:
            yield int(rng.integers(limit))
        else:
            # The task, and then one of its states; see ``EnvSpec.tasks`` for their numbers.
            task = _drawn(rng, draws.tasks)
            yield int(rng.integers(states_of(task, limit, count))) * count + task


def _drawn(rng: np.random.Generator, odds: Sequence[float]) -> int:
    """One of ``len(odds)``, by their odds."""
    return int(rng.choice(len(odds), p=np.asarray(odds) / sum(odds)))
