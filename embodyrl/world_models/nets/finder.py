"""``Finder``: where the task leads, seen in pictures: a state for data that hold none.

    pictures, proprio, instruction --Localiser--> the robot's numbers at the end (B, J * P)

It is the module that critics see by (``policies.localiser``), taught by hindsight: in an episode
that was solved, the robot itself was there. The places stand in the state model where a
simulator's state would. They lie where the robot ends, whatever it does, so a dream leaves them as
they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from embodyrl.policies.localiser import ENDS, Localiser
from embodyrl.types import EnvSpec, Obs
from embodyrl.world_models.nets.saved_network import SavedNetwork, record_arguments

PLACES = ENDS
"""J: the places at the end; those on the way there move with the robot, and are not found."""


class Finder(SavedNetwork):
    """A localiser in the units of proprioception.

    Args:
        proprio_dim: P.
        cameras: camera -> (height, width).
    """

    @record_arguments
    def __init__(self, proprio_dim: int, cameras: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        sizes = {name: (int(size[0]), int(size[1])) for name, size in cameras.items()}
        self.localiser = Localiser(EnvSpec("", 1, 0, proprio_dim, "", 0.0, 0, sizes))

    @torch.no_grad()
    def forward(self, obs: Obs) -> Float[Tensor, "b s"]:
        """The J places, the last one first."""
        places = self.localiser(obs)[:, :PLACES]
        return self.localiser.normalize_proprio.inverse(places).flatten(1)
