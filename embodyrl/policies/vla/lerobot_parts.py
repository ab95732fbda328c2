"""What the VLAs that LeRobot pads (SmolVLA, pi0, pi0.5, pi0-FAST) share: config and pipelines.

Settings that are read of a policy's config: ``name``, ``random_weights``, ``vlm``, ``horizon`` and
``execute``, as ``VLAConfig`` documents them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from embodyrl.errors import UserError
from embodyrl.policies.vla import lerobot_io
from embodyrl.policies.vla.processors import ACTION, STATE, Processors
from embodyrl.storage.env_spec import check_export
from embodyrl.storage.pretrained import find_checkpoint
from embodyrl.types import EnvSpec


def find_folder(c: Any, spec: EnvSpec, example: str) -> tuple[Path, bool]:
    """The folder of ``policy.pretrained``, and whether its weights are to be read.

    On the meta device tensors have no data. The estimate of memory builds a policy there, and needs
    the architecture alone.

    Args:
        c: the policy's config.
        spec: of the env.
        example: an id on the hub, for the message.

    Raises:
        UserError: no checkpoint is named, there is none, or it was exported from another env.
    """
    if not c.pretrained:
        raise UserError(
            f"policy.name={c.name} needs policy.pretrained: a LeRobot checkpoint (a folder, or an "
            f"id of the Hugging Face hub such as {example})."
        )
    lerobot_io.require_lerobot()
    no_data = torch.get_default_device().type == "meta"
    folder = find_checkpoint(c.pretrained, c.revision, weights=not no_data)
    check_export(folder, spec)
    return folder, not (c.random_weights or no_data)


def configure(c: Any, spec: EnvSpec, folder: Path, weights: bool) -> Any:
    """LeRobot's config of the checkpoint, with this env's features and this run's chunks.

    Args:
        c: the policy's config.
        spec: of the env.
        folder: of the checkpoint.
        weights: whether they are to be read.

    Raises:
        UserError: there is no such config, or it asks for what the envs here do not support.
    """
    config = lerobot_io.read_config(folder, c.name, weights=weights)
    for key in ("use_relative_actions", "adapt_to_pi_aloha"):
        if getattr(config, key, False):
            raise UserError(
                f"{folder} was trained with {key}, which the envs here do not support. Use "
                "another checkpoint."
            )
    # What is seen and done is this env's.
    lerobot_io.set_features(config, spec, keep_cameras=not c.random_weights)
    # Compilation, checkpointing and real-time chunking are done here, not by LeRobot.
    config.device = "meta" if torch.get_default_device().type == "meta" else "cpu"
    config.compile_model = False
    config.gradient_checkpointing = False
    config.rtc_config = None
    # Chunks.
    if c.horizon not in (0, config.chunk_size) and not c.random_weights:
        raise UserError(
            f"policy.horizon is {c.horizon}, but {folder} plans {config.chunk_size} actions. "
            f"To execute {c.horizon} of them, set policy.execute={c.horizon}. To fine-tune it "
            "to chunks of another length, change chunk_size in a copy of its config.json."
        )
    config.chunk_size = c.horizon or config.chunk_size
    config.n_action_steps = c.execute or min(config.n_action_steps, config.chunk_size)
    return config


def load_processors(
    c: Any,
    config: Any,
    spec: EnvSpec,
    folder: Path,
    keys: dict[str, str],
    overrides: dict[str, Any] | None = None,
) -> Processors:
    """The checkpoint's pipelines.

    Args:
        c: the policy's config.
        config: LeRobot's.
        spec: of the env.
        folder: of the checkpoint.
        keys: camera of the env -> key of the checkpoint.
        overrides: see ``lerobot_io.read_processors``.
    """
    make = lerobot_io.make_processors if c.random_weights else lerobot_io.read_processors
    with torch.device("cpu"):
        processors = Processors(*make(config, folder, c.vlm, overrides), keys)
    processors.set_features({**config.input_features, **config.output_features})
    # Statistics of another robot's dims are removed. Acting is refused until new ones are set.
    for key, dims, what in (
        (STATE, spec.proprio_dim, "proprio"),
        (ACTION, spec.action_dim, "action"),
    ):
        if (found := processors.dims(key)) not in (None, dims):
            processors.forget(key)
            processors.refused = (
                f"{folder} was trained on {found} {what} dims, and {spec.name} has {dims}. "
                "Fine-tune it on demonstrations of this env first (algorithm.name=sft), which "
                "sets its normalisation too."
            )
    return processors


def keep_trained_in_float32(net: nn.Module) -> None:
    """Trained weights in float32: in bfloat16 a small step of the optimiser would be rounded away."""
    for p in net.parameters():
        if p.requires_grad:
            p.data = p.data.float()
