"""A small policy that chooses the initial noise of a flow policy (DSRL, arXiv:2506.15799).

DSRL trains it while the flow policy itself stays frozen.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embodyrl.functional.flow import (
    Generators,
    complete_noise,
    gaussian_log_prob,
    randn,
    squash_log_std,
)
from embodyrl.policies.mlp_velocities import mlp

STD_MIN = 0.05
STD_MAX = 1.0
"""Range of the std of z, the noise before squashing."""


class NoisePolicy(nn.Module):
    """The initial noise w = bound * tanh(z), with z Gaussian given the features.

    It is centred on 0 at the start. The bound keeps w in the region where N(0, I) has most of its
    mass, because the flow was trained with such noise.

    Args:
        features: F, width of the features.
        horizon: H.
        action_dim: A.
        width: of the two hidden layers.
        bound: largest magnitude of w.
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
        """Mean and std of z, each (N, H, A)."""
        mean, raw_log_std = self.net(features).unflatten(-1, (2, *self.shape)).unbind(1)
        return mean, squash_log_std(raw_log_std, STD_MIN, STD_MAX).exp()

    def sample(
        self, features: Float[Tensor, "n f"], generator: Generators
    ) -> tuple[Float[Tensor, "n h a"], Float[Tensor, " n"]]:
        """Reparameterised noise w (N, H, A) and its log-density (N,)."""
        mean, std = self._gaussian(features)
        z = mean + std * randn(mean.shape, generator, mean.device)
        noise = self.bound * torch.tanh(z)
        # Change of variables: log p(w) = log p(z) - log |dw/dz|, where dw/dz is
        # bound (1 - tanh^2 z) and log(1 - tanh^2 z) = 2 (log 2 - z - softplus(-2z)).
        log_derivative = math.log(self.bound) + 2.0 * (
            math.log(2.0) - z - nn.functional.softplus(-2.0 * z)
        )
        logprob = gaussian_log_prob(z, mean, std) - log_derivative.sum(dim=(-2, -1))
        return noise, logprob

    def mean(self, features: Float[Tensor, "n f"]) -> Float[Tensor, "n h a"]:
        """The noise bound * tanh(mean of z), without randomness, for evaluation."""
        return self.bound * torch.tanh(self._gaussian(features)[0])


def initial_noise(policy: Any, features: Tensor, generator: Generators, mode: str) -> Tensor:
    """The initial noise of the path: Gaussian, or chosen by the noise policy.

    Args:
        policy: a flow policy.
        features: (N, F), input of its noise policy.
        generator: of the noise.
        mode: ``"train"`` draws from N(0, I), or samples from the noise policy. ``"eval"`` draws with
            the standard deviation ``start_noise``, or takes the noise policy's mean.

    Returns:
        (N, C, D).
    """
    if policy.steer is None:
        std = policy.start_noise if mode == "eval" else 1.0
        return std * randn((len(features), *policy.flow_shape), generator, features.device)
    steer = policy.steer
    chosen = steer.mean(features) if mode == "eval" else steer.sample(features, generator)[0]
    return complete_noise(chosen, policy.flow_shape, generator)
