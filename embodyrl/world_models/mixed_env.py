"""``MixedEnv``: real envs and dreams of them in one batch (``env.real_envs``).

The real envs keep a policy honest that is trained in dreams: an action that only a dream rewards
earns nothing in their rows, and the policy also learns from the pictures that it will be evaluated
on. Every rollout executes ``real_envs`` / ``num_envs`` of its actions in the real env.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from embodyrl.build import make_env
from embodyrl.env import VecEnv, plan_reset
from embodyrl.storage.env_spec import check_compatible
from embodyrl.types import Obs, Step
from embodyrl.world_models.config import WorldModelConfig
from embodyrl.world_models.env import WorldModelEnv


class MixedEnv:
    """N envs, the first ``real_envs`` of them real; see ``VecEnv``.

    Attributes:
        real_steps: actions executed in the real ones so far.
    """

    def __init__(self, config: WorldModelConfig) -> None:
        """Builds the real envs and the dreams.

        Raises:
            UserError: the model does not say which env it imagines, or does not fit it.
        """
        self.config = config
        self.device = config.place()
        self._num_real = config.real_envs
        self.real_steps = 0
        num_dreams = config.num_envs - self._num_real
        self.dream = WorldModelEnv(dataclasses.replace(config, num_envs=num_dreams, real_envs=0))
        # The training split, as a run of N real envs would have: never the evaluation's states.
        self.real = make_env(
            dataclasses.replace(
                config.for_evaluation("train"), num_envs=self._num_real, device=str(self.device)
            )
        )
        check_compatible(self.dream.spec, self.real.spec)
        # Any number names an initial state: each part takes its remainder by how many it has.
        self.spec = dataclasses.replace(
            self.dream.spec,
            name=f"{self.real.spec.name} and dreams of it",
            num_envs=config.num_envs,
            num_init_states=None,
        )
        self._rngs = [np.random.default_rng(config.seed + k) for k in range(config.num_envs)]
        self._real_obs: Obs | None = None
        self._dream_obs: Obs | None = None

    def reset(
        self,
        env_ids: Tensor | Sequence[int] | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        init: Sequence[int] | None = None,
    ) -> Obs:
        """See ``VecEnv.reset``."""
        ids, inits = plan_reset(self.spec, self._rngs, env_ids, seed, init)
        # Split the request; env k of the batch is dream k - num_real.
        pairs = list(zip(ids, inits, strict=True))
        real = [(k, i) for k, i in pairs if k < self._num_real]
        dreams = [(k - self._num_real, i) for k, i in pairs if k >= self._num_real]
        if real or self._real_obs is None:
            self._real_obs = _reset(self.real, real)
        if dreams or self._dream_obs is None:
            self._dream_obs = _reset(self.dream, dreams, self._seeds_of_dreams(ids, seed))
        return self._joined()

    def _seeds_of_dreams(
        self, ids: list[int], seed: int | Sequence[int] | None
    ) -> list[int] | None:
        """The seeds of those ``ids`` that are dreams: they also decide what a dream follows."""
        if seed is None:
            return None
        seeds = [seed + k for k in ids] if isinstance(seed, int) else list(seed)
        return [s for k, s in zip(ids, seeds, strict=True) if k >= self._num_real]

    def step(self, actions: Tensor) -> Step:
        """See ``VecEnv.step``; ``log["real"]`` says which envs are real."""
        real = self.real.step(actions[: self._num_real])
        dream = self.dream.step(actions[self._num_real :])
        self._real_obs = real.obs
        self._dream_obs = dream.obs
        self.real_steps += int(real.valid.sum())

        def joined(name: str) -> Tensor:
            parts = [getattr(part, name) for part in (real, dream)]
            return torch.cat([x.to(self.device) for x in parts])

        log = {"steps": torch.cat([real.log["steps"], dream.log["steps"]])}
        numbers = torch.arange(self.spec.num_envs, device=log["steps"].device)
        log["real"] = numbers < self._num_real
        names = ("reward", "terminated", "truncated", "valid", "success", "fault")
        return Step(
            obs=self._joined(),
            log=log,
            success_once=joined("ever_solved"),
            **{name: joined(name) for name in names},
        )

    def _joined(self) -> Obs:
        assert self._real_obs is not None and self._dream_obs is not None
        parts = [self._real_obs, self._dream_obs]
        if not self.spec.privileged_dim:  # without a state model only the real envs have a state
            parts = [dataclasses.replace(part, privileged=None) for part in parts]
        return Obs.cat(parts)

    def close(self) -> None:
        """See ``VecEnv.close``."""
        self.real.close()
        self.dream.close()


def _reset(env: VecEnv, pairs: list[tuple[int, int]], seeds: list[int] | None = None) -> Obs:
    """Resets envs to initial states, given as pairs; a state's number wraps around."""
    limit = env.spec.num_init_states or 2**31
    return env.reset([k for k, _ in pairs], seed=seeds, init=[i % limit for _, i in pairs])
