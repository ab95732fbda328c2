"""An env that shows a policy something else than what is there, to learn what the policy uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from embodyrl.env import VecEnv, env_index
from embodyrl.rollouts.env_around import EnvAround
from embodyrl.types import Obs, Step

Change = Callable[[Obs, list[int]], Obs]
"""What is shown in place of N observations; the initial state of each env's episode is given."""


class AblatedEnv(EnvAround):
    """A VecEnv around another one, whose observations are changed before a policy sees them.

    The episode itself stays as it is: physics, goals, and the privileged state.

    Args:
        env: shows what is there.

    Attributes:
        spec: the env's.
        change: what is shown instead; None shows what is there.
        first: initial state -> what was really seen at its start, (1, ...) on the CPU.
    """

    def __init__(self, env: VecEnv) -> None:
        super().__init__(env)
        self.change: Change | None = None
        self.first: dict[int, Obs] = {}
        self._init = [0] * env.spec.num_envs

    def reset(
        self,
        env_ids: Tensor | Sequence[int] | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        init: Sequence[int] | None = None,
    ) -> Obs:
        """See ``VecEnv.reset``; ``init`` must be given, because changes depend on it."""
        if init is None:
            raise RuntimeError("AblatedEnv.reset needs the initial states.")
        obs = self.env.reset(env_ids, seed=seed, init=init)
        # What was really there at the start, once for each initial state.
        for k, state in zip(env_index(env_ids, self.spec.num_envs), init, strict=True):
            self._init[k] = state
            if state not in self.first:
                row = replace(obs, previous=None)[torch.tensor([k])]
                self.first[state] = row.to("cpu")
        return self._shown(obs)

    def step(self, actions: Tensor) -> Step:
        """See ``VecEnv.step``."""
        step = self.env.step(actions)
        return replace(step, obs=self._shown(step.obs))

    def _shown(self, obs: Obs) -> Obs:
        """Every frame of ``obs``, changed."""
        if self.change is None:
            return obs
        # Policies with a history see changed frames alone.
        earlier = None if obs.previous is None else self._shown(obs.previous)
        return replace(self.change(obs, self._init), previous=earlier)
