"""Any Gymnasium env with flat observations and bounded continuous actions, by its id."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import mujoco

from embodyrl.env import EnvConfig
from embodyrl.sims.gymnasium.bridge import FromGymnasium
from embodyrl.sims.workers.pool import PooledVecEnv


@dataclass(frozen=True)
class GymnasiumConfig(EnvConfig):
    """Settings of a Gymnasium env.

    Attributes:
        name: registry name.
        id: Gymnasium's own, e.g. ``"Hopper-v5"``.
        max_episode_steps: time limit; 0 leaves the env's own.
        num_workers: processes that share the envs; 1 runs them in this one, which is faster for few
            of them.
        reports_success: whether its ``info`` says if a task is solved (``bridge.SUCCESS``); where
            not, runs are scored by their mean return. None takes a first step to see.
    """

    name: str = "gymnasium"
    id: str = "Hopper-v5"
    num_envs: int = 1
    max_episode_steps: int = 0
    num_workers: int = 1
    reports_success: bool | None = None


class GymnasiumEnv(FromGymnasium):
    """See ``FromGymnasium``. With ``num_workers`` > 1, ``GymnasiumEnv(config)`` is a ``PooledVecEnv`` of such envs."""

    Config = GymnasiumConfig

    def __new__(cls, config: GymnasiumConfig) -> GymnasiumEnv:
        """A pool where several processes are asked for."""
        if config.num_workers > 1:
            return cast(
                GymnasiumEnv, PooledVecEnv("gymnasium", config, num_workers=config.num_workers)
            )
        return super().__new__(cls)

    def __init__(self, config: GymnasiumConfig) -> None:
        # The passive checker repeats on every step what check_env and the masks of the chunk do.
        limit = {"max_episode_steps": config.max_episode_steps} if config.max_episode_steps else {}
        with no_deprecations():
            super().__init__(
                config.id, config, config.reports_success, disable_env_checker=True, **limit
            )


@contextmanager
def no_deprecations() -> Iterator[None]:
    """Leaves out MuJoCo's warnings, once per env, that Gymnasium's own XML is of an old kind; others are printed."""
    api: Any = mujoco  # whose type stubs lack these functions
    said: list[str] = []
    before = api.get_mju_user_warning()
    api.set_mju_user_warning(said.append)
    try:
        yield
    finally:
        api.set_mju_user_warning(before)
        for text in said:
            if "is deprecated" not in text:
                print(f"WARNING: {text}", file=sys.stderr)
