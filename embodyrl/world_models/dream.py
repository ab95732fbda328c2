"""``Dream``: where imagined episodes stand, and whether that can be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from embodyrl.types import TensorData


@dataclass
class Dream(TensorData):
    """Where N imagined episodes stand.

    Attributes:
        context: (N, 3, V, c, y, x) latents of the first, the previous and the current frame.
        proprio: (N, P) in the model's normalised units.
        words: (N, E) embedding of the instruction.
        body: (N, P + S) proprio and the simulator's state in the env's units; None without a state
            model.
        spread: (N,) how far the state model's nets differ about the last chunk
            (``StateModel.roll``); None as before, or where the body was given.
    """

    context: Tensor
    proprio: Tensor
    words: Tensor
    body: Tensor | None = None
    spread: Tensor | None = None

    @property
    def latent(self) -> Tensor:
        """(N, V, c, y, x) of the current frame."""
        return self.context[:, -1]

    def where(self, mask: Tensor, other: Dream) -> Dream:
        """These dreams, but those of ``other`` where ``mask`` (N,) is True."""

        def pick(mine: Tensor, theirs: Tensor) -> Tensor:
            return torch.where(mask.view(-1, *[1] * (mine.ndim - 1)), theirs, mine)

        body = None if self.body is None or other.body is None else pick(self.body, other.body)
        spread = (
            None if self.spread is None or other.spread is None else pick(self.spread, other.spread)
        )
        return Dream(
            pick(self.context, other.context),
            pick(self.proprio, other.proprio),
            self.words,
            body,
            spread,
        )


def disagreement(a: Dream, b: Dream) -> Float[Tensor, " n"]:
    """Mean square difference of two dreams' frames and proprio, in the model's units."""
    return (a.latent - b.latent).square().flatten(1).mean(1) + (
        a.proprio - b.proprio
    ).square().mean(1)


def plausible(dream: Dream, limit: float = 12.0) -> Tensor:
    """(N,) bool: finite, and within so many standard deviations of what the codec gives for real frames."""
    latent = dream.latent.flatten(1)
    return (
        torch.isfinite(latent).all(1)
        & (latent.abs().amax(1) < limit)
        & torch.isfinite(dream.proprio).all(1)
    )
