"""Networks in diffusers' format: their base classes, and how they are read from disk."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.storage.paths import require_readable
from embodyrl.storage.plain_data import first_line

try:
    from diffusers.configuration_utils import ConfigMixin, register_to_config
    from diffusers.models.modeling_utils import ModelMixin
except ImportError as error:
    raise MissingDependencyError(
        "World models and trained reflectors are saved in the format of diffusers, which is not "
        "installed here. Install it: pip install 'embodyrl[wm]'."
    ) from error

__all__ = ["ConfigMixin", "ModelMixin", "load_part", "register_to_config"]


def load_part(folder: Path, classes: dict[str, str]) -> Any:
    """The network in ``folder``, of the class that its config names.

    Args:
        folder: as ``save_pretrained`` wrote it.
        classes: names of the classes that it may have, and the module of each.

    Raises:
        UserError: it has another class, or its weights do not fit.
    """
    for file in (folder, *folder.glob("*")):
        require_readable(file)
    try:
        name = json.loads((folder / "config.json").read_text())["_class_name"]
        module = classes[name]
    except (OSError, RecursionError, TypeError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder} is damaged: its config.json names none of {', '.join(classes)} ({error})."
        ) from error
    damaged = "is damaged, or of another version of embodyrl; train it again"
    try:
        loader = getattr(importlib.import_module(module), name).from_pretrained
        # A file of another format could be a pickle.
        net, found = loader(folder, output_loading_info=True, use_safetensors=True)
    except UserError:
        raise
    except Exception as error:  # diffusers, and each network, raise errors of their own
        raise UserError(f"{folder} {damaged} ({first_line(error)}).") from error
    if different := [*found["missing_keys"], *found["unexpected_keys"]]:
        raise UserError(
            f"{folder} {damaged} (its weights and its config do not agree on {different[0]})."
        )
    return net
