"""A state model of three networks made by hand, and a world model of it."""

from typing import Any

import torch
from squares import NEVER, SETTINGS, squares
from torch import nn

from embodyrl.world_models.encode import encode
from embodyrl.world_models.env import WorldModelConfig, WorldModelEnv
from embodyrl.world_models.init import build_model
from embodyrl.world_models.keyframes import add_keyframes
from embodyrl.world_models.nets.state import StateModel
from embodyrl.world_models.train import WorldTrainConfig

DRIFT = torch.tensor([-1.0, 0.5, 2.0])
"""What each network adds to the last number of the state in every action."""
UNIT = 50.0
"""The standard deviation of the state's numbers, so large that none is clipped."""
HORIZON = int(SETTINGS["horizon"])


def by_hand(state: StateModel) -> StateModel:
    """s' = s + a (its first numbers) + the network's drift (its last); the last one promises.

    The logit of the promise is the last number, in ``UNIT``, times the first of the instruction.
    """
    body = state.mean.numel()
    with torch.no_grad():
        for parameter in state.parameters():
            parameter.zero_()
        state.mean.zero_()
        state.std.fill_(UNIT)
        state.scale.fill_(1.0 / UNIT)
        state.linear.zero_()
        for k in range(state.config["action_dim"]):
            state.linear[body + k, k] = 1.0 / UNIT
        for net, drift in zip(state.members, DRIFT, strict=True):
            net[-1].bias[-1] = drift
    state.prospects = nn.ModuleList([Product(body)])
    return state


class Product(nn.Module):
    """The last number of the state times the first of the instruction."""

    def __init__(self, body: int) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[..., self.body - 1] * x[..., self.body])[..., None]


def three() -> StateModel:
    return by_hand(StateModel(3, 2, word_dim=2, width=4, layers=1, members=3, prospects=1))


def save(folder, max_spread: float = 0.0, **settings: Any) -> str:
    """A model with three networks made by hand, whose pictures mean nothing."""
    clips = squares(20, 0, state=True)
    rows = torch.arange(len(clips))
    config = WorldTrainConfig(**SETTINGS, state=True, **({"state_members": 3} | settings))
    model = build_model(config, clips, rows).eval()
    if config.state_members == 3:
        prospects = model.state.prospects
        by_hand(model.state)
        # What is saved has ordinary networks in place of the product.
        model.state.prospects = prospects
    clips.latents = encode(model, clips)
    add_keyframes(model, clips, torch.zeros(len(clips), dtype=torch.bool))
    model.calibration = NEVER
    model.max_spread = max_spread
    model.save(folder)
    return str(folder)


def dreams(folder: str, n: int = 4, **settings: Any) -> WorldModelEnv:
    env = WorldModelEnv(WorldModelConfig(model=folder, num_envs=n, precision="f32", **settings))
    assert env.model.state is not None
    env.model.state.prospects = nn.ModuleList([Product(env.model.state.mean.numel())])
    return env
