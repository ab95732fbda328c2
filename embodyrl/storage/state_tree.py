"""Splits states (of modules, optimisers, generators) into JSON data and tensors, and back.

{"step": 3, "moments": [tensor]}
--flatten--> {"dict": [["step", 3], ["moments", {"list": [{"tensor": "moments/0"}]}]]}
             and {"moments/0": tensor}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def flatten(state: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """Splits a state into JSON data and tensors.

    Args:
        state: nested dicts (keys str or int), lists and tuples of tensors, numbers, strings, None.
        name: of the state, for error messages; it becomes a file name.

    Returns:
        The JSON data, which refers to tensors by name, and name -> tensor. A name is the path to
        the tensor in the state.

    Raises:
        TypeError: the name is not allowed, or the state holds something else.
    """
    # "state" and "meta" are the names of other files of a checkpoint.
    if not re.fullmatch(r"[\w-]+", name) or name in ("state", "meta"):
        raise TypeError(f"A state cannot be named {name!r}.")
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()

    def visit(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            value = value.detach().cpu().contiguous()
            # safetensors refuses two views of one memory, so the second is copied.
            if value.untyped_storage().data_ptr() in storages:
                value = value.clone()
            storages.add(value.untyped_storage().data_ptr())
            # Two paths may be written alike, such as the keys 1 and "1".
            key = path or "value"
            while key in tensors:
                key += "_"
            tensors[key] = value
            return {"tensor": key}
        if isinstance(value, Mapping):
            if odd := [k for k in value if type(k) not in (str, int)]:
                raise TypeError(
                    f"{name}:{path} has the key {odd[0]!r}, which is neither str nor int."
                )
            # A list of pairs: JSON's own objects would turn int keys into strings.
            items = [[k, visit(v, f"{path}/{k}" if path else str(k))] for k, v in value.items()]
            return {"dict": items}
        if isinstance(value, list | tuple):
            return {type(value).__name__: [visit(v, f"{path}/{i}") for i, v in enumerate(value)]}
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise TypeError(
            f"{name}:{path} is a {type(value).__name__}, which a checkpoint does not hold."
        )

    return visit(state, ""), tensors


def unflatten(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that ``flatten`` took apart."""
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {k: unflatten(v, tensors) for k, v in value}
    items = [unflatten(v, tensors) for v in value]
    return tuple(items) if kind == "tuple" else items
