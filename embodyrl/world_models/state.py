"""``StateModel``: what actions do to the simulator's state, where the data hold it, and when the task is solved.

Whether a hand closes on a block or beside it is decided by millimetres that a small latent map does not hold, but a few
dozen numbers do. They are predicted one action at a time, by a small net that adds to a linear model. The pictures of a
dream follow them (``ChunkTransformer``), and critics may see them.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from embodyrl.world_models.saved import ConfigMixin, ModelMixin, register_to_config

FAR = 5.0
"""Standard deviations at which inputs are cut off, so that a dream that left the data goes nowhere."""


class StateModel(ModelMixin, ConfigMixin):
    """A body (proprio and privileged state, in the env's units) and an action -> the body after it.

    Args:
        body_dim: D, proprio and privileged state.
        action_dim: A.
        word_dim: E, of the instruction's embedding.
        width: of the net.
        layers: hidden ones.
        members: E nets, alike but for their first weights (arXiv:1612.01474). Their mean is what is believed; where
            they differ, the data said nothing.
    """

    mean: Tensor
    std: Tensor
    linear: Tensor
    scale: Tensor

    @register_to_config
    def __init__(
        self,
        body_dim: int,
        action_dim: int,
        word_dim: int = 256,
        width: int = 256,
        layers: int = 3,
        members: int = 1,
    ) -> None:
        super().__init__()
        self.net = _mlp(body_dim + action_dim, body_dim, width, layers)
        self.others = nn.ModuleList(_mlp(body_dim + action_dim, body_dim, width, layers) for _ in range(members - 1))
        self.judge = _mlp(body_dim + word_dim, 1, 64, 2)
        self.register_buffer("mean", torch.zeros(body_dim))
        self.register_buffer("std", torch.ones(body_dim))
        self.register_buffer("linear", torch.zeros(body_dim + action_dim + 1, body_dim))
        self.register_buffer("scale", torch.ones(body_dim))

    @torch.no_grad()
    def fit_linear(
        self, body: Float[Tensor, "b d"], actions: Float[Tensor, "b a"], after: Float[Tensor, "b d"]
    ) -> None:
        """Normalisation, and the linear model by least squares; what is left is the net's to learn."""
        self.mean.copy_(body.mean(0))
        self.std.copy_(body.std(0).clamp_min(1e-3))
        x, y = self._inputs(body, actions).double(), ((after - body) / self.std).double()
        ridge = 1e-2 * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        self.linear.copy_(torch.linalg.solve(x.T @ x + ridge, x.T @ y))
        self.scale.copy_((y - x @ self.linear.double()).std(0).clamp_min(2e-3))

    def normalize(self, body: Tensor) -> Tensor:
        """Standardised and cut off."""
        return ((body - self.mean) / self.std).clamp(-FAR, FAR)

    @property
    def members(self) -> list[nn.Module]:
        """The E nets."""
        return [self.net, *self.others]

    def error(self, body: Float[Tensor, "b d"], actions: Tensor, after: Tensor) -> Float[Tensor, "e b d"]:
        """How far each net is off, in the units of what the linear model leaves."""
        x = self._inputs(body, actions)
        with torch.autocast(body.device.type, enabled=False):
            wanted = ((after - body) / self.std - x @ self.linear) / self.scale
        return torch.stack([net(x[:, :-1]).float() - wanted for net in self.members])

    def forward(self, bodies: Float[Tensor, "e n d"], actions: Float[Tensor, "n a"]) -> Float[Tensor, "e n d"]:
        """The bodies after one action, each by the net that it belongs to."""
        x = self._inputs(bodies, actions.expand(len(bodies), -1, -1))
        said = torch.stack([net(one[:, :-1]) for net, one in zip(self.members, x, strict=True)])
        return bodies + (x @ self.linear + said * self.scale) * self.std

    def roll(
        self, body: Float[Tensor, "n d"], actions: Float[Tensor, "n h a"], count: Int[Tensor, " n"]
    ) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"]]:
        """The body after the first ``count`` of the actions, and how far the nets differ about it.

        Each net goes its own way for as long; the difference is a standard deviation, in those of the data, root mean
        square over the body. It is 0 for a single net.
        """
        bodies = body.expand(len(self.members), -1, -1)
        with torch.autocast(body.device.type, enabled=False):  # millimetres do not survive bfloat16
            for step in range(actions.shape[1]):
                bodies = torch.where((step < count)[:, None], self(bodies, actions[:, step]), bodies)
            spread = (bodies.std(0, correction=0) / self.std).square().mean(-1).sqrt()
        return bodies.mean(0), spread

    def logit(self, body: Float[Tensor, "n d"], words: Float[Tensor, "n e"]) -> Float[Tensor, " n"]:
        """Whether the task of the instruction is solved."""
        with torch.autocast(body.device.type, enabled=False):
            return self.judge(torch.cat([self.normalize(body), words], dim=-1))[..., 0]

    def _inputs(self, body: Tensor, actions: Tensor) -> Tensor:
        return torch.cat([self.normalize(body), actions, torch.ones_like(actions[..., :1])], dim=-1)


class Residual(nn.Module):
    """x + a layer of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + F.silu(self.layer(x))


def _mlp(inputs: int, outputs: int, width: int, layers: int) -> nn.Sequential:
    net = nn.Sequential(
        nn.Linear(inputs, width), nn.SiLU(), *(Residual(width) for _ in range(layers - 1)), nn.Linear(width, outputs)
    )
    last = cast(nn.Linear, net[-1])
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return net
