"""How a policy of action bins says its tokens: in which order, and what a token sees.

    decoding          a token sees                        passes         as in
    parallel          the observation                     1              OpenVLA-OFT
    autoregressive    it, and all tokens before           L              RT-2, OpenVLA
    masked            it, and all revealed tokens         draft_steps    MaskGIT, ReflectDrive-2
                                                          + edit_steps

(RT-2 is arXiv:2307.15818, OpenVLA 2406.09246, OpenVLA-OFT 2502.19645; for ``masked`` see
``functional.masked_diffusion``.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from embodyrl.errors import refuse_unread
from embodyrl.functional.masked_diffusion import MASKED, MaskedSteps
from embodyrl.policies.chooser import ChooserConfig, check_chooser
from embodyrl.policies.flow_checks import check_executed
from embodyrl.policies.vla.token_base import TokenTransition
from embodyrl.ranges import Count, CountOrZero, Positive

DECODING = ("parallel", "autoregressive", "masked")
MASKED_SETTINGS = ("draft_steps", "edit_steps", "edit_tokens", "order_temperature")


@dataclass(frozen=True)
class DecodingConfig(ChooserConfig):
    """Steps of masked tokens.

    Attributes:
        draft_steps: of ``decoding=masked``: steps in which all tokens are revealed.
        edit_steps: steps after them that draw the least confident tokens again; 0 for none.
        edit_tokens: how many tokens each of these draws again.
        order_temperature: how random the choice of those places is when training; evaluation takes
            the most confident (or, to edit, the least confident) ones.
    """

    draft_steps: Count = 4
    edit_steps: CountOrZero = 0
    edit_tokens: Count = 4
    order_temperature: Positive = 0.5


def check_decoding(config: Any) -> None:
    """Refuses settings that nothing would read, and what ``check_chooser`` and others refuse.

    Raises:
        UserError: naming them.
    """
    check_chooser(config)
    check_executed(config)
    if config.decoding != "masked":
        why = f"decoding={config.decoding} reveals no masked tokens"
        refuse_unread(config, "policy", MASKED_SETTINGS, why)
    elif not config.edit_steps:
        refuse_unread(config, "policy", ("edit_tokens",), "edit_steps=0 edits nothing")


def make_steps(config: Any, places: int) -> TokenTransition | MaskedSteps:
    """The steps in which a plan of so many tokens is drawn."""
    if config.decoding != "masked":
        return TokenTransition()
    c = config
    return MaskedSteps(places, c.draft_steps, c.edit_steps, c.edit_tokens, c.order_temperature)


def token_embedding(config: Any, width: int) -> nn.Embedding | None:
    """Embeds the token that a place sees; one more number stands for a masked one.

    It starts as small as the queries of the places, so that it does not hide the observation.
    """
    if config.decoding == "parallel":
        return None
    word = nn.Embedding(config.bins + (config.decoding == "masked"), width)
    nn.init.normal_(word.weight, std=0.02)
    return word


def inputs_at_places(
    query: Float[Tensor, "c w"], word: nn.Embedding | None, tokens: Int[Tensor, "n l"], masked: bool
) -> Float[Tensor, "n l w"]:
    """The network's input at the first L places of a plan.

    Args:
        query: learned, for each place.
        word: embedding of the token that a place sees; None where it sees none.
        tokens: of the plan.
        masked: a place sees its own token, or that it is masked; otherwise the token before it.
    """
    inputs = query[: tokens.shape[1]].expand(len(tokens), -1, -1)
    if word is None:
        return inputs
    if masked:
        return inputs + word(tokens.masked_fill(tokens == MASKED, word.num_embeddings - 1))
    # Shifted by one place; the first token has none before it.
    return inputs + F.pad(word(tokens)[:, :-1], (0, 0, 1, 0))
