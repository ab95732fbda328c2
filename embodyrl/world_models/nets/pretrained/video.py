"""``VideoBackbone``: what a pretrained video transformer needs to be a world model's backbone."""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from embodyrl.world_models.nets.saved_network import SavedNetwork

TIMESTEPS = 1000.0
"""In these networks denoising time runs from 0 (data) to this (noise)."""


class VideoBackbone(SavedNetwork):
    """Base class: a pretrained transformer with new inputs for actions and a new head for proprio.

    The actions take the place of the sentence: each is a token that the transformer attends to.
    Several cameras lie side by side in one picture.
    """

    wan: Any

    def _attach(self, wan: Any, action_dim: int, horizon: int, proprio_dim: int) -> None:
        """Sets ``wan`` and makes the new layers; the head starts at zero."""
        self.wan = wan
        text = self.wan.config["text_dim"]
        channels = self.wan.config["in_channels"]
        self.to_tokens = nn.Linear(action_dim + 1 + proprio_dim, text)
        self.place = nn.Parameter(torch.randn(horizon, text) * 0.02)
        self.to_proprio = nn.Sequential(
            nn.Linear(channels + horizon * (action_dim + 1) + proprio_dim, 128),
            nn.SiLU(),
            nn.Linear(128, proprio_dim),
        )
        nn.init.zeros_(self.to_proprio[-1].weight)  # pyright: ignore[reportArgumentType]
        nn.init.zeros_(self.to_proprio[-1].bias)  # pyright: ignore[reportArgumentType]

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks whose matrices Muon trains."""
        return self.wan.blocks

    def tokens(
        self,
        actions: Float[Tensor, "b h a"],
        count: Int[Tensor, " b"],
        proprio: Float[Tensor, "b p"],
    ) -> tuple[Float[Tensor, "b h e"], Float[Tensor, "b h a1"]]:
        """The tokens in place of the sentence.

        Returns:
            (B, H, E) the tokens; and (B, H, A + 1) the actions as the network sees them: zeros
            where they are not executed, and a flag of whether they are.
        """
        executed = (torch.arange(actions.shape[1], device=actions.device) < count[:, None])[
            ..., None
        ].to(actions.dtype)
        taken = torch.cat([actions * executed, executed], dim=-1)
        tokens = self.to_tokens(
            torch.cat([taken, proprio[:, None].expand(-1, taken.shape[1], -1)], dim=-1)
        )
        return tokens + self.place, taken

    def moved(
        self, change: Float[Tensor, "b v c y x"], taken: Tensor, proprio: Tensor
    ) -> Float[Tensor, "b p"]:
        """The change of proprio that goes with a change of the latent.

        Args:
            change: of the latent.
            taken: the actions as the network sees them; see ``tokens``.
            proprio: before the chunk.
        """
        return self.to_proprio(
            torch.cat([change.mean((1, 3, 4)), taken.flatten(1), proprio], dim=1)
        )


def per_row(value: Float[Tensor, " b"]) -> Float[Tensor, "b 1 1 1 1"]:
    """One number per row, in a shape that multiplies (B, V, c, y, x)."""
    return value.view(-1, 1, 1, 1, 1)
