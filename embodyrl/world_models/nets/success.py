"""``SuccessHead``: whether a latent frame shows the task solved; the cheapest reflector."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from embodyrl.world_models.nets.saved_network import SavedNetwork, record_arguments


class SuccessHead(SavedNetwork):
    """Two convolutions modulated by the instruction (FiLM), pooling over all cells, and an MLP.

    It is trained on latents of real and of imagined frames, so that it knows the model's mistakes.

    Args:
        num_views: V cameras.
        latent_channels: c.
        proprio_dim: P.
        word_dim: E, of the instruction's embedding.
        width: of its layers.
    """

    @record_arguments
    def __init__(
        self,
        num_views: int = 1,
        latent_channels: int = 16,
        proprio_dim: int = 7,
        word_dim: int = 256,
        width: int = 64,
    ) -> None:
        super().__init__()
        self.text = nn.Linear(word_dim, width)
        self.first = nn.Conv2d(latent_channels, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.film = nn.Linear(width, 2 * width)
        self.judge = nn.Sequential(
            nn.Linear(2 * num_views * width + proprio_dim, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def forward(
        self,
        latent: Float[Tensor, "b v c y x"],
        proprio: Float[Tensor, "b p"],
        words: Float[Tensor, "b e"],
    ) -> Float[Tensor, " b"]:
        """Logits."""
        views = latent.shape[1]
        # Every view is seen in the light of the instruction.
        film = self.film(F.silu(self.text(words))).repeat_interleave(views, 0)
        scale, shift = film[..., None, None].chunk(2, dim=1)
        x = F.silu(self.first(latent.flatten(0, 1)))
        x = F.silu(self.second(x) * (1 + scale) + shift)
        # Mean and maximum over the cells, of all views side by side.
        pooled = torch.cat([x.mean((2, 3)), x.amax((2, 3))], dim=1)
        pooled = pooled.unflatten(0, (-1, views)).flatten(1)
        return self.judge(torch.cat([pooled, proprio], dim=1))[:, 0]
