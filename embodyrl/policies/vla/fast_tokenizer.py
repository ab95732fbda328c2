"""FAST, the action tokenizer of pi0-FAST (arXiv:2501.09747), from its published files.

    chunk (C, A), normalised
        --discrete cosine transform of every dim along time (DCT-II, orthonormal)--> (C, A)
        --times scale, rounded--> whole numbers, row by row: low frequencies first
        --minus min_token, at least 0, as characters--> a text of C * A characters
        --byte-pair encoding (tokenizer.json)--> ids

The published folders differ in where their files are:

                                    processor_config.json    tokenizer.json, tokenizer_config.json
    physical-intelligence/fast      in the folder            in the folder
    lerobot/fast-action-tokenizer   in the folder            in its folder bpe_tokenizer

The folder's own code (``processing_action_tokenizer.py``) is not run. What is computed is the same:
tests compare both.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.storage.paths import require_readable
from embodyrl.storage.plain_data import ANYTHING, COUNT, FLAG, NUMBER, first_line
from embodyrl.storage.plain_data import read_json as read_plain

SETTINGS = {
    "scale": NUMBER,
    "min_token": NUMBER,
    "action_dim?": (COUNT, None),
    "time_horizon?": (COUNT, None),
    ...: ANYTHING,
}
"""Structure of processor_config.json."""
REMEDY = "Use another copy of the tokenizer."
BPE_FOLDER = "bpe_tokenizer"
HIGHEST = 0xD7FF
"""The largest character code before the surrogates, which no text may hold."""


class FastTokenizer:
    """See the module's docstring.

    Args:
        folder: with the published files.
        horizon: C.
        dims: A.

    Attributes:
        size: number of ids, from 0.

    Raises:
        UserError: a file is missing or damaged, or the tokenizer is one of other chunks.
    """

    def __init__(self, folder: Path, horizon: int, dims: int) -> None:
        try:
            import scipy.fft  # noqa: F401
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingDependencyError(
                f"pi0-FAST needs {error.name or 'scipy'}: pip install 'embodyrl[vla]'."
            ) from error
        place = folder / BPE_FOLDER
        if not place.is_dir():
            place = folder
        for file in (folder / "processor_config.json", place / "tokenizer.json"):
            require_readable(file)
            if not file.is_file():
                raise UserError(
                    f"{place} holds no {file.name}, so {folder} is no FAST tokenizer. Give the "
                    "folder of one in policy.action_tokenizer, for example a copy of "
                    "lerobot/fast-action-tokenizer."
                )
        # How coefficients become whole numbers.
        said = read_plain(folder / "processor_config.json", SETTINGS, REMEDY)
        self.scale = float(said["scale"])
        self.min_token = int(said["min_token"])
        self.horizon = horizon
        self.dims = dims
        if self.scale <= 0 or self.min_token != said["min_token"]:
            raise UserError(
                f"{folder / 'processor_config.json'} has scale {said['scale']} and min_token "
                f"{said['min_token']}; a positive number and a whole one are needed. {REMEDY}"
            )
        # A tokenizer that was fitted to chunks of one size may say so.
        for key, wanted, what in (
            ("time_horizon", horizon, "actions in a chunk"),
            ("action_dim", dims, "dims of an action"),
        ):
            if said.get(key) not in (None, wanted):
                raise UserError(
                    f"The FAST tokenizer {folder} was made for {said[key]} {what} ({key}), and this "
                    f"policy has {wanted}. Give another one in policy.action_tokenizer."
                )
        # The byte-pair encoding.
        _check_spaces(place)
        try:
            self._tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
        except Exception as error:  # the Rust library raises plain exceptions
            raise UserError(
                f"{place / 'tokenizer.json'} is damaged ({first_line(error)}). {REMEDY}"
            ) from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.size: int = self._tokenizer.get_vocab_size()

    def __deepcopy__(self, memo: dict[int, Any]) -> FastTokenizer:
        return self  # nothing of it changes

    def __call__(self, actions: Any) -> list[list[int]]:
        """The ids of normalised chunks (B, C, A), a list for each.

        It warns where the byte-pair encoding cannot write a chunk's text.
        """
        from scipy import fft

        # Coefficients as whole numbers, then as characters: those of the data begin at code 0.
        spectrum: Any = fft.dct(np.asarray(actions), axis=1, norm="ortho")
        numbers = np.around(spectrum * self.scale).reshape(len(actions), -1) - self.min_token
        codes = np.clip(numbers, 0, HIGHEST).astype(int)
        texts = ["".join(map(chr, row)) for row in codes]
        # A byte that the tokenizer has never seen is left out without a word: compare what comes back.
        found = [self._tokenizer.encode(text).ids for text in texts]
        lossy = [self._text(ids) != text for ids, text in zip(found, texts, strict=True)]
        if any(lossy) or bool((numbers > HIGHEST).any()):
            warnings.warn(
                "The FAST tokenizer cannot write some chunks: their coefficients are larger than "
                "in the data that it was made of, so other actions are imitated. Check the "
                "normalisation, or fit a tokenizer to these data.",
                stacklevel=2,
            )
        return found

    def decode(self, ids: Int[np.ndarray, " l"]) -> Float[np.ndarray, "c a"] | None:
        """The chunk that ids stand for; None if they stand for none.

        As in LeRobot, a text that is too short is filled up with coefficients of 0, of one that is
        too long the end is left out, and ids that the tokenizer does not have are passed over.
        None is returned where its library refuses the ids, which are then negative.
        """
        from scipy import fft

        if (ids < 0).any():
            return None
        # The characters of the ids are coefficients again.
        text = self._text(ids.tolist())
        coefficients = np.zeros(self.horizon * self.dims)
        numbers = np.array([ord(c) for c in text[: len(coefficients)]], dtype=float)
        coefficients[: len(numbers)] = numbers + self.min_token
        spectrum = coefficients.reshape(self.horizon, self.dims) / self.scale
        plan: Any = fft.idct(spectrum, axis=0, norm="ortho")
        return plan

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _check_spaces(folder: Path) -> None:
    """Refuses a tokenizer whose texts would be tidied up, as if they were prose.

    Raises:
        UserError: tokenizer_config.json asks for it.
    """
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return
    structure = {"clean_up_tokenization_spaces?": FLAG, ...: ANYTHING}
    if read_plain(file, structure, REMEDY).get("clean_up_tokenization_spaces", False):
        raise UserError(
            f"{file} has clean_up_tokenization_spaces, which changes coefficients. Set it to false."
        )
