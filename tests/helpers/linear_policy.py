"""A flow policy whose velocity is linear, so that everything about its path has a closed form."""

import dataclasses
import math
from types import SimpleNamespace

import torch
from torch import nn

from embodyrl.policies.flow_base import FlowPolicy
from embodyrl.policies.normalize import Normalizer
from embodyrl.types import EnvSpec, Obs

SPEC = EnvSpec("test/line", 1, 1, 2, "torque", 25.0, 20, {})
SIGMA = 0.6
OLD = torch.tensor([[0.3, -0.8], [0.5, 0.2]])
NEW = torch.tensor([[0.2, -0.6], [0.9, -0.4]])


@dataclasses.dataclass(frozen=True)
class Config:
    """What ``FlowPolicy`` reads."""

    name: str = "linear"
    horizon: int = 1
    num_denoise_steps: int = 3
    transition: str = "flow_noise"
    critic_width: int = 4
    start_noise: float = 1.0


class Linear(FlowPolicy):
    """v = W x + drift t, of which one dim of the first row is executed; the noise has std SIGMA."""

    def __init__(self, weight, trained_steps="all", rows=1, drift=0.0, **settings):
        super().__init__(Config(**settings), SPEC, eta=0.5, trained_steps=trained_steps)
        self.weight = nn.Parameter(weight.clone())
        self.rows = rows
        self.drift = drift
        self.normalize_action = Normalizer(1)
        self.add_heads(SPEC.proprio_dim)

    @property
    def flow_shape(self):
        return self.rows, len(self.weight) // self.rows

    def fit_inputs(self, proprio, actions):
        pass

    def encode(self, obs):
        return SimpleNamespace(pooled=obs.proprio)

    def velocity(self, context, x, t):
        return (x.flatten(-2) @ self.weight.T).view_as(x) + self.drift * t[..., None, None]

    def step_inputs(self, context, x, t):
        learned = self.transition.kind == "flow_noise"
        log_std = torch.full_like(x, math.log(SIGMA)) if learned else None
        return self.velocity(context, x, t), log_std


def observed(n):
    """n observations, all alike."""
    return Obs({}, torch.zeros(n, SPEC.proprio_dim), ["go"] * n)


def sampled(policy, n, seed=0):
    """What the policy does in training."""
    generator = torch.Generator().manual_seed(seed)
    return policy.sample(observed(n), generator=generator, mode="train")
