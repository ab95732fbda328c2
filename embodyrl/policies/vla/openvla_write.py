"""Writes a checkpoint in the layout in which OpenVLA's are published."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from embodyrl.policies.vla.lerobot_io import writing_checkpoint
from embodyrl.policies.vla.prismatic import PrismaticNet
from embodyrl.storage.atomic_files import write_json

COPIED = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
"""Files of the checkpoint that training does not change; those that it has are copied."""


def write_openvla(
    net: PrismaticNet, source: Path, statistics: dict[str, Any], folder: str | Path
) -> Path:
    """Writes weights, statistics, and the other files of the checkpoint that training began from.

    Args:
        net: without adapters.
        source: folder of that checkpoint.
        statistics: data set -> its statistics.
        folder: must not exist, or be empty.

    Raises:
        UserError: the folder is not empty, or it cannot be written.
    """
    from huggingface_hub import save_torch_state_dict

    with writing_checkpoint(folder) as scratch:
        for name in COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, scratch / name)
        write_json(scratch / "dataset_statistics.json", statistics, indent=2)
        weights = {k: v.to(torch.bfloat16).cpu() for k, v in net.state_dict().items()}
        save_torch_state_dict(weights, scratch, max_shard_size="7GB")
    return Path(folder)
