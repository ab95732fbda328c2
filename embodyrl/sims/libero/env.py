"""``make_env``: LIBERO on the backend that its config names, in this process or in several."""

from __future__ import annotations

from embodyrl.env import VecEnv
from embodyrl.errors import UserError, did_you_mean, refuse_unread
from embodyrl.registry import EnvFactory
from embodyrl.sims.libero.base import LiberoEnv
from embodyrl.sims.libero.config import LiberoConfig
from embodyrl.sims.workers.pool import PooledVecEnv


def make_env(config: LiberoConfig) -> VecEnv:
    """The env that a config describes: one ``LiberoEnv``, or a pool of processes with one each.

    The ``warp`` backend steps all its worlds in one process, so it is never pooled.

    Raises:
        UserError: a setting that does not exist.
        MissingDependencyError: LIBERO or what draws its cameras is not installed.
    """
    if config.backend == "warp":
        refuse_unread(config, "env", ("num_workers",), "backend=warp steps all envs in one process")
    if config.backend == "robosuite":
        refuse_unread(config, "env", ("num_threads",), "backend=robosuite has no threads")
    if config.num_workers > 1 and config.backend != "warp":
        return PooledVecEnv("libero", config, num_workers=config.num_workers)
    return _backend_class(config.backend)(config)


def _backend_class(name: str) -> type[LiberoEnv]:
    """The class behind ``LiberoConfig.backend``; only that backend's libraries are imported."""
    if name == "native":
        from embodyrl.sims.libero.native_env import NativeEnv

        return NativeEnv
    if name == "warp":
        from embodyrl.sims.libero.warp_env import WarpEnv

        return WarpEnv
    if name == "robosuite":
        from embodyrl.sims.libero.robosuite_env import RobosuiteEnv

        return RobosuiteEnv
    backends = ("native", "warp", "robosuite")
    raise UserError(f"LIBERO has no backend {name!r}. {did_you_mean(name, backends)}")


LIBERO = EnvFactory(LiberoConfig, make_env)
"""What the registry loads."""
