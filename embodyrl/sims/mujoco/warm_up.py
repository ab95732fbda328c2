"""``warm_up``: compiles mujoco-warp's kernels before they are needed."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from embodyrl.sims.mujoco.config import MujocoConfig
from embodyrl.sims.mujoco.env import MujocoEnv


def warm_up(config: Any = None) -> float:
    """Compiles the kernels for a scene into Warp's cache on disk, if they are not there yet.

    Args:
        config: of the ``MujocoEnv`` whose scene it is; None means the default one.

    Returns:
        Seconds taken: 10 to 60 the first time, a few afterwards.
    """
    started = time.perf_counter()
    env = MujocoEnv(dataclasses.replace(config or MujocoConfig(), num_envs=1))
    env.reset()
    env.close()
    return time.perf_counter() - started
