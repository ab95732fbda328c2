"""The prompts of OpenVLA as token ids, by the tokenizer that comes with a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.storage.paths import require_readable
from embodyrl.storage.plain_data import first_line

REMEDY = "Use another copy of the checkpoint."
"""End of a message about a damaged file."""


class PromptTokenizer:
    r"""Token ids of "In: What action should the robot take to INSTRUCTION?\nOut:".

    Args:
        folder: of the checkpoint.

    Attributes:
        space: id of the token that follows the prompt: a lone space, 29871 in Llama 2.

    Raises:
        UserError: there is no tokenizer.json, it is damaged, or it has no token of a space.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingDependencyError(
                "OpenVLA needs transformers: pip install 'embodyrl[vla]'."
            ) from error
        file = folder / "tokenizer.json"
        require_readable(file)
        if not file.is_file():
            raise UserError(
                f"{folder} holds no tokenizer.json. Copy it from openvla/openvla-7b, whose tokenizer "
                "all fine-tuned models share."
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust library raises plain exceptions
            raise UserError(f"{file} is damaged ({first_line(error)}). {REMEDY}") from error
        self._file = file
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.space = self.id_of("\u2581")
        self._ids: dict[str, list[int]] = {}

    def id_of(self, token: str) -> int:
        """The id of one token.

        Raises:
            UserError: there is no such token.
        """
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise UserError(f"{self._file} has no token {token!r}, so it is not Llama's. {REMEDY}")
        return found

    def __call__(self, sentences: list[str], pad: int) -> tuple[Tensor, Tensor]:
        """Ids (N, L) of N prompts without the final space, and their mask, padded at the end."""
        rows = [self._prompt(sentence) for sentence in sentences]
        length = max(map(len, rows))
        ids = torch.tensor([row + [pad] * (length - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
        return ids, mask

    def _prompt(self, sentence: str) -> list[int]:
        if sentence not in self._ids:
            text = f"In: What action should the robot take to {sentence.lower()}?\nOut:"
            ids = self._tokenizer.encode(text).ids
            # The space is given apart, as the input of the first action's token.
            self._ids[sentence] = ids[:-1] if ids[-1] == self.space else ids
        return self._ids[sentence]
