"""``Dream``: the current moment of imagined episodes; and what a prediction depends on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from embodyrl.types import TensorData


@dataclass
class Dream(TensorData):
    """The current moment of N imagined episodes.

    Attributes:
        context: (N, 3, V, c, y, x) latents of the first, the previous and the current frame.
        proprio: (N, P) in the model's normalised units.
        words: (N, E) embedding of the instruction.
        full_state: (N, P + S) proprio, then the simulator's state, in the env's units; None
            without a state model.
        spread: (N,) how far the state model's networks differ about the last chunk
            (``StateModel.roll``); None without a state model, or where the full state was given.
    """

    context: Tensor
    proprio: Tensor
    words: Tensor
    full_state: Tensor | None = None
    spread: Tensor | None = None

    @property
    def latent(self) -> Tensor:
        """(N, V, c, y, x) of the current frame."""
        return self.context[:, -1]

    def where(self, mask: Tensor, other: Dream) -> Dream:
        """These dreams, but those of ``other`` where ``mask`` (N,) is True."""

        def pick(mine: Tensor, theirs: Tensor) -> Tensor:
            return torch.where(mask.view(-1, *[1] * (mine.ndim - 1)), theirs, mine)

        def pick_optional(mine: Tensor | None, theirs: Tensor | None) -> Tensor | None:
            return None if mine is None or theirs is None else pick(mine, theirs)

        return Dream(
            context=pick(self.context, other.context),
            proprio=pick(self.proprio, other.proprio),
            words=self.words,
            full_state=pick_optional(self.full_state, other.full_state),
            spread=pick_optional(self.spread, other.spread),
        )


@dataclass(frozen=True)
class ChunkInputs:
    """What the prediction of one chunk depends on.

    Attributes:
        dream: the moment before the chunk.
        actions: (N, H, A).
        count: (N,) how many of the actions are executed, 1 to H.
        noise: (N,) level of the noise on the context.
        full_state: (N, P + S) after the chunk, where it is known.
    """

    dream: Dream
    actions: Tensor
    count: Tensor
    noise: Tensor
    full_state: Tensor | None

    @property
    def of_backbone(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The first arguments of every backbone."""
        dream = self.dream
        return dream.context, dream.proprio, self.actions, self.count, self.noise


def disagreement(a: Dream, b: Dream) -> Float[Tensor, " n"]:
    """Mean square difference of two dreams: of their latents plus of their proprio, normalised."""
    latent = (a.latent - b.latent).square().flatten(1).mean(1)
    proprio = (a.proprio - b.proprio).square().mean(1)
    return latent + proprio


def plausible(dream: Dream, limit: float = 12.0) -> Bool[Tensor, " n"]:
    """Whether a dream is finite and its latent looks like one of a real frame.

    Args:
        dream: N dreams.
        limit: in standard deviations of the latents of real frames.
    """
    latent = dream.latent.flatten(1)
    return (
        torch.isfinite(latent).all(1)
        & (latent.abs().amax(1) < limit)
        & torch.isfinite(dream.proprio).all(1)
    )
