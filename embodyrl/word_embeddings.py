"""Frozen word embeddings that come with a package, so that nothing need be downloaded."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodyrl.errors import MissingDependencyError


@cache
def load_word_embeddings() -> tuple[Tensor, Any]:
    """Embeddings of 32,000 word pieces (wordllama, MIT licence), read once by each process.

    Returns:
        The table (32000, 256), which nobody may write to, and its ``tokenizers.Tokenizer``.

    Raises:
        MissingDependencyError: wordllama is not installed.
    """
    found = importlib.util.find_spec("wordllama")
    if found is None or found.origin is None:
        raise MissingDependencyError(
            "The word embeddings of the instruction encoder are not installed. Run: pip install "
            "wordllama"
        )
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    folder = Path(found.origin).parent
    weights = load_file(folder / "weights" / "l2_supercat_256.safetensors")["embedding.weight"]
    tokenizer = Tokenizer.from_file(
        str(folder / "tokenizers" / "l2_supercat_tokenizer_config.json")
    )
    return weights, tokenizer


def embed_sentences(sentences: list[str]) -> Tensor:
    """(N, 256): the mean embedding of each sentence's word pieces."""
    table, tokenizer = load_word_embeddings()
    pieces = [tokenizer.encode(s, add_special_tokens=False).ids or [0] for s in sentences]
    return torch.stack([table[torch.tensor(ids)].float().mean(0) for ids in pieces])
