"""``Discriminator``: does a transition look like a real one? The dynamics reward of MOREC.

The state model's networks predict different next states. Which of them is right cannot be seen
before it has happened. But some of them are such as never happens, and that can be learned from
real transitions and the networks' own predictions (MOREC, arXiv:2310.05422; GAIL,
arXiv:1606.03476).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from embodyrl.world_models.nets.saved_network import SavedNetwork, record_arguments
from embodyrl.world_models.nets.state import residual_mlp


class Discriminator(SavedNetwork):
    """A transition -> the logit that it is real, and no network's prediction.

    Args:
        body_dim: D, of the full state.
        action_dim: A.
        width: of the network.
        layers: its hidden layers.
    """

    @record_arguments
    def __init__(self, body_dim: int, action_dim: int, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.net = residual_mlp(2 * body_dim + action_dim, 1, width, layers)

    def forward(self, transition: Float[Tensor, "*b f"]) -> Float[Tensor, "*b"]:
        """The logits of transitions, as ``StateModel.transition`` describes them."""
        with torch.autocast(transition.device.type, enabled=False):
            return self.net(transition)[..., 0]
