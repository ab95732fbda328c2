"""``MixedEnv``: some of the envs are real and the others are dreams of them, in one batch (``env.real_envs``).

The real ones keep a policy honest that is trained in dreams: what only a dream rewards earns
nothing in their rows, and the pictures that it will be judged by stay among those it learns from.
Every rollout costs ``real_envs`` / ``num_envs`` of its steps in the real env.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from embodyrl.build import make_env
from embodyrl.env import plan_reset
from embodyrl.storage.checkpoint import check_compatible
from embodyrl.types import Obs, Step

if TYPE_CHECKING:
    from embodyrl.world_models.config import WorldModelConfig


class MixedEnv:
    """N envs, the first ``real_envs`` of them real; see ``VecEnv``.

    Attributes:
        real_steps: actions executed in the real ones so far.
    """

    def __init__(self, config: WorldModelConfig) -> None:
        """Builds both.

        Raises:
            UserError: the model does not say what it imagines, or does not fit it.
        """
        from embodyrl.world_models.env import WorldModelEnv

        self.config = config
        self._first = config.real_envs
        self.real_steps = 0
        rest = config.num_envs - self._first
        self.dream = WorldModelEnv(dataclasses.replace(config, num_envs=rest, real_envs=0))
        # A run of N real envs would draw other states than these; none is of the evaluation split.
        self.real = make_env(
            dataclasses.replace(config.for_evaluation("train"), num_envs=self._first)
        )
        check_compatible(self.dream.spec, self.real.spec)
        # Any number names a state: for a dream, by what remains of it.
        self.spec = dataclasses.replace(
            self.dream.spec, name=f"{self.real.spec.name} and dreams of it", num_envs=config.num_envs,
            num_init_states=None,
        )  # fmt: skip
        self._rngs = [np.random.default_rng(config.seed + k) for k in range(config.num_envs)]
        self._obs: dict[bool, Obs] = {}

    def reset(
        self,
        env_ids: Tensor | Sequence[int] | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        init: Sequence[int] | None = None,
    ) -> Obs:
        """See ``VecEnv.reset``."""
        ids, inits = plan_reset(self.spec, self._rngs, env_ids, seed, init)
        limits = {True: self.real.spec.num_init_states, False: self.dream.spec.num_init_states}
        for real, env in ((True, self.real), (False, self.dream)):
            mine = [(k, i) for k, i in zip(ids, inits, strict=True) if (k < self._first) == real]
            if mine or real not in self._obs:
                rows = [k if real else k - self._first for k, _ in mine]
                self._obs[real] = env.reset(
                    rows, init=[i % (limits[real] or 2**31) for _, i in mine]
                )
        return self._joined()

    def step(self, actions: Tensor) -> Step:
        """See ``VecEnv.step``; ``log["real"]`` says which are."""
        parts = self.real.step(actions[: self._first]), self.dream.step(actions[self._first :])
        self._obs = {True: parts[0].obs, False: parts[1].obs}
        self.real_steps += int(parts[0].valid.sum())

        def both(name: str) -> Tensor:
            return torch.cat([getattr(part, name).to(self.config.device) for part in parts])

        log = {"steps": torch.cat([part.log["steps"] for part in parts])}
        log["real"] = torch.arange(self.spec.num_envs, device=log["steps"].device) < self._first
        names = ("reward", "terminated", "truncated", "valid", "success", "fault")
        return Step(obs=self._joined(), log=log, **{name: both(name) for name in names})

    def _joined(self) -> Obs:
        parts = [self._obs[real] for real in (True, False)]
        if not self.spec.privileged_dim:  # what only a simulator knows, most dreams cannot say
            parts = [dataclasses.replace(part, privileged=None) for part in parts]
        return Obs.cat(parts)

    def close(self) -> None:
        """See ``VecEnv.close``."""
        self.real.close()
        self.dream.close()
