"""Prefixes that were computed already, for as long as what computes them is frozen."""

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


class PrefixStore:
    """The prefixes of the last observations, by what was seen: a PPO epoch finds what the rollout computed.

    A row is its keys and values (L, 2, heads, P, d), mask, state and summary; the oldest are
    dropped.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._rows: OrderedDict[bytes, Row] = OrderedDict()
        self._layout: Any = None

    def __len__(self) -> int:
        return len(self._rows)

    def clear(self) -> None:
        """Forgets all."""
        self._rows.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> PrefixStore:
        return self  # a copy of the policy has the same frozen weights

    def get(self, batch: dict[str, Any], compute: Callable[[dict[str, Any]], Prefix]) -> Prefix:
        """The prefix of a batch of N; ``compute`` is called for the rows alone that are not here."""
        keys = _keys(batch)
        place = {key: i for i, key in enumerate(keys)}
        found = {key: self._rows[key] for key in place if key in self._rows}
        if missing := [i for key, i in place.items() if key not in found]:
            new = compute({k: _select(v, missing, len(keys)) for k, v in batch.items()})
            found |= zip([keys[i] for i in missing], self._split(new), strict=True)
        for key, row in found.items():
            self._rows[key] = row
            self._rows.move_to_end(key)
        while len(self._rows) > self.capacity:
            self._rows.popitem(last=False)
        return self._join([found[key] for key in keys])

    def _split(self, prefix: Prefix) -> list[Row]:
        self._layout = prefix.cache
        pairs = torch.stack(
            [torch.stack([x.keys, x.values], dim=1) for x in prefix.cache.layers], dim=1
        )
        parts = (pairs, prefix.mask, prefix.state, prefix.pooled)
        # Copies, or a row would keep the whole batch in memory.
        return [tuple(part[i].clone() for part in parts) for i in range(len(pairs))]  # type: ignore[misc]

    def _join(self, rows: list[Row]) -> Prefix:
        length = max(len(mask) for _, mask, _, _ in rows)
        pairs = torch.stack([_pad(x, length - len(mask), dim=-2) for x, mask, _, _ in rows])
        masks = torch.stack([_pad(mask, length - len(mask), dim=-1) for _, mask, _, _ in rows])
        cache = copy.copy(self._layout)
        cache.layers = []
        for number, old in enumerate(self._layout.layers):
            layer = copy.copy(old)
            layer.keys, layer.values = pairs[:, number].unbind(1)
            cache.layers.append(layer)
        return Prefix(
            cache,
            masks,
            torch.stack([s for _, _, s, _ in rows]),
            torch.stack([p for *_, p in rows]),
        )


def _keys(batch: dict[str, Any]) -> list[bytes]:
    arrays = {
        k: v.detach().cpu().contiguous().numpy() for k, v in batch.items() if isinstance(v, Tensor)
    }
    tokens = arrays.pop("observation.language.tokens")
    mask = arrays.pop("observation.language.attention_mask")
    keys = []
    for i in range(len(tokens)):
        content = hashlib.blake2b(
            tokens[i][mask[i]].tobytes(), digest_size=16
        )  # how far it is padded is no content
        for array in arrays.values():
            content.update(array[i].tobytes())
        keys.append(content.digest())
    return keys


def _select(value: Any, rows: list[int], n: int) -> Any:
    if isinstance(value, Tensor):
        return value[rows]
    return [value[i] for i in rows] if isinstance(value, list) and len(value) == n else value


def _pad(x: Tensor, amount: int, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = amount
    return torch.cat([x, x.new_zeros(shape)], dim=dim) if amount else x
