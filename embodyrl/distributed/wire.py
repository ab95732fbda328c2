"""What crosses between machines, without pickle: arrays for Ray, bytes for sockets.

Ray's object store hands arrays of the same machine over without a copy, and so read-only:
``unpack`` copies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from embodyrl import registry
from embodyrl.config import Config
from embodyrl.errors import UserError
from embodyrl.rollouts.batches import (
    Episode,
    EpisodeBatch,
    GroupBatch,
    RolloutBatch,
    TransitionBatch,
    Transitions,
)
from embodyrl.storage.state_tree import flatten, unflatten
from embodyrl.types import DenoisingTrace, Obs

TYPES: dict[str, type] = {
    t.__name__: t
    for t in (
        Obs,
        DenoisingTrace,
        Episode,
        RolloutBatch,
        EpisodeBatch,
        GroupBatch,
        Transitions,
        TransitionBatch,
    )
}
"""What a message may hold beside tensors and plain values."""
KIND = "dataclass"
MAX_HEADER = 32 * 2**20
"""Largest header of a message in bytes: the names of a big model's tensors are some MB."""


def know_batch(config: Config) -> None:
    """Adds the batches of a run's algorithm, which may come from another package, to ``TYPES``."""
    batch = registry.load("algorithms", config.algorithm.name).Batch
    if batch is not None:
        TYPES.setdefault(batch.__name__, batch)


def pack(value: Any) -> dict[str, Any]:
    """Nested tensors, plain values and the dataclasses above, as a tree and its arrays."""
    tree, tensors = flatten(_to_tree(value), "message")
    halves = [k for k, v in tensors.items() if v.dtype == torch.bfloat16]  # numpy has no such type
    arrays = {k: (v.view(torch.int16) if k in halves else v).numpy() for k, v in tensors.items()}
    return {"tree": tree, "arrays": arrays, "bfloat16": halves}


def unpack(message: Mapping[str, Any]) -> Any:
    """The inverse of ``pack``, bit for bit."""
    tensors = {k: torch.tensor(v) for k, v in message["arrays"].items()}
    for k in message["bfloat16"]:
        tensors[k] = tensors[k].view(torch.bfloat16)
    return _from_tree(unflatten(message["tree"], tensors))


def to_bytes(value: Any) -> bytes:
    """What ``pack`` takes, as one safetensors file whose metadata is the tree."""
    tree, tensors = flatten(_to_tree(value), "message")
    return save(tensors, {"tree": json.dumps(tree)})


def from_bytes(data: bytes) -> Any:
    """The inverse of ``to_bytes``, bit for bit.

    Raises:
        UserError: anything else.
    """
    try:
        size = int.from_bytes(data[:8], "little")
        if size > min(len(data), MAX_HEADER):
            raise ValueError("the header is too large")
        header = json.loads(data[8 : 8 + size])
        return _from_tree(unflatten(json.loads(header["__metadata__"]["tree"]), load(data)))
    except (
        SafetensorError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise UserError(
            f"A message from another machine is not understood ({type(error).__name__})."
        ) from error


def _to_tree(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: _to_tree(getattr(value, f.name)) for f in fields(value)}
        return {KIND: type(value).__name__, **parts}
    if isinstance(value, Mapping):
        return {k: _to_tree(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to_tree(v) for v in value)
    return value


def _from_tree(value: Any) -> Any:
    if isinstance(value, dict):
        parts = {k: _from_tree(v) for k, v in value.items()}
        return TYPES[parts.pop(KIND)](**parts) if KIND in parts else parts
    if isinstance(value, list | tuple):
        return type(value)(_from_tree(v) for v in value)
    return value
