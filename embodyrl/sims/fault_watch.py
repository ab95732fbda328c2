"""Stops a run whose simulator breaks so often that it cannot be chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from embodyrl.env import VecEnv, env_index
from embodyrl.errors import UserError
from embodyrl.types import Obs, Step

MAX_FAULTS = 5
FAULT_WINDOW = 100
"""So many faults in so many episodes have a cause that restarting does not remove."""


class FaultWindow:
    """Counts faults over the last ``FAULT_WINDOW`` episodes."""

    def __init__(self) -> None:
        self._episodes = 0
        self._faults: list[int] = []  # for each fault, how many episodes had begun by then

    def begin(self, episodes: int) -> None:
        """Notes that so many episodes begin."""
        self._episodes += episodes

    def add(self) -> str | None:
        """Notes a fault.

        Returns:
            Where it is one too many, the rest of a sentence about the env ("broke 5 times ...").
        """
        recent = [at for at in self._faults if self._episodes - at < FAULT_WINDOW]
        self._faults = [*recent, self._episodes]
        if len(self._faults) < MAX_FAULTS:
            return None
        return f"broke {len(self._faults)} times within {FAULT_WINDOW} episodes, so the run stops."


class WatchedEnv:
    """A VecEnv around another one, which stops the run when that one breaks too often.

    A pool of processes counts its own faults (``counts_faults``). There a worker that dies breaks
    all the envs that it hosts, and that is one fault.
    """

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self.spec = env.spec
        self._window = None if getattr(env, "counts_faults", False) else FaultWindow()
        self._init: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(
        self,
        env_ids: Tensor | Sequence[int] | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        init: Sequence[int] | None = None,
    ) -> Obs:
        """See ``VecEnv.reset``."""
        obs = self.env.reset(env_ids, seed=seed, init=init)
        if self._window is not None:
            ids = env_index(env_ids, self.spec.num_envs)
            self._window.begin(len(ids))
            self._init |= dict(zip(ids, init, strict=True)) if init is not None else {}
        return obs

    def step(self, actions: Tensor) -> Step:
        """See ``VecEnv.step``.

        Raises:
            UserError: the simulator broke too often.
        """
        step = self.env.step(actions)
        if self._window is not None:
            for k in step.fault.nonzero().flatten().tolist():
                if too_many := self._window.add():
                    where = f" (initial state {self._init[k]})" if k in self._init else ""
                    raise UserError(f"{self.spec.name} {too_many} Last it broke in env {k}{where}.")
        return step

    def close(self) -> None:
        """See ``VecEnv.close``."""
        self.env.close()
