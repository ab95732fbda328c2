"""What pretrained video transformers need to be a world model's backbone: actions for words, views side by side."""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from embodyrl.world_models.nets.diffusers_io import ConfigMixin, ModelMixin

TIMESTEPS = 1000.0
"""These networks count denoising time from 0 (data) to this (noise)."""


class VideoBackbone(ModelMixin, ConfigMixin):
    """Base class: the transformer ``wan``, and new beside it the tokens of the actions and a head for proprioception.

    The actions take the place of the sentence: each is a token that is attended to.
    """

    wan: Any

    def _attach(self, wan: Any, action_dim: int, horizon: int, proprio_dim: int) -> None:
        """Sets ``wan`` and makes what is new; the head starts at zero."""
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
        """Those whose matrices Muon trains."""
        return self.wan.blocks

    def tokens(
        self,
        actions: Float[Tensor, "b h a"],
        count: Int[Tensor, " b"],
        proprio: Float[Tensor, "b p"],
    ) -> tuple[Float[Tensor, "b h e"], Float[Tensor, "b h a1"]]:
        """What stands for the sentence, and the actions as it sees them: zeros where not executed, and a flag."""
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
        """The change of proprio that goes with one of the latent; ``taken`` as ``tokens`` says."""
        return self.to_proprio(
            torch.cat([change.mean((1, 3, 4)), taken.flatten(1), proprio], dim=1)
        )


def per_row(value: Float[Tensor, " b"]) -> Float[Tensor, "b 1 1 1 1"]:
    """One number a row, to be multiplied with (B, V, c, y, x)."""
    return value.view(-1, 1, 1, 1, 1)
