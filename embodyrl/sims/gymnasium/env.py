"""Any Gymnasium env with bounded continuous actions, by its id."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mujoco

from embodyrl.env import EnvConfig, VecEnv
from embodyrl.ranges import Count, CountOrZero, Processes
from embodyrl.registry import EnvFactory
from embodyrl.sims.gymnasium.bridge import FromGymnasium
from embodyrl.sims.workers.pool import PooledVecEnv
from embodyrl.storage.paths import machine_setting


@dataclass(frozen=True)
class GymnasiumConfig(EnvConfig):
    """Settings of a Gymnasium env.

    Attributes:
        name: registry name.
        id: Gymnasium's own, e.g. ``"Hopper-v5"``.
        max_episode_steps: time limit; 0 leaves the env's own.
        num_workers: processes that share the envs; 1 runs them in this one, which is faster for few
            of them.
        reports_success: whether its ``info`` says if a task is solved (``reports.SUCCESS``); if it
            does not, runs are scored by their mean return. None takes a first step to find out.
    """

    name: str = "gymnasium"
    id: str = "Hopper-v5"
    num_envs: Count = machine_setting(1)
    max_episode_steps: CountOrZero = 0
    num_workers: Processes = machine_setting(1)
    reports_success: bool | None = None

    def for_demonstrations(self) -> EnvConfig | None:
        """None: Gymnasium's envs come with no expert."""
        return None


class GymnasiumEnv(FromGymnasium):
    """See ``FromGymnasium``; always in this process, whatever ``config.num_workers`` says."""

    Config = GymnasiumConfig

    def __init__(self, config: GymnasiumConfig) -> None:
        # Gymnasium's own checker looks at types and shapes in every step; ``check_env`` does once.
        limit = {"max_episode_steps": config.max_episode_steps} if config.max_episode_steps else {}
        with no_deprecations():
            super().__init__(
                config.id, config, config.reports_success, disable_env_checker=True, **limit
            )


def make_env(config: GymnasiumConfig) -> VecEnv:
    """The env that a config describes: in this process, or a pool of several."""
    if config.num_workers > 1:
        return PooledVecEnv("gymnasium", config, num_workers=config.num_workers)
    return GymnasiumEnv(config)


GYMNASIUM = EnvFactory(GymnasiumConfig, make_env)
"""What the registry loads."""


@contextmanager
def no_deprecations() -> Iterator[None]:
    """Leaves out MuJoCo's warnings that Gymnasium's XML files are of an old kind.

    They would come once for every env. Other warnings are printed.
    """
    api: Any = mujoco  # its type stubs lack these functions
    warnings: list[str] = []
    before = api.get_mju_user_warning()
    api.set_mju_user_warning(warnings.append)
    try:
        yield
    finally:
        api.set_mju_user_warning(before)
        for text in warnings:
            if "is deprecated" not in text:
                print(f"WARNING: {text}", file=sys.stderr)
