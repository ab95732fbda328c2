"""PA-RL offline at a small size, and episodes whose outcome depends on one action."""

from typing import Any, cast

import torch

from embodyrl.algorithms.pa_rl import PARL, PARLConfig
from embodyrl.algorithms.pa_rl_offline import PARLOffline, PARLOfflineConfig
from embodyrl.build import make_policy
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.policies.flow_mlp import FlowMLPConfig
from embodyrl.types import EnvSpec

SPEC = EnvSpec("test/arm", 4, 2, 3, "torque", 25.0, 20, {}, privileged_dim=3)
H = 2


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def recorded(count=200, length=2, solved=None, seed=0):
    """Episodes that are solved where the very first action's first number is above 0."""
    generator = gen(seed)
    actions = torch.rand(count, length, 2, generator=generator) * 2 - 1
    success = actions[:, 0, 0] > 0 if solved is None else torch.full((count,), solved)
    return Demonstrations(
        H,
        {},
        torch.randn(count * length, 3, generator=generator),
        actions.flatten(0, 1),
        torch.arange(count).repeat_interleave(length),
        torch.zeros(count * length, dtype=torch.long),
        ["go"],
        success.repeat_interleave(length),
    )


def make_small(cls: Any = PARLOffline, **settings):
    policy = FlowMLPConfig(width=32, layers=1, num_denoise_steps=2, horizon=H, chooser_width=32)
    torch.manual_seed(0)
    made = cast(Any, make_policy(policy, SPEC, 0))
    if cls is PARL:
        return PARL(PARLConfig(**settings), made)
    small: dict[str, Any] = {"batch_size": 64, "actor_batch_size": 32, "capacity": 2000}
    small |= {"critic_warmup": 100, "steps_per_iteration": 10}
    return PARLOffline(PARLOfflineConfig(**small | settings), made)


def update(algorithm, data, seed=0):
    return algorithm.update(data, progress=0.0, generator=gen(seed))
