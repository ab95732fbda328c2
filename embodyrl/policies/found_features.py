"""``FoundFeatures``: what critics see without hidden state: what hindsight finds in pictures.

    proprio, normalised --------------------------------------+
    instruction, embedded ------------------------------------+--> features (B, F)
    pictures --Localiser--> places (B, J, P) -----------------+
                            places - proprio -----------------+

It sees what a real robot sees, and no state of a simulator. Hindsight trains it
(``algorithms.hindsight``), no critic's loss does. So features are computed once for each
observation, and a gradient step of critics passes through small nets alone.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embodyrl.policies.localiser import PLACES, TEXT_WIDTH, Localiser
from embodyrl.policies.normalize import Normalizer
from embodyrl.policies.text import TextEncoder
from embodyrl.types import EnvSpec, Obs

MEDIAN_OF = 400
"""Observations, at most, by which inputs are normalised."""


class FoundFeatures(nn.Module):
    """Normalised proprioception, the instruction, and where the task leads.

    Pictures are read as the places of a ``Localiser``, also as seen from where the robot is now.
    Envs without pictures that have one task have one instruction, so it is left out.
    """

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.normalize_proprio = Normalizer(spec.proprio_dim)
        self.dim = spec.proprio_dim
        self.localiser: Localiser | None = None
        self.text: TextEncoder | None = None
        if spec.cameras:
            self.localiser = Localiser(spec)
            self.dim += TEXT_WIDTH + 2 * PLACES * spec.proprio_dim
        elif len(spec.tasks) > 1:
            self.text = TextEncoder(TEXT_WIDTH, 0, 1).requires_grad_(False)  # tells tasks apart
            self.dim += TEXT_WIDTH

    @torch.no_grad()
    def forward(self, obs: Obs) -> Float[Tensor, "b f"]:
        """The features of B observations."""
        parts = [self.normalize_proprio(obs.proprio)]
        if self.localiser is not None:
            parts.append(self.localiser.text(obs.instruction)[2])
            places = self.localiser(obs)
            parts += [places.flatten(1), (places - parts[0][:, None]).flatten(1)]
        if self.text is not None:
            parts.append(self.text(obs.instruction)[2])
        return torch.cat(parts, dim=-1)

    @property
    def fitted(self) -> bool:
        """Whether ``fit_inputs`` was called."""
        return self.normalize_proprio.fitted

    @torch.no_grad()
    def fit_inputs(self, obs: Obs) -> None:
        """Normalises what it sees, by many observations."""
        obs = obs[:: -(-len(obs) // MEDIAN_OF)]
        self.normalize_proprio.fit(obs.proprio)
        if self.localiser is not None:
            self.localiser.fit_inputs(obs)
