"""``Reach2D``: a point moves to a goal in a plane; an env in one file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embodyrl.env import EnvConfig, SteppedVecEnv, Tick, split_index
from embodyrl.ranges import Count, Positive
from embodyrl.types import EnvSpec, Obs


@dataclass(frozen=True)
class Reach2DConfig(EnvConfig):
    """Settings of ``Reach2D``.

    Attributes:
        max_episode_steps: actions until an episode is truncated.
        radius: how near to the goal counts as solved.
    """

    name: str = "reach2d"
    max_episode_steps: Count = 20
    radius: Positive = 0.15


class Reach2D(SteppedVecEnv):
    """N points in the square [-1, 1]^2; an action moves a point by up to 0.2 along each axis."""

    Config = Reach2DConfig

    def __init__(self, config: Reach2DConfig) -> None:
        spec = EnvSpec(
            name="reach2d",
            num_envs=config.num_envs,
            action_dim=2,
            proprio_dim=4,
            control_mode="delta_position",
            control_hz=10.0,
            max_episode_steps=config.max_episode_steps,
            cameras={},
        )
        super().__init__(spec, config)
        self.radius = config.radius
        self.offset = split_index(config.split)
        self.point = torch.zeros(config.num_envs, 2)
        self.goal = torch.zeros(config.num_envs, 2)

    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        for k, init in zip(env_ids, inits, strict=True):
            rng = np.random.default_rng([self.offset, init])
            start = rng.uniform(-1.0, 1.0, 4).astype(np.float32)
            self.point[k] = torch.from_numpy(start[:2])
            self.goal[k] = torch.from_numpy(start[2:])

    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        self.point[active] += 0.2 * actions[active]
        distance = (self.point - self.goal).norm(dim=1)
        success = distance < self.radius
        never = torch.zeros_like(success)
        return Tick(
            reward=success.float() - 0.1 * distance,
            terminated=success,
            success=success,
            fault=never,
        )

    def _observe(self, env_ids: list[int] | None) -> Obs:
        proprio = torch.cat([self.point, self.goal - self.point], dim=1)
        return Obs({}, proprio, ["move the point to the goal"] * self.spec.num_envs)
