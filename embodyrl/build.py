"""Configs and checkpoints into live objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from embodyrl import checkpoint, registry
from embodyrl.compiled import compile_sampling
from embodyrl.config import Config, resolve
from embodyrl.env import EnvConfig, VecEnv
from embodyrl.errors import UserError
from embodyrl.faults import WatchedEnv
from embodyrl.types import EnvSpec

if TYPE_CHECKING:
    from embodyrl.scale.fsdp import Ranks
    from embodyrl.scale.shards import Rollouts


def make_env(config: EnvConfig) -> VecEnv:
    """The env that a config names."""
    return registry.load("envs", config.name)(config)


def for_episodes(config: EnvConfig, episodes: int) -> EnvConfig:
    """With no more envs than there will be episodes: one of LIBERO's takes seconds to build."""
    return dataclasses.replace(config, num_envs=min(config.num_envs, episodes))


def make_policy(config: Any, spec: EnvSpec, seed: int, device: torch.device | str = "cpu") -> Any:
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
        raise UserError(f"run.device is {name!r}, but PyTorch sees no GPU here. Use run.device=auto or run.device=cpu.")
    return torch.device(name)


class Envs:
    """The training env and the evaluation env of a run, each built when first asked for.

    Attributes:
        rollouts: who plays in the training env in place of this process, if anybody.
    """

    def __init__(self, config: Config, rollouts: Rollouts | Ranks | None = None) -> None:
        self.rollouts = rollouts
        self._configs = {
            "train": config.env,
            "eval": for_episodes(config.env.for_evaluation(config.run.eval_split), config.run.eval_episodes),
        }
        self._built: dict[str, VecEnv] = {}

    def _get(self, which: str) -> VecEnv:
        if which not in self._built:
            env = make_env(self._configs[which])
            self._built[which] = WatchedEnv(env) if which == "train" else env
        return self._built[which]

    @property
    def train(self) -> VecEnv:
        """Of the split that the config names."""
        return self._get("train")

    @property
    def eval(self) -> VecEnv:
        """Of ``run.eval_split``."""
        return self._get("eval")

    @property
    def train_spec(self) -> EnvSpec:
        """Of the training env, wherever it is."""
        return self.rollouts.spec if self.rollouts else self.train.spec

    @property
    def spec(self) -> EnvSpec:
        """What both agree on."""
        return (self.rollouts or self._built.get("train") or self.eval).spec

    def close(self) -> None:
        """Closes what was built."""
        for env in self._built.values():
            env.close()
        self._built.clear()
        if self.rollouts is not None:
            self.rollouts.close()


def build_algorithm(config: Config, envs: Envs, device: torch.device, ranks: Ranks | None = None) -> Any:
    """Policy, critic and optimiser, with initial weights that depend on ``run.seed`` alone."""
    cls = registry.load("algorithms", config.algorithm.name)
    spec = envs.eval.spec if cls.source == "demos" else envs.train_spec
    policy = make_policy(config.policy, spec, config.run.seed, device)
    if config.run.init_checkpoint and checkpoint.latest(config.run.folder / "checkpoints") is None:
        checkpoint.load_policy(config.run.init_checkpoint, policy, spec)
    if ranks is not None:
        ranks.shard(policy)
    with torch.random.fork_rng():
        torch.manual_seed(config.run.seed)
        algorithm = cls(config.algorithm, policy)
    if ranks is not None:
        ranks.attach(algorithm)
    if config.run.compile:
        for acting in {id(p): p for p in (algorithm.policy, algorithm.result)}.values():
            compile_sampling(acting)
    return algorithm
