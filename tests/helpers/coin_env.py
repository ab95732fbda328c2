"""An env with a known success rate, in which success is fast and failure slow."""

from dataclasses import dataclass

import numpy as np
import torch

from embodyrl.env import EnvConfig, SteppedVecEnv, Tick
from embodyrl.types import ActionSample, EnvSpec, Obs

LIMIT = 20
FAST = 3


@dataclass(frozen=True)
class CoinConfig(EnvConfig):
    """Settings of the env."""

    flicker: bool = False


class CoinEnv(SteppedVecEnv):
    """Half of its initial states are solved at action 3; the others fail at action 20.

    With ``flicker`` the task is solved at that action alone, and not after it.
    """

    Config = CoinConfig

    def __init__(self, num_envs=64, **settings):
        config = CoinConfig(num_envs=num_envs, **settings)
        spec = EnvSpec("coin", num_envs, 1, 1, "box", 10.0, LIMIT, {})
        super().__init__(spec, config)

    def _reset(self, env_ids, inits):
        pass

    def _step(self, actions, active):
        now = self._elapsed + 1
        # A fair coin for each initial state, the same whenever it is played.
        rolls = [np.random.default_rng(int(i)).random() for i in self.init]
        lucky = torch.tensor(rolls) < 0.5
        solved = lucky & ((now == FAST) if self.config.flicker else (now >= FAST))
        off = torch.zeros_like(solved)
        return Tick(solved.float(), solved, solved, off)

    def _observe(self, env_ids):
        return Obs({}, torch.zeros(self.spec.num_envs, 1), ["toss"] * self.spec.num_envs)


class Still:
    """A policy that does nothing, in chunks of H actions."""

    def __init__(self, horizon=4):
        self.horizon = horizon

    def sample(self, obs, *, generator, mode):
        return ActionSample(torch.zeros(len(obs), self.horizon, 1))

    def act(self, obs, generator):
        actions = torch.zeros(len(obs), self.horizon, 1)
        return actions, actions
