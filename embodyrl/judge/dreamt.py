"""What a world model says of a policy: how many recorded beginnings it solves in dreams.

The dreams begin at the first observations of recorded episodes, so no env is needed. It is this
project's way of pseudo-simulation (arXiv:2506.04218): a policy is judged in what a model makes of
recorded data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.dreams.score import load_for_env, play_dreams
from embodyrl.types import EnvSpec, Obs
from embodyrl.world_models.config import WorldModelConfig
from embodyrl.world_models.env import WorldModelEnv

AT_ONCE = 32
"""Dreams side by side."""


def open_dream(path: str, beginnings: int, device: str) -> WorldModelEnv:
    """A world model as an env, with at most so many dreams side by side."""
    n = min(AT_ONCE, beginnings)
    return WorldModelEnv(WorldModelConfig(model=path, num_envs=n, split="eval", device=device))


def first_observations(data: Sequence[str], spec: EnvSpec, most: int) -> Obs:
    """What was seen when recorded episodes began, of each data set the same share.

    Args:
        data: LeRobotDatasets.
        spec: of the dream, whose cameras the data must have.
        most: episodes.
    """
    seen = []
    for k, path in enumerate(data):
        demos = load_demonstrations(path, 1, spec=spec, keep="all")
        share = most // len(data) + (k < most % len(data))
        begins = torch.searchsorted(demos.end, demos.end.unique()[:share])
        obs, _, _ = demos.batch(begins)
        privileged = None if demos.privileged is None else demos.privileged[begins]
        seen.append(dataclasses.replace(obs, privileged=privileged))
    return Obs.cat(seen)


def dreamt_successes(
    run: str, dream: WorldModelEnv, beginnings: Obs, seed: int = 0
) -> Bool[Tensor, " b"]:
    """Which of B recorded beginnings a policy solves in dreams.

    Args:
        run: checkpoint or run.
        dream: N dreams.
        beginnings: first observations.
        seed: of the policy's noise.
    """
    n = dream.spec.num_envs
    policy: Any = load_for_env(run, dream)
    generator = torch.Generator().manual_seed(seed)
    solved = []
    for rows in torch.arange(len(beginnings)).split(n):
        # The last batch is filled up with copies, which do not count.
        filled = torch.cat([rows, rows[-1:].expand(n - len(rows))])
        obs = dream.dream_from(beginnings[filled])
        counts = torch.arange(n) < len(rows)
        solved.append(play_dreams(dream, policy, obs, counts, generator)[0][: len(rows)].cpu())
    return torch.cat(solved)
