"""Encodes instructions, on word embeddings that come with a package (nothing is downloaded)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from embodyrl.word_embeddings import load_word_embeddings


class TextEncoder(nn.Module):
    """A small transformer over frozen word embeddings.

    The embeddings are 256-d, for 32,000 word pieces (wordllama, MIT licence). A sentence that
    several envs share is encoded once per batch.

    Args:
        width: of the token features.
        layers: of the transformer; 0 for none.
        heads: attention heads.
        max_tokens: longer sentences are cut.
    """

    def __init__(self, width: int, layers: int, heads: int, max_tokens: int = 32) -> None:
        super().__init__()
        table, self._tokenizer = load_word_embeddings()
        self.max_tokens = max_tokens
        # The table is not saved in checkpoints: it is 16 MB that the package already holds.
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
        self.blocks: nn.Module = nn.Identity()
        if layers:
            self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self._ids: dict[str, list[int]] = {}  # token ids of the sentences seen so far

    def forward(
        self, sentences: list[str] | Int[Tensor, "n l"]
    ) -> tuple[Float[Tensor, "n l d"], Float[Tensor, "n l"], Float[Tensor, "n d"]]:
        """Encodes N sentences, or their token ids, with -1 after the end (an exported policy).

        Returns:
            Token features (N, L, d), a mask (N, L) that is 1 for real tokens and 0 for padding, and
            the mean (N, d) of the real tokens.
        """
        if isinstance(sentences, Tensor):
            return self._encode(sentences)
        # The different sentences as token ids, padded to the length of the longest.
        unique = {s: i for i, s in enumerate(dict.fromkeys(sentences))}
        rows = [self._tokenize(s) for s in unique]
        length = max(len(r) for r in rows)
        device = self.position.device
        ids = torch.tensor([r + [-1] * (length - len(r)) for r in rows], device=device)
        # Repeat the rows for the N sentences that were asked for.
        index = torch.tensor([unique[s] for s in sentences], device=device)
        x, mask, pooled = self._encode(ids)
        return x[index], mask[index], pooled[index]

    def _encode(self, ids: Int[Tensor, "n l"]) -> tuple[Tensor, Tensor, Tensor]:
        """What ``forward`` returns, for token ids with -1 after the end."""
        # Embed them, and let the tokens of a sentence see each other.
        mask = (ids >= 0).float()
        table: Tensor = self.get_buffer("table")
        x = self.project(table[ids.clamp_min(0)].to(self.position.dtype))
        x = x + self.position[: ids.shape[1]]
        if isinstance(self.blocks, nn.TransformerEncoder):
            x = self.blocks(x, src_key_padding_mask=mask == 0)
        pooled = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return x, mask, pooled

    def _tokenize(self, sentence: str) -> list[int]:
        """Token ids of a sentence; an empty sentence has the single token 0."""
        if sentence not in self._ids:
            ids = self._tokenizer.encode(sentence, add_special_tokens=False).ids
            self._ids[sentence] = ids[: self.max_tokens] or [0]
        return self._ids[sentence]
