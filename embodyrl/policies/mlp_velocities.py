"""Velocity networks of flow policies that see states (SAC Flow, arXiv:2509.25756).

K denoising steps are like K steps of a recurrent net: a gradient through all of them can vanish or
explode. SAC Flow therefore takes two remedies from recurrent nets, a gate and a decoder:

    plain      an MLP
    gated      Flow-G: a gate, as in a GRU
    decoded    Flow-T: a transformer decoder
    gaussian   not a flow: the policy of plain SAC, as a single step

Every module has the same inputs and outputs, for N states with K noisy chunks each:

    in     features (N, F), x (N, K, H, A), t (N, K); d (N, K) or (1, 1), the size of the step, for
           nets that were made with ``shortcut`` (``gaussian`` has one step, so it is not)
    out    velocity, noise - action, (N, K, H, A)
           raw log-std, unbounded, for ``flow.squash_log_std``, (N, K, H, A)
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from embodyrl.policies.action_expert import ActionExpert, StepSize, sinusoid

TIME_FEATURES = 8
GATE_BIAS = 5.0
"""The gate starts open: sigmoid(5) = .9933."""


def mlp(inputs: int, width: int, layers: int, outputs: int | None = None) -> nn.Sequential:
    """An MLP: ``layers`` hidden layers with ReLU, and a linear layer if ``outputs`` is given."""
    sizes = [inputs] + [width] * layers
    parts: list[nn.Module] = []
    for size_in, size_out in pairwise(sizes):
        parts += [nn.Linear(size_in, size_out), nn.ReLU()]
    if outputs:
        parts.append(nn.Linear(width, outputs))
    return nn.Sequential(*parts)


class PlainVelocity(nn.Module):
    """v = net(features, x, t); zero at the start."""

    heads = 2
    """Outputs of shape (H, A): the velocity and the raw log-std."""

    def __init__(
        self,
        features: int,
        horizon: int,
        action_dim: int,
        width: int,
        layers: int,
        shortcut: bool = False,
    ) -> None:
        super().__init__()
        self.shape = (horizon, action_dim)
        size = horizon * action_dim
        self.trunk = mlp(features + size + TIME_FEATURES, width, layers)
        self.head = nn.Linear(width, self.heads * size)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        if shortcut:
            self.step = StepSize(TIME_FEATURES, width)

    def outputs(
        self, features: Tensor, x: Tensor, t: Tensor, d: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The outputs of all heads, each (N, K, H, A)."""
        n, k = t.shape
        # One input row for each of the N * K noisy chunks: features, flat chunk, time features.
        inputs = torch.cat(
            [features[:, None].expand(n, k, -1), x.flatten(2), sinusoid(t, TIME_FEATURES)], dim=-1
        )
        # The size of the step is an offset of the first hidden layer.
        if d is None:
            hidden = self.trunk(inputs)
        else:
            hidden = self.trunk[1:](self.trunk[0](inputs) + self.step(d))
        return self.head(hidden).unflatten(-1, (self.heads, *self.shape)).unbind(2)

    def forward(
        self, features: Tensor, x: Tensor, t: Tensor, d: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Velocity and raw log-std; see the module's docstring."""
        velocity, raw_log_std = self.outputs(features, x, t, d)
        return velocity, raw_log_std


class GatedVelocity(PlainVelocity):
    """Flow-G: v = g (x - h), with a gate g in (0, 1) and a candidate h.

    A denoising step x - v / K then moves x towards h by the fraction g / K, like the update of a
    GRU. The gate starts at sigmoid(5) = .9933 for every input.
    """

    heads = 3
    """Outputs of shape (H, A): gate, candidate and raw log-std."""

    def __init__(
        self,
        features: int,
        horizon: int,
        action_dim: int,
        width: int,
        layers: int,
        shortcut: bool = False,
    ) -> None:
        super().__init__(features, horizon, action_dim, width, layers, shortcut)
        with torch.no_grad():
            self.head.bias[: horizon * action_dim] = GATE_BIAS

    def gate_and_candidate(self, features: Tensor, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The gate g in (0, 1) and the candidate h, each (N, K, H, A)."""
        gate, candidate, _ = self.outputs(features, x, t)
        return gate.sigmoid(), candidate

    def forward(
        self, features: Tensor, x: Tensor, t: Tensor, d: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Velocity and raw log-std; see the module's docstring."""
        gate, candidate, raw_log_std = self.outputs(features, x, t, d)
        return gate.sigmoid() * (x - candidate), raw_log_std


class DecodedVelocity(nn.Module):
    """Flow-T: a transformer decoder over the action tokens, with the state as its memory.

    The N states do not see each other.
    """

    def __init__(
        self,
        features: int,
        horizon: int,
        action_dim: int,
        width: int,
        layers: int,
        shortcut: bool = False,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.memory = nn.Linear(features, width)
        self.decoder = ActionExpert(
            width, layers, heads, horizon, action_dim, patch=1, noise=True, shortcut=shortcut
        )

    def forward(
        self, features: Tensor, x: Tensor, t: Tensor, d: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Velocity and raw log-std; see the module's docstring."""
        # The state is one context token, which is never padding, and also the pooled summary.
        memory = self.memory(features)
        context = self.decoder.prefix(memory[:, None], torch.ones_like(memory[:, :1]), memory)
        return self.decoder.with_noise(context, x, t, d)


class GaussianVelocity(nn.Module):
    """The policy of plain SAC as a flow of one step.

    v = x - mean(features), so the step x - v gives the mean for any initial noise x.
    """

    def __init__(
        self, features: int, horizon: int, action_dim: int, width: int, layers: int
    ) -> None:
        super().__init__()
        self.shape = (horizon, action_dim)
        self.net = mlp(features, width, layers, 2 * horizon * action_dim)

    def forward(self, features: Tensor, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity and raw log-std; see the module's docstring."""
        mean, raw_log_std = self.net(features).unflatten(-1, (1, 2, *self.shape)).unbind(2)
        return x - mean, raw_log_std.expand_as(x)


VELOCITIES = {
    "plain": PlainVelocity,
    "gated": GatedVelocity,
    "decoded": DecodedVelocity,
    "gaussian": GaussianVelocity,
}
