"""The tokens in which pi0-FAST says a plan: FAST ids written in PaliGemma's vocabulary.

    start | "Action: " | FAST ids, id i as token V - 1 - skip - i | "|" | end of text

V is the number of PaliGemma's tokens. The last ``fast_skip_tokens`` of them, PaliGemma's tokens of
image regions, stay what they are. The network predicts everything behind the start.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.policies.vla.fast_tokenizer import FastTokenizer
from embodyrl.policies.vla.token_base import NO_TOKEN
from embodyrl.storage.pretrained import explain_hub_errors, find_checkpoint

PREFIX = "Action: "
END = "|"
STEP = "action_tokenizer_processor"
"""LeRobot's registry name of the step of the pre-processor that turns actions into tokens."""


class FastWords:
    """See the module's docstring.

    Args:
        text: PaliGemma's tokenizer, which ends a text with the end of text.
        fast: the FAST tokenizer.
        config: LeRobot's, of a pi0-FAST.

    Attributes:
        start: token of the start of text.
        end: token "|", which ends a chunk.

    Raises:
        UserError: the vocabulary lacks one of these tokens, or it is too small.
    """

    def __init__(self, text: Any, fast: FastTokenizer, config: Any) -> None:
        name = config.text_tokenizer_name
        self._fast = fast
        self._config = config
        # The tokens around a plan.
        self.start: int = text.bos_token_id
        self._prefix: list[int] = text.encode(PREFIX, add_special_tokens=False)
        self._tail: list[int] = text.encode(END)
        self.end: int = text.convert_tokens_to_ids(END)
        heads = text.convert_ids_to_tokens(self._prefix[:2])
        if self.start is None or self._tail[:1] != [self.end] or heads != ["Action", ":"]:
            raise UserError(
                f"The tokenizer {name} has no start of text, or it does not write {PREFIX!r} and "
                f"{END!r} in tokens of PaliGemma. Give a copy of google/paligemma-3b-pt-224's in "
                "policy.vlm."
            )
        # The token of FAST id 0; ids run backwards from it.
        self._first: int = text.vocab_size - 1 - config.fast_skip_tokens
        if fast.size - 1 > self._first:
            raise UserError(
                f"The tokenizer {name} has {text.vocab_size} tokens. The FAST tokenizer "
                f"{config.action_tokenizer_name} needs {fast.size} of them besides the "
                f"{config.fast_skip_tokens} that stay (fast_skip_tokens). Give PaliGemma's in "
                "policy.vlm, or a smaller FAST tokenizer in policy.action_tokenizer."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> FastWords:
        return self  # nothing of it changes

    def check_rows(self, rows: int) -> None:
        """Refuses a network that has no row for one of the tokens.

        Args:
            rows: of its embedding.

        Raises:
            UserError: naming both numbers.
        """
        highest = max(self.start, self._first, *self._prefix, *self._tail)
        if highest >= rows:
            raise UserError(
                f"The network has {rows} tokens, and the tokenizer "
                f"{self._config.text_tokenizer_name} numbers them to {highest} and more. Give the "
                "tokenizer that the checkpoint was trained with in policy.vlm."
            )

    def encode(self, actions: Float[Tensor, "b c a"]) -> Int[Tensor, "b l"]:
        """The tokens behind the start of normalised plans; ``NO_TOKEN`` behind their ends.

        As in LeRobot, what goes beyond ``max_action_tokens`` (with the start) is left out.
        """
        rows = [
            [*self._prefix, *(self._first - i for i in ids), *self._tail]
            for ids in self._fast(actions.detach().cpu().numpy())
        ]
        most = min(max(map(len, rows)), self._config.max_action_tokens - 1)
        tokens = torch.full((len(rows), most), NO_TOKEN)
        for row, ids in zip(tokens, rows, strict=True):
            row[: len(ids)] = torch.tensor(ids[:most])
        return tokens

    def decode(self, tokens: Int[np.ndarray, " l"]) -> Float[np.ndarray, "c a"] | None:
        """The normalised plan that drawn tokens stand for; None if they stand for none.

        LeRobot stops with an AssertionError at tokens that do not begin with "Action:"
        (``validate_action_token_prefix``); here they stand for no plan.
        """
        # What was said, up to the end.
        said = [int(token) for token in tokens if token != NO_TOKEN]
        if self._config.validate_action_token_prefix and said[:2] != self._prefix[:2]:
            return None
        if self.end in said:
            said = said[: said.index(self.end)]
        # The prefix is left out wherever it stands.
        length = len(self._prefix)
        place = 0
        while place <= len(said) - length:
            if said[place : place + length] == self._prefix:
                del said[place : place + length]
            else:
                place += 1
        return self._fast.decode(self._first - np.array(said, dtype=np.int64))

    @property
    def overrides(self) -> dict[str, Any]:
        """Arguments of LeRobot's step with which it does not load, and run, a FAST folder's code."""
        return {
            STEP: {
                "action_tokenizer_input_object": self._fast,
                "paligemma_tokenizer_name": self._config.text_tokenizer_name,
                "fast_skip_tokens": self._config.fast_skip_tokens,
                "trust_remote_code": False,
            }
        }

    def give_back(self, pre: Any) -> None:
        """Lets LeRobot's step be saved as LeRobot reads it, with the names of both tokenizers."""
        # LeRobot's step names its tokenizers only if it was not given one.
        (step,) = (s for s in pre.steps if getattr(type(s), "_registry_name", "") == STEP)
        step.action_tokenizer_input_object = None
        step.action_tokenizer_name = self._config.action_tokenizer_name
        step.trust_remote_code = True
        step.__class__ = _with_all_settings(type(step))


@functools.cache
def _with_all_settings(step: Any) -> Any:
    """A subclass of LeRobot's step that also saves the settings which LeRobot 0.6.1 forgets."""

    class WithAllSettings(step):
        def get_config(self) -> dict[str, Any]:
            return {
                **super().get_config(),
                "fast_skip_tokens": self.fast_skip_tokens,
                "paligemma_tokenizer_name": self.paligemma_tokenizer_name,
            }

    return WithAllSettings


def load_fast_words(c: Any, config: Any, dims: int) -> FastWords:
    """Both tokenizers of a checkpoint. What they are called is written into LeRobot's config.

    Args:
        c: the policy's config, whose ``vlm`` and ``action_tokenizer`` replace the checkpoint's.
        config: LeRobot's.
        dims: A.

    Raises:
        UserError: one of them cannot be found or used.
    """
    from transformers import AutoTokenizer

    # An export then names the tokenizers that were used.
    config.text_tokenizer_name = c.vlm or config.text_tokenizer_name
    config.action_tokenizer_name = c.action_tokenizer or config.action_tokenizer_name
    folder = find_checkpoint(
        config.action_tokenizer_name, weights=False, setting="policy.action_tokenizer"
    )
    fast = FastTokenizer(folder, config.chunk_size, dims)
    # As LeRobot loads it: "|" is followed by the end of text.
    with explain_hub_errors(config.text_tokenizer_name):
        text = AutoTokenizer.from_pretrained(
            config.text_tokenizer_name, add_eos_token=True, add_bos_token=False
        )
    return FastWords(text, fast, config)
