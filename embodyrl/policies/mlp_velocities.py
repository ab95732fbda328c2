"""Velocities of flow policies that see states: plain, gated (Flow-G) and decoded (Flow-T), from SAC Flow.

K denoising steps are K layers of a recurrent net, and a gradient through all of them vanishes or
explodes as in any recurrent net; the gate and the decoder are the remedies that recurrent nets have
(SAC Flow, arXiv:2509.25756). Every module maps features (N, F), noisy chunks (N, K, H, A) and times
(N, K) to the velocity, noise - action, and to the unbounded output that ``flow.squash_log_std``
takes, both (N, K, H, A).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from embodyrl.policies.action_expert import ActionExpert, sinusoid

TIME_FEATURES = 8
GATE_BIAS = 5.0


def mlp(inputs: int, width: int, layers: int, outputs: int | None = None) -> nn.Sequential:
    """``layers`` hidden layers with ReLU, and a linear one where ``outputs`` is given."""
    sizes = [inputs] + [width] * layers
    parts: list[nn.Module] = []
    for a, b in pairwise(sizes):
        parts += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*parts, *([nn.Linear(width, outputs)] if outputs else []))


class PlainVelocity(nn.Module):
    """v = net(features, x, t), zero at the start."""

    heads = 2

    def __init__(
        self, features: int, horizon: int, action_dim: int, width: int, layers: int
    ) -> None:
        super().__init__()
        self.shape = (horizon, action_dim)
        size = horizon * action_dim
        self.trunk = mlp(features + size + TIME_FEATURES, width, layers)
        self.head = nn.Linear(width, self.heads * size)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def outputs(self, features: Tensor, x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        """The raw outputs of the heads, each (N, K, H, A)."""
        n, k = t.shape
        inputs = torch.cat(
            [features[:, None].expand(n, k, -1), x.flatten(2), sinusoid(t, TIME_FEATURES)], dim=-1
        )
        return self.head(self.trunk(inputs)).unflatten(-1, (self.heads, *self.shape)).unbind(2)

    def forward(self, features: Tensor, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """See the module."""
        velocity, raw = self.outputs(features, x, t)
        return velocity, raw


class GatedVelocity(PlainVelocity):
    """Flow-G: v = g (x - h), so that a step moves x towards the candidate h by the share g / K: a GRU's update.

    The gate g = sigmoid(.) starts at sigmoid(5) = .9933 for every input.
    """

    heads = 3

    def __init__(
        self, features: int, horizon: int, action_dim: int, width: int, layers: int
    ) -> None:
        super().__init__(features, horizon, action_dim, width, layers)
        with torch.no_grad():
            self.head.bias[: horizon * action_dim] = GATE_BIAS

    def gate_and_candidate(self, features: Tensor, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The gate g in (0, 1) and the candidate h, each (N, K, H, A)."""
        gate, candidate, _ = self.outputs(features, x, t)
        return gate.sigmoid(), candidate

    def forward(self, features: Tensor, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """See the module."""
        gate, candidate, raw = self.outputs(features, x, t)
        return gate.sigmoid() * (x - candidate), raw


class DecodedVelocity(nn.Module):
    """Flow-T: a transformer decoder over the action tokens, with the state as its memory (no mixing between rows)."""

    def __init__(
        self, features: int, horizon: int, action_dim: int, width: int, layers: int, heads: int = 4
    ) -> None:
        super().__init__()
        self.memory = nn.Linear(features, width)
        self.decoder = ActionExpert(width, layers, heads, horizon, action_dim, patch=1, noise=True)

    def forward(self, features: Tensor, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """See the module."""
        memory = self.memory(features)
        context = self.decoder.prefix(memory[:, None], torch.ones_like(memory[:, :1]), memory)
        return self.decoder.with_noise(context, x, t)


class GaussianVelocity(nn.Module):
    """The policy of plain SAC as a flow of one step: v = x - mean(features) leads from any noise to the mean."""

    def __init__(
        self, features: int, horizon: int, action_dim: int, width: int, layers: int
    ) -> None:
        super().__init__()
        self.shape = (horizon, action_dim)
        self.net = mlp(features, width, layers, 2 * horizon * action_dim)

    def forward(self, features: Tensor, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """See the module."""
        mean, raw = self.net(features).unflatten(-1, (1, 2, *self.shape)).unbind(2)
        return x - mean, raw.expand_as(x)


VELOCITIES = {
    "plain": PlainVelocity,
    "gated": GatedVelocity,
    "decoded": DecodedVelocity,
    "gaussian": GaussianVelocity,
}
