"""What the registry calls for ``env.name=world_model``: dreams only, or dreams beside real envs."""

from __future__ import annotations

from embodyrl.registry import EnvFactory
from embodyrl.world_models.config import WorldModelConfig
from embodyrl.world_models.env import WorldModelEnv
from embodyrl.world_models.mixed_env import MixedEnv


def make_world_model_env(config: WorldModelConfig) -> WorldModelEnv | MixedEnv:
    """The env of a config: a ``MixedEnv`` where some of its envs are to be real."""
    return MixedEnv(config) if config.real_envs else WorldModelEnv(config)


WORLD_MODEL = EnvFactory(WorldModelConfig, make_world_model_env)
