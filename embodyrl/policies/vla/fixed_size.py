"""Loads LeRobot's ACT and Diffusion Policy, whose layers are as wide as the data that they learned.

Unlike a VLA they pad nothing: the dims of proprioception and actions, and the pictures, must be
those of the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from embodyrl.errors import UserError
from embodyrl.policies.chooser import ChooserConfig
from embodyrl.policies.vla import lerobot_io
from embodyrl.policies.vla.processors import ACTION, STATE, Processors
from embodyrl.ranges import CountOrZero
from embodyrl.storage.env_spec import check_export
from embodyrl.storage.paths import path_setting
from embodyrl.storage.pretrained import find_checkpoint
from embodyrl.types import EnvSpec


@dataclass(frozen=True)
class FixedSizeConfig(ChooserConfig):
    """What to load, and how much of a chunk is executed.

    Attributes:
        name: registry name: ``act`` or ``diffusion``.
        pretrained: a LeRobot checkpoint, a folder or an id of the Hugging Face hub.
        revision: of a hub id.
        random_weights: use only the config.json of ``pretrained``, with the env's cameras and dims,
            and train from random weights.
        cameras: the checkpoint's cameras in the order of the env's; empty if the names are the
            same.
        horizon: C, actions that are planned from now on; 0 for as many as in the checkpoint. Only
            random weights can have another number.
        execute: H, how many of them are executed before the next observation; 0 for as many as in
            the checkpoint (its ``n_action_steps``).
    """

    name: str = ""
    pretrained: str = path_setting()
    revision: str = ""
    random_weights: bool = False
    cameras: tuple[str, ...] = ()
    horizon: CountOrZero = 0
    execute: CountOrZero = 0


@dataclass(frozen=True)
class Loaded:
    """What ``load`` found.

    Attributes:
        lerobot: LeRobot's policy, with its weights.
        processors: its pre- and post-processing.
        horizon: C.
        execute: H.
    """

    lerobot: Any
    processors: Processors
    horizon: int
    execute: int


def read_fixed_size(
    config: FixedSizeConfig,
    spec: EnvSpec,
    horizon_key: str,
    packages: tuple[str, ...],
    **settings: Any,
) -> Loaded:
    """LeRobot's policy for an env.

    Args:
        config: of the policy here.
        spec: of the env.
        horizon_key: field of LeRobot's config that holds the length of a chunk.
        packages: that it needs.
        settings: further fields of LeRobot's config.

    Raises:
        UserError: there is no such checkpoint, or it does not fit the env.
    """
    c = config
    if not c.pretrained:
        raise UserError(
            f"policy.name={c.name} needs policy.pretrained: a LeRobot checkpoint (a folder, or an "
            "id of the Hugging Face hub)."
        )
    lerobot_io.require_lerobot(packages)
    # On the meta device (the estimate of memory) the architecture alone is needed.
    no_data = torch.get_default_device().type == "meta"
    weights = not (c.random_weights or no_data)
    folder = find_checkpoint(c.pretrained, c.revision, weights=not no_data)
    check_export(folder, spec)
    theirs = lerobot_io.read_config(folder, c.name, weights=weights)
    # The checkpoint's features, or the env's.
    if c.random_weights:
        lerobot_io.set_features(theirs, spec, keep_cameras=False)
    keys = lerobot_io.camera_keys(theirs, spec, c.cameras, folder)
    _check_features(theirs, spec, keys, folder)
    # Chunks: what LeRobot plans begins with the oldest observation that it sees.
    past = theirs.n_obs_steps - 1
    planned = getattr(theirs, horizon_key) - past
    if c.horizon not in (0, planned) and not c.random_weights:
        raise UserError(
            f"policy.horizon is {c.horizon}, but {folder} plans {planned} actions. To execute "
            f"{c.horizon} of them, set policy.execute={c.horizon}."
        )
    planned = c.horizon or planned
    setattr(theirs, horizon_key, planned + past)
    theirs.n_action_steps = c.execute or min(theirs.n_action_steps, planned)
    if theirs.n_action_steps > planned:
        raise UserError(
            f"policy.execute is {theirs.n_action_steps}, but {folder} plans {planned} actions. "
            "Execute at most that many."
        )
    theirs.device = "meta" if no_data else "cpu"
    for key, value in settings.items():
        setattr(theirs, key, value)
    lerobot = lerobot_io.build_lerobot_policy(theirs)
    if weights:
        lerobot_io.read_weights(lerobot, folder)
    # Normalisation, from the checkpoint's own pipelines.
    with torch.device("cpu"):
        make = lerobot_io.make_processors if c.random_weights else lerobot_io.read_processors
        processors = Processors(*make(theirs, folder, ""), keys)
        processors.set_features({**theirs.input_features, **theirs.output_features})
    return Loaded(lerobot, processors, planned, theirs.n_action_steps)


def _check_features(theirs: Any, spec: EnvSpec, keys: dict[str, str], folder: Path) -> None:
    """Refuses a checkpoint that sees or does something else than what the env has.

    Raises:
        UserError: naming what differs.
    """
    features = {**theirs.input_features, **theirs.output_features}
    known = {STATE, ACTION, *theirs.image_features}
    others = sorted(set(features) - known)
    if STATE not in features or others:
        what = f"the inputs {', '.join(others)}" if others else "no observation.state"
        raise UserError(
            f"{folder} has {what}; the envs here give pictures and observation.state. Train a "
            "checkpoint with these."
        )
    nothing = "or take its architecture alone with policy.random_weights=true"
    for key, dims, what in (
        (STATE, spec.proprio_dim, "proprio"),
        (ACTION, spec.action_dim, "action"),
    ):
        if (found := features[key].shape[0]) != dims:
            raise UserError(
                f"{folder} was trained on {found} {what} dims, and {spec.name} has {dims}. Its "
                f"layers are that wide: use a checkpoint of this robot, {nothing}."
            )
    if missing := sorted(set(theirs.image_features) - set(keys.values())):
        raise UserError(
            f"{folder} sees {', '.join(missing)}, which no camera of {spec.name} gives. Turn that "
            "camera on, and say in policy.cameras which is which."
        )
    for name, key in keys.items():
        size = tuple(theirs.image_features[key].shape[1:])
        if size != tuple(spec.cameras[name]):
            height, width = spec.cameras[name]
            raise UserError(
                f"{folder} was trained on pictures of {size[0]} x {size[1]} pixels ({key}), and "
                f"{name} of {spec.name} has {height} x {width}. Set the env's pictures to that "
                f"size, {nothing}."
            )
