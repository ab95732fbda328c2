"""Builds envs, policies and configs from configs and checkpoints."""

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
from embodyrl.rollouts.fault_watch import guarded
from embodyrl.storage import checkpoint
from embodyrl.types import EnvSpec


def make_env(config: EnvConfig) -> VecEnv:
    """The env that a config describes, with its faults watched (``rollouts.fault_watch``)."""
    return guarded(registry.load("envs", config.name)(config))


def limit_num_envs(config: EnvConfig, episodes: int) -> EnvConfig:
    """The config with at most ``episodes`` envs: building more would only take time."""
    return dataclasses.replace(config, num_envs=min(config.num_envs, episodes))


def make_policy(
    config: Any, spec: EnvSpec, seed: int, device: torch.device | str = "cpu"
) -> Policy:
    """A policy with fresh weights, which depend on ``seed`` alone."""
    # torch's global generator is set for this block only.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return registry.load("policies", config.name)(config, spec).to(device)


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """The config of the run that wrote a checkpoint, with overrides.

    Args:
        path: of a checkpoint, or of a run, which means its newest checkpoint.
        overrides: each ``key.sub=value``.
    """
    _, meta = checkpoint.load(checkpoint.find(path))
    return resolve(meta["config"], overrides)


def pick_device(name: str) -> torch.device:
    """The device of a name; ``"auto"`` is the GPU if there is one.

    Raises:
        UserError: a GPU that PyTorch does not see.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"run.device is {name!r}, but PyTorch sees no GPU here. Use run.device=auto or "
            "run.device=cpu."
        )
    return torch.device(name)
