"""Everything random about an iteration, from the run's seed, its number and the shard of the envs alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from embodyrl.env import VecEnv


def seeded(seed: int, iteration: int, shard: int = 0) -> torch.Generator:
    """The generator of one iteration's noise."""
    return torch.Generator().manual_seed(
        int(np.random.SeedSequence([seed, iteration, shard]).generate_state(1, np.uint64)[0] >> 1)
    )


def draw_inits(
    env: VecEnv, num_chunks: int, seed: int, iteration: int, shard: int = 0
) -> torch.Tensor:
    """Initial states for one rollout: enough for every env to start anew at every chunk."""
    return torch.tensor(
        initial_states(env, seed, iteration, shard)(env.spec.num_envs * (num_chunks + 1))
    )


def initial_states(
    env: VecEnv, seed: int, iteration: int, shard: int = 0
) -> Callable[[int], list[int]]:
    """A function that draws so many further initial states of one iteration."""
    rng = np.random.default_rng([seed, iteration, shard])
    limit = env.spec.num_init_states or 2**31
    return lambda count: rng.integers(limit, size=count).tolist()
