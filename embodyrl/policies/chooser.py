"""``Chooser``: critics that choose among the chunks that a policy proposes.

Best-of-N sampling: the policy proposes N chunks, the critics take the best. Nothing is
differentiated through the policy, so any policy that can be sampled will do. PA-RL
(arXiv:2412.06685) trains the critics and imitates what they chose.

    obs --ChooserEncoder--> features (B, F) --+
    proposals (B, N, H, A) -------------------+--> Critics --mean of E--> values (B, N)

The critics have an encoder of their own. They see what a real robot sees: proprioception, pictures
and the instruction, but no state of a simulator.
"""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embodyrl.policies.critics import Critics
from embodyrl.policies.normalize import Normalizer
from embodyrl.policies.text import TextEncoder
from embodyrl.policies.vision import FilmCNN
from embodyrl.types import EnvSpec, Obs

TEXT_WIDTH = 64
VISION_WIDTH = 32


class ChooserEncoder(nn.Module):
    """Normalised proprioception, keypoints of each camera, and a summary of the instruction.

    Envs with one task have one instruction, so it is left out where there are no pictures either.
    """

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.cameras = tuple(spec.cameras)
        self.normalize_proprio = Normalizer(spec.proprio_dim)
        self.dim = spec.proprio_dim
        self.reads_text = bool(self.cameras) or len(spec.tasks) > 1
        if self.reads_text:
            self.text = TextEncoder(TEXT_WIDTH, 0, 1)
            self.dim += TEXT_WIDTH
        self.vision = nn.ModuleDict(
            {name: FilmCNN(VISION_WIDTH, 1, text_dim=TEXT_WIDTH) for name in self.cameras}
        )
        self.dim += 2 * VISION_WIDTH * len(self.cameras)

    def forward(self, obs: Obs) -> Float[Tensor, "b f"]:
        """The features of B observations."""
        parts = [self.normalize_proprio(obs.proprio)]
        if self.reads_text:
            text = self.text(obs.instruction)[2]
            parts.append(text)
            parts += [self.vision[name](obs.images[name], text)[1] for name in self.cameras]
        return torch.cat(parts, dim=-1)


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

    def forward(self, obs: Obs, chunks: Float[Tensor, "b h a"]) -> Float[Tensor, "e b"]:
        """The value of each chunk by each critic."""
        return self.critics(self.encoder(obs), chunks)

    @torch.no_grad()
    def values(self, obs: Obs, proposals: Float[Tensor, "b n h a"]) -> Float[Tensor, "b n"]:
        """The mean of the critics for N proposals of each observation, which is encoded once."""
        features = self.encoder(obs)
        b, n = proposals.shape[:2]
        features = features[:, None].expand(b, n, -1).flatten(0, 1)
        return self.critics(features, proposals.flatten(0, 1)).mean(0).view(b, n)

    def best(self, obs: Obs, proposals: Float[Tensor, "b n h a"]) -> Float[Tensor, "b h a"]:
        """The proposal with the largest value."""
        index = self.values(obs, proposals).argmax(1)
        return proposals[torch.arange(len(index), device=index.device), index]

    def make_target(self) -> Chooser:
        """A copy that learns by ``follow`` alone."""
        return copy.deepcopy(self).requires_grad_(False)

    @torch.no_grad()
    def follow(self, other: Chooser, tau: float) -> None:
        """Moves these weights towards those of ``other`` by the share ``tau``."""
        for mine, theirs in zip(self.parameters(), other.parameters(), strict=True):
            mine.lerp_(theirs, tau)
