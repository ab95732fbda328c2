"""A small policy over the noise that a flow policy starts from: what DSRL trains while the flow stays frozen."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embodyrl.functional.flow import Generators, gaussian_log_prob, randn, squash_log_std
from embodyrl.policies.mlp_velocities import mlp

STD_MIN = 0.05
STD_MAX = 1.0
"""Of the noise before squashing, in units of ``bound``."""


class NoisePolicy(nn.Module):
    """Features to a distribution of initial noise w = bound tanh(z), z Gaussian; centred on 0 at the start.

    The bound keeps w where N(0, I) has mass, which is where the flow was trained (DSRL,
    arXiv:2506.15799).
    """

    def __init__(
        self, features: int, horizon: int, action_dim: int, width: int, bound: float
    ) -> None:
        super().__init__()
        self.shape = (horizon, action_dim)
        self.bound = bound
        self.net = mlp(features, width, 2, 2 * horizon * action_dim)
        last = self.net[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def _gaussian(self, features: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = self.net(features).unflatten(-1, (2, *self.shape)).unbind(1)
        return mean, squash_log_std(raw, STD_MIN, STD_MAX).exp()

    def sample(
        self, features: Float[Tensor, "n f"], generator: Generators
    ) -> tuple[Float[Tensor, "n h a"], Float[Tensor, " n"]]:
        """Reparameterised noise and its log-density."""
        mean, std = self._gaussian(features)
        z = mean + std * randn(mean.shape, generator, mean.device)
        log_det = math.log(self.bound) + 2.0 * (
            math.log(2.0) - z - nn.functional.softplus(-2.0 * z)
        )
        return self.bound * torch.tanh(z), gaussian_log_prob(z, mean, std) - log_det.sum(
            dim=(-2, -1)
        )

    def mean(self, features: Float[Tensor, "n f"]) -> Float[Tensor, "n h a"]:
        """The noise at the centre, for evaluation."""
        return self.bound * torch.tanh(self._gaussian(features)[0])


def initial_noise(
    steer: NoisePolicy | None,
    features: Tensor,
    shape: tuple[int, ...],
    generator: Generators,
    mode: str,
) -> Tensor:
    """Where the path from noise to action starts (N, H, A): N(0, I), or what ``steer`` chooses."""
    if steer is None:
        return randn(shape, generator, features.device)
    return steer.mean(features) if mode == "eval" else steer.sample(features, generator)[0]
