"""A small env from state: a point that must come to a goal on the circle around it."""

import numpy as np
import torch

from embodyrl.env import EnvConfig, SteppedVecEnv, Tick
from embodyrl.types import EnvSpec, Obs


class PointReach(SteppedVecEnv):
    """A policy sees point and goal. An action of 1 moves the point by 0.15."""

    Config = EnvConfig

    def __init__(self, num_envs=16):
        spec = EnvSpec("test/point", num_envs, 2, 4, "delta", 10.0, 16, {})
        super().__init__(spec, EnvConfig(num_envs=num_envs))
        self.point = torch.zeros(num_envs, 2)
        self.goal = torch.zeros(num_envs, 2)

    def _reset(self, env_ids, inits):
        for k, init in zip(env_ids, inits, strict=True):
            angle = np.random.default_rng(int(init)).uniform(0, 2 * np.pi)
            self.goal[k] = torch.tensor([np.cos(angle), np.sin(angle)], dtype=torch.float32)
            self.point[k] = 0.0

    def _step(self, actions, active):
        moved = self.point + 0.15 * torch.as_tensor(actions).float()
        self.point = torch.where(torch.as_tensor(active)[:, None], moved, self.point)
        solved = (self.point - self.goal).norm(dim=-1) < 0.3
        return Tick(solved.float(), solved, solved, torch.zeros_like(solved))

    def _observe(self, env_ids):
        return Obs({}, torch.cat([self.point, self.goal], 1), ["go"] * self.spec.num_envs)
