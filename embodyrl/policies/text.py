"""Instructions to token features, from word embeddings that come in a package (nothing is downloaded)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embodyrl.word_embeddings import load_words


class TextEncoder(nn.Module):
    """A small transformer over frozen 256-d word embeddings (wordllama, 32,000 word pieces, MIT licence).

    Every different sentence of a batch is encoded once, however many envs share it.
    """

    def __init__(self, width: int, layers: int, heads: int, max_tokens: int = 32) -> None:
        super().__init__()
        table, self._tokenizer = load_words()
        self.max_tokens = max_tokens
        # Not part of the checkpoint: 16 MB that the package holds already.
        self.register_buffer("table", table, persistent=False)
        self.project = nn.Linear(table.shape[1], width)
        self.position = nn.Parameter(torch.randn(max_tokens, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width,
            heads,
            2 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = (
            nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            if layers
            else nn.Identity()
        )
        self._ids: dict[str, list[int]] = {}

    def forward(
        self, sentences: list[str]
    ) -> tuple[Float[Tensor, "n l d"], Float[Tensor, "n l"], Float[Tensor, "n d"]]:
        """Encodes N sentences.

        Returns:
            Token features (N, L, d), a mask (N, L) that is 1 for real tokens, and their mean (N,
            d).
        """
        unique = {s: i for i, s in enumerate(dict.fromkeys(sentences))}
        rows = [self._tokenize(s) for s in unique]
        length = max(len(r) for r in rows)
        device = self.position.device
        ids = torch.tensor([r + [0] * (length - len(r)) for r in rows], device=device)
        mask = torch.tensor(
            [[1.0] * len(r) + [0.0] * (length - len(r)) for r in rows], device=device
        )
        table: Tensor = self.get_buffer("table")
        x = self.project(table[ids].to(self.position.dtype)) + self.position[:length]
        if isinstance(self.blocks, nn.TransformerEncoder):
            x = self.blocks(x, src_key_padding_mask=mask == 0)
        pooled = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        index = torch.tensor([unique[s] for s in sentences], device=device)
        return x[index], mask[index], pooled[index]

    def _tokenize(self, sentence: str) -> list[int]:
        if sentence not in self._ids:
            self._ids[sentence] = self._tokenizer.encode(sentence, add_special_tokens=False).ids[
                : self.max_tokens
            ] or [0]
        return self._ids[sentence]
