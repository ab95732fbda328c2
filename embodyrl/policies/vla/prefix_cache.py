"""Keeps the prefixes of earlier observations: a frozen language model computes each only once."""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from embodyrl.policies.vla.nets import Prefix

Row = tuple[Tensor, Tensor, Tensor, Tensor]
"""One observation's prefix.

Keys and values (L layers, 2, heads, P, d), mask (P,), state (S,) and summary (F,).
"""


class PrefixCache:
    """The prefixes of the last observations, found by the observations' content.

    PPO's epochs see the observations of the rollout again, and find the prefixes that the rollout
    computed. It is valid only while the language model does not change.

    Args:
        capacity: number of observations; beyond it, those not used for longest are dropped.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._rows: OrderedDict[bytes, Row] = OrderedDict()  # by hash; the last used at the end
        self._cache_template: Any = None  # a key-value cache whose tensors are replaced

    def __len__(self) -> int:
        return len(self._rows)

    def clear(self) -> None:
        """Forgets all prefixes."""
        self._rows.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> PrefixCache:
        return self  # a copy of the policy has the same frozen weights

    def get(self, batch: dict[str, Any], compute: Callable[[dict[str, Any]], Prefix]) -> Prefix:
        """The prefix of a batch of N observations.

        Args:
            batch: of LeRobot's pre-processor.
            compute: gives the prefix of a batch; it is called for the rows that are not here.
        """
        # Look up each different observation of the batch.
        hashes = _hash_rows(batch)
        row_of = {key: i for i, key in enumerate(hashes)}
        found = {key: self._rows[key] for key in row_of if key in self._rows}
        # Compute those that are missing, in one batch.
        if missing := [i for key, i in row_of.items() if key not in found]:
            new = compute({k: _select(v, missing, len(hashes)) for k, v in batch.items()})
            found |= zip([hashes[i] for i in missing], self._split(new), strict=True)
        # Keep all of them as the last used, and drop the oldest.
        for key, row in found.items():
            self._rows[key] = row
            self._rows.move_to_end(key)
        while len(self._rows) > self.capacity:
            self._rows.popitem(last=False)
        return self._join([found[key] for key in hashes])

    def _split(self, prefix: Prefix) -> list[Row]:
        """The rows of a batch's prefix."""
        self._cache_template = prefix.cache
        # Keys and values of all layers in one tensor (N, L, 2, heads, P, d).
        keys_values = torch.stack(
            [torch.stack([x.keys, x.values], dim=1) for x in prefix.cache.layers], dim=1
        )
        parts = (keys_values, prefix.mask, prefix.state, prefix.pooled)
        # Without clone, a row would be a view that keeps the whole batch in memory.
        return [tuple(part[i].clone() for part in parts) for i in range(len(keys_values))]  # type: ignore[misc]

    def _join(self, rows: list[Row]) -> Prefix:
        """The prefix of a batch, from its rows."""
        # Rows may have come from batches with prompts of other lengths: pad them to the longest.
        length = max(len(mask) for _, mask, _, _ in rows)
        keys_values = torch.stack([_pad(x, length - len(mask), dim=-2) for x, mask, _, _ in rows])
        masks = torch.stack([_pad(mask, length - len(mask), dim=-1) for _, mask, _, _ in rows])
        # A new key-value cache with these tensors.
        cache = copy.copy(self._cache_template)
        cache.layers = []
        for number, template in enumerate(self._cache_template.layers):
            layer = copy.copy(template)
            layer.keys, layer.values = keys_values[:, number].unbind(1)
            cache.layers.append(layer)
        states = torch.stack([state for _, _, state, _ in rows])
        pooled = torch.stack([summary for *_, summary in rows])
        return Prefix(cache, masks, states, pooled)


def _hash_rows(batch: dict[str, Any]) -> list[bytes]:
    """A hash of each observation's content: images, proprioception and instruction."""
    arrays = {
        k: v.detach().cpu().contiguous().numpy() for k, v in batch.items() if isinstance(v, Tensor)
    }
    tokens = arrays.pop("observation.language.tokens")
    mask = arrays.pop("observation.language.attention_mask")
    hashes = []
    for i in range(len(tokens)):
        # Only the real tokens: the amount of padding depends on the batch.
        content = hashlib.blake2b(tokens[i][mask[i]].tobytes(), digest_size=16)
        for array in arrays.values():
            content.update(array[i].tobytes())
        hashes.append(content.digest())
    return hashes


def _select(value: Any, rows: list[int], n: int) -> Any:
    """The rows of a tensor or of a list with n entries; other values as they are."""
    if isinstance(value, Tensor):
        return value[rows]
    if isinstance(value, list) and len(value) == n:
        return [value[i] for i in rows]
    return value


def _pad(x: Tensor, amount: int, dim: int) -> Tensor:
    """Appends ``amount`` zeros to a dimension."""
    if not amount:
        return x
    shape = list(x.shape)
    shape[dim] = amount
    return torch.cat([x, x.new_zeros(shape)], dim=dim)
