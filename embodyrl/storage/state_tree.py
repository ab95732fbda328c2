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
from torch.optim import Optimizer


def is_name(name: str) -> bool:
    """Whether a state may have this name, which becomes that of a file.

    "state" and "meta" are the names of other files of a checkpoint.
    """
    return bool(re.fullmatch(r"[\w-]{1,100}", name)) and name not in ("state", "meta")


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
    if not is_name(name):
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
    """The state that ``flatten`` took apart.

    Raises:
        ValueError: ``tree`` is nothing that ``flatten`` returns, or a tensor is missing.
    """
    if not isinstance(tree, dict):
        if isinstance(tree, list):
            raise ValueError("a list stands where a value is expected")
        return tree
    if len(tree) != 1:
        raise ValueError(f"an entry has {len(tree)} kinds, not one")
    ((kind, value),) = tree.items()
    if kind == "tensor":
        if not isinstance(value, str) or value not in tensors:
            raise ValueError(f"there is no tensor {str(value)[:60]!r}")
        return tensors[value]
    if kind not in ("dict", "list", "tuple") or not isinstance(value, list):
        raise ValueError(f"{str(kind)[:60]!r} is no kind of entry")
    if kind == "dict":
        pairs = [_pair(item) for item in value]
        return {k: unflatten(v, tensors) for k, v in pairs}
    items = [unflatten(v, tensors) for v in value]
    return tuple(items) if kind == "tuple" else items


def _pair(item: Any) -> tuple[str | int, Any]:
    if isinstance(item, list) and len(item) == 2 and type(item[0]) in (str, int):
        return item[0], item[1]
    raise ValueError("an item of a mapping is no pair of a key and a value")


def load_optimizer(optimizer: Optimizer, state: Any) -> None:
    """Loads an optimiser's state, and checks that it fits the parameters.

    PyTorch itself loads any tensor, and fails at the next step.

    Args:
        optimizer: in place.
        state: what its ``state_dict`` returned.

    Raises:
        ValueError: parameters are numbered otherwise, what is kept for one has another shape, or a
            setting is of another type.
    """
    before = [{key: type(value) for key, value in g.items()} for g in optimizer.param_groups]
    betas = [[type(beta) for beta in g.get("betas", ())] for g in optimizer.param_groups]
    numbers = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    if [group.get("params") for group in state["param_groups"]] != numbers:
        raise ValueError("the optimiser's parameters are numbered otherwise")
    # Either nothing is kept, before the first step, or something for each parameter with a gradient.
    if not set(state["state"]) <= {number for group in numbers for number in group}:
        raise ValueError("the optimiser keeps something for a parameter that is not there")
    optimizer.load_state_dict(state)
    for group, kinds in zip(optimizer.param_groups, before, strict=True):
        for key, kind in kinds.items():
            if key not in group or (kind in (float, bool, list) and type(group[key]) is not kind):
                raise ValueError(f"the optimiser's setting {key!r} is no {kind.__name__}")
    if [[type(beta) for beta in g.get("betas", ())] for g in optimizer.param_groups] != betas:
        raise ValueError("the optimiser's setting 'betas' is not two numbers")
    for parameter, kept in optimizer.state.items():
        for name, value in kept.items():
            if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
                raise ValueError(
                    f"the optimiser's {name} has the shape {tuple(value.shape)}, and its "
                    f"parameter {tuple(parameter.shape)}"
                )
