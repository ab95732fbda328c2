"""``Chooser``: critics that choose among the chunks that a policy proposes.

Best-of-N sampling: the policy proposes N chunks, the critics take the best. Nothing is
differentiated through the policy, so any policy that can be sampled will do. PA-RL
(arXiv:2412.06685) trains the critics and imitates what they chose.

    obs --ChooserEncoder--> features (B, F) --+
    proposals (B, N, H, A) -------------------+--> Critics --mean of E--> values (B, N)

The critics' encoder sees what a real robot sees: proprioception, pictures and the instruction, but no
state of a simulator. Hindsight trains it (``policies.localiser``), the critics' loss does not. So
features are computed once for each observation, and a gradient step of the critics is cheap.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embodyrl.policies.critics import Critics
from embodyrl.policies.localiser import ENDS, TEXT_WIDTH, Localiser
from embodyrl.policies.normalize import Normalizer
from embodyrl.policies.text import TextEncoder
from embodyrl.types import EnvSpec, Obs


class ChooserEncoder(nn.Module):
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
            self.dim += TEXT_WIDTH + 2 * ENDS * spec.proprio_dim
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

    @torch.no_grad()
    def fit_inputs(self, obs: Obs) -> None:
        """Normalises what it sees, by many observations."""
        self.normalize_proprio.fit(obs.proprio)
        if self.localiser is not None:
            self.localiser.fit_inputs(obs)


class Chooser(nn.Module):
    """An encoder and E critics of (observation, action chunk); see the module.

    Args:
        spec: of the env.
        horizon: H.
        width: of the critics' hidden layers.
        count: E.
        layers: hidden layers.

    Attributes:
        ready: bool scalar, whether the critics have learned enough to choose.
    """

    ready: Tensor

    def __init__(
        self, spec: EnvSpec, horizon: int, width: int, count: int = 2, layers: int = 2
    ) -> None:
        super().__init__()
        self.encoder = ChooserEncoder(spec)
        self.register_buffer("ready", torch.tensor(False))
        # LayerNorm bounds the values of chunks that nobody tried.
        size = horizon * spec.action_dim
        self.critics = Critics(self.encoder.dim, size, count, width, layers, "layer")

    @torch.no_grad()
    def values_of(
        self, features: Float[Tensor, "b f"], proposals: Float[Tensor, "b n h a"]
    ) -> Float[Tensor, "b n"]:
        """The mean of the critics for N proposals at each of B observations."""
        # Each observation's features once for each of its proposals.
        b, n = proposals.shape[:2]
        features = features[:, None].expand(b, n, -1).flatten(0, 1)
        return self.critics(features, proposals.flatten(0, 1)).mean(0).view(b, n)

    def best_of(
        self, features: Float[Tensor, "b f"], proposals: Float[Tensor, "b n h a"]
    ) -> Float[Tensor, "b h a"]:
        """The proposal with the largest value."""
        index = self.values_of(features, proposals).argmax(1)
        return proposals[torch.arange(len(index), device=index.device), index]

    def best(self, obs: Obs, proposals: Float[Tensor, "b n h a"]) -> Float[Tensor, "b h a"]:
        """The same from the observations themselves."""
        return self.best_of(self.encoder(obs), proposals)
