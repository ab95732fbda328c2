"""Everything random about an iteration: a function of the run's seed, its number and the shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

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
    odds: Sequence[float] | None = None,
) -> Iterator[int]:
    """An endless stream of the initial states in which one iteration's episodes begin.

    Args:
        spec: of the env.
        seed: of the run.
        iteration: its number.
        shard: of the envs.
        odds: the probability of each task (``rollouts.task_sampling``); None draws all states alike.
    """
    rng = np.random.default_rng([seed, iteration, shard])
    limit = spec.num_init_states or 2**31
    count = len(spec.tasks)
    while True:
        if odds is None:
            yield int(rng.integers(limit))
            continue
        # The task, and then one of its states; see ``EnvSpec.tasks`` for their numbers.
        task = int(rng.choice(count, p=np.asarray(odds) / sum(odds)))
        yield int(rng.integers(-(-(limit - task) // count))) * count + task
