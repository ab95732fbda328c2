"""``InverseDynamics``: which actions lead from one picture to another.

Two checks of a dream are built on it:

- ``error``: do the pictures show the commanded actions? If not, the dream cannot be trusted,
  whatever it says of success. Without the simulator's state this is the only such check.
- ``executable``: could a robot have done what the pictures show at all (EVA's executability)? This
  needs no commanded actions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from embodyrl.world_models.nets.saved_network import SavedNetwork, record_arguments

RARE = 0.999
"""Quantile of held-out moves, in every action dim, up to which a move counts as usual."""
SLACK = 1.5
"""How many times larger than that quantile a move may be."""


class InverseDynamics(SavedNetwork):
    """Two latent frames and the time between them -> the mean of the actions in between.

    Args:
        num_views: V cameras.
        latent_channels: c.
        rows: y cells.
        columns: x cells.
        action_dim: A.
        width: of its layers.
    """

    scale: Tensor
    reach: Tensor
    jump: Tensor

    @record_arguments
    def __init__(
        self,
        num_views: int = 1,
        latent_channels: int = 16,
        rows: int = 8,
        columns: int = 8,
        action_dim: int = 4,
        width: int = 64,
    ) -> None:
        super().__init__()
        self.cells = nn.Sequential(
            nn.Conv2d(2 * latent_channels, width, 3, padding=1), nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.SiLU(),
            nn.Conv2d(width, width // 4, 1), nn.SiLU(),
        )  # fmt: skip
        seen = num_views * (width // 4) * rows * columns
        self.head = nn.Sequential(
            nn.Linear(seen + 1, 4 * width), nn.SiLU(), nn.Linear(4 * width, action_dim)
        )
        self.register_buffer("scale", torch.ones(action_dim))
        self.register_buffer("reach", torch.full((action_dim,), torch.inf))
        self.register_buffer("jump", torch.full((action_dim,), torch.inf))

    def forward(
        self,
        before: Float[Tensor, "b v c y x"],
        after: Float[Tensor, "b v c y x"],
        share: Float[Tensor, " b"],
    ) -> Float[Tensor, "b a"]:
        """The mean action.

        Args:
            before: latents of the first frame.
            after: latents of the second frame.
            share: number of actions in between, as a share of a whole chunk.
        """
        x = torch.cat([before, after - before], dim=2)
        x = self.cells(x.flatten(0, 1)).unflatten(0, before.shape[:2])
        return self.head(torch.cat([x.flatten(1), share[:, None]], dim=1))

    def loss(
        self, before: Tensor, after: Tensor, actions: Float[Tensor, "b h a"], count: Tensor
    ) -> Tensor:
        """Mean squared error; all dims count alike."""
        inferred = self(before, after, count / actions.shape[1]).float()
        return F.mse_loss(inferred, mean_action(actions, count))

    def error(
        self, before: Tensor, after: Tensor, actions: Float[Tensor, "b h a"], count: Tensor
    ) -> Float[Tensor, " b"]:
        """How far pictures are from showing the commanded actions; 1 is usual for real pictures.

        It is a root mean square over the action dims, each in units of its own usual error. So a
        dim that pictures do not show counts little.
        """
        inferred = self(before, after, count / actions.shape[1]).float()
        return ((inferred - mean_action(actions, count)) / self.scale).square().mean(-1).sqrt()

    @torch.no_grad()
    def fit_limits(
        self,
        before: Tensor,
        after: Tensor,
        actions: Float[Tensor, "b h a"],
        count: Tensor,
        follows: Bool[Tensor, " b"],
    ) -> None:
        """Fits what is usual of real moves: the error, and how large and how abrupt they look.

        Args:
            before: (B, V, c, y, x) latents of held-out frames, episode after episode.
            after: those a chunk later.
            actions: in between.
            count: how many of them were executed.
            follows: whether a move follows the one in the row before it.
        """
        inferred = self(before, after, count / actions.shape[1]).float()
        self.scale.copy_(
            (inferred - mean_action(actions, count)).square().mean(0).sqrt().clamp_min(1e-3)
        )
        self.reach.copy_(inferred.abs().quantile(RARE, dim=0))
        if follows[1:].any():
            jumps = (inferred[1:] - inferred[:-1])[follows[1:]]
            self.jump.copy_(jumps.abs().quantile(RARE, dim=0))

    def executable(
        self, moves: Float[Tensor, "n t a"], moving: Bool[Tensor, "n t"]
    ) -> Bool[Tensor, "n t"]:
        """Whether each move is neither too large nor too abrupt for the robot.

        The limit is ``SLACK`` times what is usual of real moves.

        Args:
            moves: inferred mean actions, in order.
            moving: False where there is no move; the one after it cannot be abrupt.
        """
        small = (moves.abs() <= SLACK * self.reach).all(-1)
        smooth = torch.ones_like(small)
        jumps = (moves[:, 1:] - moves[:, :-1]).abs()
        smooth[:, 1:] = (jumps <= SLACK * self.jump).all(-1) | ~moving[:, :-1]
        return small & smooth


def mean_action(actions: Float[Tensor, "b h a"], count: Tensor) -> Float[Tensor, "b a"]:
    """The mean of the first ``count`` actions of each chunk."""
    executed = torch.arange(actions.shape[1], device=actions.device) < count[:, None]
    return (actions * executed[..., None]).sum(1) / count[:, None]
