"""``SharedFeatures``: small nets see what the policy itself computes of an observation.

    obs --policy.encode, policy.features--> (B, F) --+
    proprio (B, P) ----------------------------------+--> normalised (B, F + P)

For a VLA that is the mean token of its language model: the place of RLT's RL token
(arXiv:2604.23073), which is a read-out trained for the purpose.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embodyrl.policies.normalize import Normalizer
from embodyrl.types import Obs

ENCODED_AT_ONCE = 32
"""Observations: a VLA's keys and values of many more would not fit into memory."""


class SharedFeatures(nn.Module):
    """The features of a policy that does not change, and proprioception.

    Args:
        policy: with the ability ``HasFeatures``. Its weights are no part of this module.
        features: F.

    Attributes:
        dim: of what it gives.
        localiser: None: nothing is found by hindsight.
    """

    def __init__(self, policy: Any, features: int) -> None:
        super().__init__()
        self._policy = [policy]  # in a list, so that it is not registered as a part
        self.localiser = None
        self.dim = features + policy.spec.proprio_dim
        self.normalize = Normalizer(self.dim)

    @torch.no_grad()
    def forward(self, obs: Obs) -> Float[Tensor, "b f"]:
        """The features of B observations."""
        return self.normalize(self._read(obs))

    @property
    def fitted(self) -> bool:
        """Whether ``fit_inputs`` was called."""
        return self.normalize.fitted

    @torch.no_grad()
    def fit_inputs(self, obs: Obs) -> None:
        """Normalises what it gives, by many observations."""
        self.normalize.fit(self._read(obs))

    def _read(self, obs: Obs) -> Float[Tensor, "b f"]:
        policy = self._policy[0]
        parts = []
        for start in range(0, len(obs), ENCODED_AT_ONCE):
            some = obs[start : start + ENCODED_AT_ONCE]
            features = policy.features(policy.encode(some)).float()
            parts.append(torch.cat([features, some.proprio], dim=-1))
        return torch.cat(parts)
