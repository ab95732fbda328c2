"""The folder of a saved world model: a subfolder per network, and two ``world`` files."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.world_models.nets.diffusers_io import load_part

PARTS = {
    "codec": {
        "FrameCodec": "embodyrl.world_models.nets.codec",
        "WanCodec": "embodyrl.world_models.nets.pretrained.wan",
    },
    "backbone": {
        "ChunkTransformer": "embodyrl.world_models.nets.backbone",
        "WanBackbone": "embodyrl.world_models.nets.pretrained.wan",
        "AnyFlowBackbone": "embodyrl.world_models.nets.pretrained.anyflow",
    },
    "success": {"SuccessHead": "embodyrl.world_models.nets.success"},
    "state": {"StateModel": "embodyrl.world_models.nets.state"},
    "inverse": {"InverseDynamics": "embodyrl.world_models.nets.inverse"},
}
"""Subfolder -> the classes it may hold -> the module of each."""
OPTIONAL = ("state", "inverse")
"""Subfolders that may be missing."""
META = "world.json"
TENSORS = "world.safetensors"


def write_folder(
    folder: Path, parts: Mapping[str, Any], tensors: dict[str, Tensor], meta: dict[str, Any]
) -> None:
    """Writes the folder completely or not at all.

    Args:
        folder: replaced if it exists.
        parts: name -> network; None leaves it out.
        tensors: goes to ``world.safetensors``.
        meta: plain data; goes to ``world.json``.
    """
    # Everything is written beside the folder first, so that a crash leaves the old one whole.
    partial = folder.with_name(f".{folder.name}.tmp-{secrets.token_hex(4)}")
    partial.mkdir(parents=True)
    for name, part in parts.items():
        if part is not None:
            part.save_pretrained(partial / name)
    save_file(tensors, partial / TENSORS)
    (partial / META).write_text(json.dumps(meta, indent=1))
    if not folder.exists():
        os.replace(partial, folder)
        return
    # A folder cannot be renamed onto one that is not empty: the old one makes room first.
    old = folder.with_name(f".{folder.name}.old-{secrets.token_hex(4)}")
    os.replace(folder, old)
    os.replace(partial, folder)
    shutil.rmtree(old)


def read_parts(folder: Path) -> dict[str, Any]:
    """The networks of a saved model by name.

    Raises:
        UserError: a network is missing or damaged, or its weights do not fit.
    """
    return {
        name: load_part(folder / name, classes)
        for name, classes in PARTS.items()
        if name not in OPTIONAL or (folder / name).exists()
    }


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """What ``world.safetensors`` holds."""
    return load_file(folder / TENSORS)


def read_meta(folder: Path) -> dict[str, Any]:
    """What ``world.json`` holds.

    Raises:
        UserError: there is no world model in the folder.
    """
    path = folder / META
    if not path.is_file():
        raise UserError(
            f"{folder} holds no world model (there is no {META}). `embodyrl world train` makes one."
        )
    return json.loads(path.read_text())
