"""Masked discrete diffusion: a draft that is revealed by confidence, and edits of it.

A state is L tokens, of which some are ``MASKED``. Every step chooses places, one after the other,
and draws a token for each of them, all at once:

    step     chooses among      the likelier, the        then                          as in
    draft    masked places      more confident           draws their tokens            MaskGIT
    edit     all places         less confident           masks them, redraws them      ReflectDrive-2

    confidence of a masked place    max_v log p(v | state)
    confidence of a token           log p(token | state in which it was drawn)

(MaskGIT is arXiv:2202.04200, ReflectDrive-2 arXiv:2605.04647.) Places are drawn from a
Plackett-Luce distribution, as in DCoLT (arXiv:2505.10446): place i before the others with
probability exp(+-confidence_i / T) / sum_j exp(+-confidence_j / T), over those that are left. That
is MaskGIT's Gumbel noise, and T its choice temperature. So a path has an exact probability,

    log p(path) = sum_k [ log PL(places_k) + sum_{i in places_k} log p(token_i | state_k) ],

and its gradient teaches which tokens come first, and which are edited. MaskGIT ranks places by the
token that it drew for each, and throws most of these tokens away: the sum over them has no closed
form. So the confidence here is known before a token is drawn.

Shapes: N rows, K steps, L places, V tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embodyrl.errors import UserError

MASKED = -1
"""Stands in places that have no token yet; as a rank, in places that a step did not choose."""
NEVER = -1e9
"""Score of a place that cannot be chosen. It is finite, so that gradients are."""

Logits = Callable[[Int[Tensor, "n l"]], Float[Tensor, "n l v"]]
"""What the network says at every place of a state."""


@dataclass(frozen=True)
class MaskedSteps:
    """How a draft is revealed and edited; the ``policy.Steps`` of a masked path.

    Attributes:
        places: L.
        draft: steps of the draft; the number of places that stay masked follows a cosine.
        edits: steps of editing after it.
        edited: places that each of them draws again.
        temperature: T of the choice of places.
    """

    places: int
    draft: int
    edits: int = 0
    edited: int = 1
    temperature: float = 1.0
    kind: str = "masked"
    eta: float = 0.0

    def __post_init__(self) -> None:
        if self.draft > self.places or self.edited > self.places:
            raise UserError(
                f"A chunk has {self.places} tokens, so it cannot be drafted in {self.draft} steps "
                f"(policy.draft_steps) with edits of {self.edited} tokens (policy.edit_tokens). "
                "Each may be as large as the number of tokens."
            )

    @property
    def num_steps(self) -> int:
        """K."""
        return self.draft + self.edits

    @property
    def num_noisy(self) -> int:
        """All steps have a probability."""
        return self.num_steps

    @property
    def counts(self) -> list[int]:
        """How many places each step chooses."""
        counts = []
        masked = self.places
        for k in range(self.draft):
            # The cosine, but at least one place now, and one for each step to come.
            after = round(self.places * math.cos(math.pi / 2 * (k + 1) / self.draft))
            after = min(masked - 1, max(after, self.draft - k - 1))
            counts.append(masked - after)
            masked = after
        return counts + [self.edited] * self.edits


@dataclass
class MaskedPath:
    """A draft and its edits.

    Attributes:
        tokens: (N, K+1, L) the states, the first one masked everywhere.
        ranks: (N, K, L) the how-manieth choice of a step a place was, from 0; ``MASKED`` where it
            was not chosen.
    """

    tokens: Int[Tensor, "n k1 l"]
    ranks: Int[Tensor, "n k l"]


def draw_path(
    logits_of: Logits, steps: MaskedSteps, uniform: Float[Tensor, "n k 2 l"], noise_free: bool
) -> MaskedPath:
    """Draws a path.

    Args:
        logits_of: the network.
        steps: of the path.
        uniform: numbers in (0, 1), of the places and of the tokens.
        noise_free: take the most confident places and the most likely tokens instead.
    """
    # At first every place is masked.
    n, length = len(uniform), steps.places
    tokens = torch.full((n, length), MASKED, device=uniform.device)
    confidence = torch.zeros(n, length, device=uniform.device)
    states, ranks = [tokens], []
    for k, count in enumerate(steps.counts):
        editing = k >= steps.draft
        # Choose places. The largest of score + Gumbel noise follow Plackett and Luce.
        log_probs = None if editing else logits_of(tokens).log_softmax(-1)
        score = _score(log_probs, tokens, confidence, steps.temperature)
        if not noise_free:
            score = score - (-uniform[:, k, 0].log()).log()
        places = score.topk(count, dim=1).indices
        # Edited places are masked, and predicted from the rest.
        if log_probs is None:
            tokens = tokens.scatter(1, places, MASKED)
            log_probs = logits_of(tokens).log_softmax(-1)
        # Draw their tokens.
        drawn = draw_tokens(log_probs, None if noise_free else uniform[:, k, 1])
        own = log_probs.gather(-1, drawn[..., None])[..., 0].to(confidence.dtype)
        tokens = tokens.scatter(1, places, drawn.gather(1, places))
        confidence = confidence.scatter(1, places, own.gather(1, places))
        # Keep the state, and the order in which the places were chosen.
        states.append(tokens)
        order = torch.arange(count, device=places.device).expand(n, -1)
        ranks.append(torch.full_like(tokens, MASKED).scatter(1, places, order))
    return MaskedPath(torch.stack(states, dim=1), torch.stack(ranks, dim=1))


def score_path(
    logits_of: Logits, steps: MaskedSteps, path: MaskedPath
) -> tuple[Float[Tensor, "n k"], Float[Tensor, " n"]]:
    """The log-probability of every step, and the mean entropy of the tokens that were drawn."""
    n = len(path.tokens)
    confidence = torch.zeros(n, steps.places, device=path.tokens.device)
    logprobs = []
    entropies = []
    for k, count in enumerate(steps.counts):
        # The places in the order in which they were chosen.
        last = torch.where(path.ranks[:, k] == MASKED, steps.places, path.ranks[:, k])
        places = last.argsort(dim=1)[:, :count]
        # What the network said before the step, and how confident it was of each place.
        before = path.tokens[:, k]
        log_probs = logits_of(before.scatter(1, places, MASKED)).log_softmax(-1)
        score = _score(
            log_probs if k < steps.draft else None, before, confidence, steps.temperature
        )
        # Tokens, and the entropies of their distributions.
        token = path.tokens[:, k + 1].gather(1, places)
        at_places = log_probs.gather(1, places[..., None].expand(-1, -1, log_probs.shape[-1]))
        own = at_places.gather(-1, token.clamp_min(0)[..., None])[..., 0]
        # Both choices count: which places, and which tokens.
        logprobs.append(log_plackett_luce(score, places) + own.sum(1))
        entropies.append(-(at_places.exp() * at_places).sum(-1))
        confidence = confidence.scatter(1, places, own)
    return torch.stack(logprobs, dim=1), torch.cat(entropies, dim=1).mean(1)


def _score(
    log_probs: Tensor | None, tokens: Tensor, confidence: Tensor, temperature: float
) -> Tensor:
    """Log-weights (N, L) of the places: of masked ones by ``log_probs``, or of all for an edit."""
    if log_probs is None:
        return -confidence / temperature
    return (log_probs.amax(-1) / temperature).masked_fill(tokens != MASKED, NEVER)


def log_plackett_luce(
    score: Float[Tensor, "n l"], places: Int[Tensor, "n m"]
) -> Float[Tensor, " n"]:
    """The log-probability of choosing ``places``, in their order, without putting any back."""
    chosen = score.gather(1, places)
    rest = score.scatter(1, places, NEVER).logsumexp(1, keepdim=True)
    # What is left before each choice: the later choices, and what is never chosen.
    left = torch.cat([rest, chosen.flip(1)], dim=1).logcumsumexp(1)[:, 1:].flip(1)
    return (chosen - left).sum(1)


def draw_tokens(
    logits: Float[Tensor, "n l v"], uniform: Float[Tensor, "n l"] | None
) -> Int[Tensor, "n l"]:
    """Tokens by inverting the distribution function at ``uniform``; the most likely without it."""
    if uniform is None:
        return logits.argmax(-1)
    # In float64, because the sum over a vocabulary of 257,152 tokens would lose 1e-4 in float32.
    distribution = logits.double().softmax(-1).cumsum(-1)
    below = distribution < uniform[..., None] * distribution[..., -1:]
    return below.sum(-1).clamp_max(logits.shape[-1] - 1)


def masked_at_random(
    tokens: Int[Tensor, "n l"], known: Tensor, noise: Float[Tensor, "n l1"]
) -> tuple[Int[Tensor, "n l"], Tensor]:
    """Masks a random share of the tokens, for imitation.

    The share is cos(pi u / 2), for a uniform u, as in MaskGIT.

    Args:
        tokens: demonstrated ones.
        known: (N, L) bool, places that were demonstrated. All others are masked.
        noise: (N, 1 + L) uniform numbers: u, and one for each place.

    Returns:
        The tokens, and the places (N, L) whose tokens are to be told.
    """
    share = (math.pi / 2 * noise[:, :1]).cos()
    count = (share * known.sum(1, keepdim=True)).ceil().clamp_min(1)
    # Those known places that come first in a random order.
    rank = noise[:, 1:].masked_fill(~known, math.inf).argsort(1).argsort(1)
    asked = known & (rank < count)
    return tokens.masked_fill(asked | ~known, MASKED), asked
