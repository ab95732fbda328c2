"""Any Gymnasium env with flat observations and bounded continuous actions, by its id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from embodyrl.adapters import FromGymnasium
from embodyrl.env import EnvConfig
from embodyrl.sims.workers import PooledVecEnv


@dataclass(frozen=True)
class GymnasiumConfig(EnvConfig):
    """Settings of a Gymnasium env.

    Attributes:
        name: registry name.
        id: Gymnasium's own, e.g. ``"Hopper-v5"``.
        max_episode_steps: time limit; 0 leaves the env's own.
        num_workers: processes that share the envs; 1 runs them in this one, which is faster for few of them.
    """

    name: str = "gymnasium"
    id: str = "Hopper-v5"
    num_envs: int = 1
    max_episode_steps: int = 0
    num_workers: int = 1


class GymnasiumEnv(FromGymnasium):
    """See ``FromGymnasium``. With ``num_workers`` > 1, ``GymnasiumEnv(config)`` is a ``PooledVecEnv`` of such envs."""

    Config = GymnasiumConfig

    def __new__(cls, config: GymnasiumConfig) -> GymnasiumEnv:
        """A pool where several processes are asked for."""
        if config.num_workers > 1:
            return cast(GymnasiumEnv, PooledVecEnv("gymnasium", config, num_workers=config.num_workers))
        return super().__new__(cls)

    def __init__(self, config: GymnasiumConfig) -> None:
        # The passive checker repeats on every step what check_env and the masks of the chunk do.
        limit = {"max_episode_steps": config.max_episode_steps} if config.max_episode_steps else {}
        super().__init__(config.id, config, disable_env_checker=True, **limit)
