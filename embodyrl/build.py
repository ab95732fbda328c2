"""Configs and checkpoints into live objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from embodyrl import registry
from embodyrl.config import Config, resolve
from embodyrl.env import EnvConfig, VecEnv
from embodyrl.errors import UserError
from embodyrl.policy import Policy
from embodyrl.storage import checkpoint
from embodyrl.types import EnvSpec


def make_env(config: EnvConfig) -> VecEnv:
    """The env that a config names."""
    return registry.load("envs", config.name)(config)


def for_episodes(config: EnvConfig, episodes: int) -> EnvConfig:
    """With no more envs than there will be episodes: one of LIBERO's takes seconds to build."""
    return dataclasses.replace(config, num_envs=min(config.num_envs, episodes))


def make_policy(
    config: Any, spec: EnvSpec, seed: int, device: torch.device | str = "cpu"
) -> Policy:
    """A policy with fresh weights that depend on ``seed`` alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return registry.load("policies", config.name)(config, spec).to(device)


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """The config that a checkpoint (or a run's newest) was trained with, with overrides."""
    _, meta = checkpoint.load(checkpoint.find(path))
    return resolve(meta["config"], overrides)


def pick_device(name: str) -> torch.device:
    """``"auto"`` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"run.device is {name!r}, but PyTorch sees no GPU here. Use run.device=auto or "
            "run.device=cpu."
        )
    return torch.device(name)
