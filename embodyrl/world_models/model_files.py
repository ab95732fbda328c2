"""The folder of a saved world model: a subfolder per network, and two ``world`` files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.storage.atomic_files import replacing_folder
from embodyrl.storage.paths import require_readable
from embodyrl.storage.plain_data import ANYTHING, COUNT, NUMBER, TEXT, first_line, read_json
from embodyrl.world_models.nets.saved_network import load_part

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
    "finder": {"Finder": "embodyrl.world_models.nets.finder"},
    "discriminator": {"Discriminator": "embodyrl.world_models.nets.discriminator"},
}
"""Subfolder -> the classes it may hold -> the module of each."""
OPTIONAL = ("state", "inverse", "finder", "discriminator")
"""Subfolders that may be missing."""
PICTURE_PARTS = ("codec", "backbone", "success")
"""Subfolders that a model without frames does not have; its ``world.json`` has ``horizon``."""
META = "world.json"
WORLD = {
    "spec": {...: ANYTHING},
    "env": {...: ANYTHING},
    "calibration": {"temperature": NUMBER, "bias": NUMBER, "threshold": NUMBER, "hits": COUNT},
    "sentences": [TEXT],
    "doubt?": NUMBER,
    "spread?": NUMBER,
    "strayed?": NUMBER,
    "horizon?": COUNT,
}
"""Structure of ``world.json``."""
REMEDY = "Use another copy, or train the world model again."
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
    with replacing_folder(folder) as scratch:
        for name, part in parts.items():
            if part is not None:
                part.save_pretrained(scratch / name)
        save_file(tensors, scratch / TENSORS)
        (scratch / META).write_text(json.dumps(meta, indent=1))


def read_parts(folder: Path, frames: bool = True) -> dict[str, Any]:
    """The networks of a saved model by name; those of frames are None in one without.

    Raises:
        UserError: a network is missing or damaged, or its weights do not fit.
    """
    optional = OPTIONAL if frames else (*OPTIONAL[1:], *PICTURE_PARTS)
    found = {
        name: load_part(folder / name, classes)
        for name, classes in PARTS.items()
        if name not in optional or (folder / name).exists()
    }
    return dict.fromkeys(PICTURE_PARTS) | found


def check_sizes(model: Any) -> None:
    """Checks that networks and keyframes of a loaded model have the sizes of its env.

    Args:
        model: a ``WorldModel``.

    Raises:
        ValueError: naming the first that differs.
    """
    spec = model.spec
    views = len(spec.cameras)
    sizes = {"num_views": views, "action_dim": spec.action_dim, "proprio_dim": spec.proprio_dim}
    for name in PARTS:
        config = getattr(getattr(model, name), "config", None) or {}
        for key, size in sizes.items():
            if key in config and config[key] != size:
                raise ValueError(f"{name} has {key} {config[key]}, and the env {size}")
    keys = model.keyframes
    if not keys:
        return
    count = len(keys["init"])
    shapes = {
        "context": (count, 3, views, *model.latent_shape),
        "proprio": (count, spec.proprio_dim),
        **dict.fromkeys(("sentence", "init", "age", "held_out"), (count,)),
        **({"privileged": (count, model.state_dim)} if model.state is not None else {}),
    }
    for name, shape in shapes.items():
        if tuple(keys[name].shape) != shape:
            raise ValueError(
                f"keyframes.{name} has the shape {tuple(keys[name].shape)}, not {shape}"
            )
    sentence = keys["sentence"]
    if count and not 0 <= int(sentence.min()) <= int(sentence.max()) < len(model.sentences):
        raise ValueError("a keyframe has an instruction that is not there")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """What ``world.safetensors`` holds.

    Raises:
        UserError: it is missing or damaged.
    """
    require_readable(folder / TENSORS)
    try:
        return load_file(folder / TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{folder / TENSORS} is damaged ({first_line(error)}). {REMEDY}") from error


def read_model_meta(folder: Path) -> dict[str, Any]:
    """What ``world.json`` holds.

    Raises:
        UserError: there is no world model in the folder, or the file is damaged.
    """
    path = folder / META
    if not path.is_file():
        raise UserError(
            f"{folder} holds no world model (there is no {META}). `embodyrl world train` makes one."
        )
    return read_json(path, WORLD, REMEDY)
