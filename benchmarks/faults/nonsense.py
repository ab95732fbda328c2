"""Values, bytes and JSON that no honest program sends."""

from __future__ import annotations

import json
import random
from typing import Any

ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    3,
    2**31,
    -(2**63),
    10**400,
    0.0,
    0.5,
    1e30,
    float("nan"),
    float("inf"),
    -float("inf"),
    "",
    "abc",
    "1.0",
    "\x00\n\x1b[31m",
    "\ud83e\udd16" * 3,
    "x" * 10_000,
    [],
    {},
    [[]],
    [1, 2, 3],
    {"a": {"b": 1}},
)
"""Single values, some of which are right somewhere."""


def value(rng: random.Random, depth: int = 3) -> Any:
    """A random nest of odd values, as JSON can hold them."""
    kind = rng.randrange(6)
    if depth and kind == 0:
        return [value(rng, depth - 1) for _ in range(rng.randrange(9))]
    if depth and kind == 1:
        return {str(rng.choice(ODD))[:9]: value(rng, depth - 1) for _ in range(rng.randrange(5))}
    return rng.choice(ODD)


def spoiled(rng: random.Random, good: Any) -> Any:
    """A copy of nested maps and lists in which one value is replaced, lost or doubled."""
    if isinstance(good, dict) and good and rng.random() < 0.9:
        key = rng.choice(list(good))
        if rng.random() < 0.1:
            return {k: v for k, v in good.items() if k != key}
        return {**good, key: spoiled(rng, good[key])}
    if isinstance(good, list) and good and rng.random() < 0.9:
        k = rng.randrange(len(good))
        if rng.random() < 0.2:
            return good[:k] + good[k + 1 :] if rng.random() < 0.5 else [*good, good[k]]
        return [*good[:k], spoiled(rng, good[k]), *good[k + 1 :]]
    return value(rng)


def mutated(rng: random.Random, good: bytes) -> bytes:
    """Bytes with some of them changed, and perhaps the end cut off or something added."""
    data = bytearray(good)
    for _ in range(rng.randrange(1, 8)):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.3:
        data = data[: rng.randrange(len(data) + 1)]
    if rng.random() < 0.1:
        data += rng.randbytes(rng.randrange(64))
    return bytes(data)


def text(rng: random.Random, good: Any) -> str:
    """A JSON text: of a spoiled message, mutated, far too deep, or far too wide."""
    kind = rng.randrange(10)
    if kind == 0:
        deep = rng.choice((20, 2_000, 100_000))
        return rng.choice(("[" * deep, '{"a":' * deep, "[" * deep + "]" * deep))
    if kind == 1:
        return '{"op": [' + "[]," * rng.choice((10, 200_000)) + "[]]}"
    whole = json.dumps(spoiled(rng, good))
    if kind < 5:
        return mutated(rng, whole.encode()).decode(errors="replace")
    return whole
