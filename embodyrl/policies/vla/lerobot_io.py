"""Reads and writes LeRobot checkpoints, and explains why one cannot be used.

A checkpoint is a folder with config.json, model.safetensors, and the pre- and post-processing
pipelines (policy_preprocessor.json, policy_postprocessor.json, and their statistics).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodyrl.build import described_by
from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.policies.vla.pipeline_files import PROCESSORS, read_pipeline
from embodyrl.policies.vla.processors import ACTION, IMAGES, STATE
from embodyrl.storage.atomic_files import replacing_folder
from embodyrl.storage.paths import require_readable
from embodyrl.storage.plain_data import first_line
from embodyrl.storage.pretrained import LEROBOT_VLAS, PICTURE_STEP, explain_hub_errors
from embodyrl.types import EnvSpec

WEIGHTS = "model.safetensors"


LANGUAGE_PACKAGES = ("transformers", "num2words", "lerobot.policies")
"""What policies that read instructions need, of the extra ``vla``."""


def require_lerobot(packages: tuple[str, ...] = LANGUAGE_PACKAGES) -> None:
    """Checks that the packages of the extra ``vla`` are installed.

    Raises:
        MissingDependencyError: one is not.
    """
    try:
        for package in packages:
            importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(
            f"Policies of LeRobot need {', '.join(packages)}, of which {error.name or error} is "
            "not here: pip install 'embodyrl[vla]'."
        ) from error


def read_config(folder: Path, name: str, weights: bool = True) -> Any:
    """LeRobot's config of a checkpoint.

    Args:
        folder: of the checkpoint.
        name: the expected kind of policy, for example ``"smolvla"``.
        weights: whether weights must lie beside the config.

    Raises:
        UserError: there is no config, it is one of another policy, another version of LeRobot
            wrote it, or the weights are missing.
    """
    from lerobot.configs import PreTrainedConfig

    # The kind of policy is read from the JSON, because LeRobot's own error does not explain it.
    require_readable(folder / "config.json")
    try:
        kind = json.loads((folder / "config.json").read_text()).get("type")
    except FileNotFoundError:
        raise UserError(
            f"{folder} holds no config.json, so it is no LeRobot checkpoint. Give the folder with "
            "it."
        ) from None
    except (OSError, RecursionError, ValueError, AttributeError) as error:
        raise UserError(
            f"{folder / 'config.json'} is damaged ({error}). Use another copy of the checkpoint."
        ) from error
    if kind != name:
        hint = "Give a checkpoint of this kind."
        if kind in (*LEROBOT_VLAS, "act", "diffusion"):
            hint = f"Use policy.name={kind}."
        raise UserError(
            f"{folder} is a checkpoint of {kind or 'no LeRobot policy'}, not of {name}. {hint}"
        )
    if weights and not (folder / WEIGHTS).exists():
        raise UserError(
            f"{folder} holds no {WEIGHTS}. Give a checkpoint that does, or set "
            "policy.random_weights=true to train this architecture from nothing."
        )
    try:
        return PreTrainedConfig.from_pretrained(folder)
    except Exception as error:  # draccus, which parses it, raises errors of its own
        first_words = " ".join(str(error).split())[:300]
        raise UserError(
            f"{folder / 'config.json'} does not fit the installed LeRobot: {first_words}. It may "
            "come from another version; mend the key, or install the version that wrote it."
        ) from error


def camera_keys(config: Any, spec: EnvSpec, given: tuple[str, ...], folder: Path) -> dict[str, str]:
    """Which image of the checkpoint's policy each camera of the env provides.

    Args:
        config: LeRobot's.
        spec: of the env.
        given: ``policy.cameras``, the checkpoint's cameras in the order of the env's; empty if the
            names are the same.
        folder: of the checkpoint, for the message.

    Returns:
        Camera of the env -> key of the checkpoint, such as ``"observation.images.top"``.

    Raises:
        UserError: a camera of the env has no counterpart; the message names both lists.
    """
    if not spec.cameras:
        raise UserError(
            f"{config.type} sees pictures, but {spec.name} has no camera. Turn its cameras on."
        )
    known = {key.removeprefix(IMAGES): key for key in config.image_features}
    names = given or tuple(spec.cameras)
    if len(names) != len(spec.cameras) or any(n not in known for n in names):
        raise UserError(
            f"The cameras of {spec.name} are {', '.join(spec.cameras)}; those of {folder} are "
            f"{', '.join(known)}. Say in policy.cameras which of the latter takes each of the "
            "former, in their order, for example "
            f"policy.cameras=[{','.join(list(known)[: len(spec.cameras)])}]."
        )
    return {name: known[key] for name, key in zip(spec.cameras, names, strict=True)}


def set_features(config: Any, spec: EnvSpec, keep_cameras: bool) -> None:
    """Writes the env's observations and actions into LeRobot's config.

    Args:
        config: LeRobot's.
        spec: of the env.
        keep_cameras: keep the checkpoint's images; otherwise they become those of the env.

    Raises:
        UserError: the env has more dims than the model was made for.
    """
    from lerobot.configs import FeatureType, PolicyFeature

    for what, dims, most in (
        ("action", spec.action_dim, getattr(config, "max_action_dim", None)),
        ("proprio", spec.proprio_dim, getattr(config, "max_state_dim", None)),
    ):
        if most is not None and dims > most:
            raise UserError(
                f"{spec.name} has {dims} {what} dims, but this model was made for at most {most}."
            )
    if keep_cameras:
        features = (config.input_features or {}).items()
        images = {key: feature for key, feature in features if feature.type == FeatureType.VISUAL}
    else:
        images = {
            IMAGES + name: PolicyFeature(type=FeatureType.VISUAL, shape=(3, *size))
            for name, size in spec.cameras.items()
        }
    state = PolicyFeature(type=FeatureType.STATE, shape=(spec.proprio_dim,))
    config.input_features = {**images, STATE: state}
    config.output_features = {
        ACTION: PolicyFeature(type=FeatureType.ACTION, shape=(spec.action_dim,))
    }


def read_weights(lerobot: Any, folder: Path) -> None:
    """Loads ``model.safetensors`` into LeRobot's policy, and checks that every weight fits.

    LeRobot's own loader would keep random weights for those that do not.

    Args:
        lerobot: LeRobot's policy.
        folder: of the checkpoint.

    Raises:
        UserError: a weight is missing, unknown, or of another shape.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    # Bring the names to those of LeRobot: checkpoints of openpi have others, and the prefix
    # "model." may be missing.
    require_readable(folder / WEIGHTS)
    try:
        given = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"{folder / WEIGHTS} is damaged ({first_line(error)}). Use another copy of it."
        ) from error
    rename = getattr(lerobot, "_fix_pytorch_state_dict_keys", None)
    if rename and given.keys() != lerobot.state_dict().keys():
        given = rename(given, lerobot.config)
    wanted = lerobot.state_dict()
    # Each policy has one net: "model." or, in Diffusion Policy, "diffusion.".
    prefix = next(iter(wanted)).partition(".")[0] + "."
    given = {k if k.startswith(prefix) else prefix + k: v for k, v in given.items()}

    # List everything that does not fit. Two names may share one memory, such as tied embeddings; a
    # file holds it under one of them, which is enough.
    memory_given = {wanted[k].data_ptr() for k in given if k in wanted}
    given = {k: v for k, v in given.items() if k in wanted or not _old_statistics(k, prefix)}
    needed = {k: v for k, v in wanted.items() if k in given or v.data_ptr() not in memory_given}
    require_fit(given, needed, folder)
    lerobot.load_state_dict(given, strict=False)


def require_fit(given: dict[str, Tensor], wanted: dict[str, Tensor], source: Path) -> None:
    """Compares the names and shapes of two lists of tensors.

    Raises:
        UserError: they differ; the message names the first four differences.
    """
    wrong = [f"{k} is missing" for k in wanted if k not in given]
    wrong += [f"{k} is not part of it" for k in given if k not in wanted]
    wrong += [
        f"{k} is {tuple(v.shape)}, not {tuple(wanted[k].shape)}"
        for k, v in given.items()
        if k in wanted and v.shape != wanted[k].shape
    ]
    if wrong:
        more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise UserError(
            f"The weights in {source} do not fit its config.json: {'; '.join(wrong[:4])}{more}. "
            "Check that the files belong together."
        )


def _old_statistics(key: str, prefix: str) -> bool:
    """Whether this is a statistic that LeRobot kept among the weights before its version 0.4."""
    return key.startswith((f"{prefix}normalize_", f"{prefix}unnormalize_"))


def read_processors(
    config: Any, folder: Path, vlm: str, overrides: dict[str, Any] | None = None
) -> tuple[Any, Any]:
    """The pre- and post-processing pipelines that were saved with a checkpoint.

    Args:
        config: LeRobot's.
        folder: of the checkpoint.
        vlm: folder or hub id of another tokenizer; empty takes the one that the checkpoint names.
        overrides: step of the pre-processor -> arguments that replace those of the file.

    Raises:
        UserError: the checkpoint has no pipelines, or the tokenizer cannot be loaded.
    """
    from lerobot.policies import make_pre_post_processors

    if missing := [f"{name}.json" for name in PROCESSORS if not (folder / f"{name}.json").exists()]:
        raise UserError(
            f"{folder} holds no {missing[0]}: without it nobody knows how its inputs were "
            "normalised. It was written by a LeRobot before 0.4. Convert it with `python -m "
            f"lerobot.processor.migrate_policy_normalization --pretrained-path {folder}`."
        )
    pipelines = [read_pipeline(folder, name) for name in PROCESSORS]
    if any(s["registry_name"] == PICTURE_STEP for p in pipelines for s in p["steps"]):
        importlib.import_module("embodyrl.policies.vla.picture_step")  # registers it
    # The pipelines name the device of the training, which may not exist here.
    overrides = {**(overrides or {}), "device_processor": {"device": "cpu"}}
    if vlm:
        overrides["tokenizer_processor"] = {"tokenizer_name": vlm}
    with explain_hub_errors(vlm or tokenizer_name(folder)), described_by(folder):
        return make_pre_post_processors(
            config,
            str(folder),
            preprocessor_overrides=overrides,
            postprocessor_overrides={"device_processor": {"device": "cpu"}},
        )


def make_processors(
    config: Any, folder: Path, vlm: str, overrides: dict[str, Any] | None = None
) -> tuple[Any, Any]:
    """Pipelines for a model with random weights: those of the folder, or new ones.

    New pipelines have no statistics until they are fitted to data. A pipeline with ``overrides``
    cannot be new.
    """
    from lerobot.policies import make_pre_post_processors

    if overrides or (folder / f"{PROCESSORS[0]}.json").exists():
        return read_processors(config, folder, vlm, overrides)
    with explain_hub_errors(getattr(config, "vlm_model_name", "google/paligemma-3b-pt-224")):
        return make_pre_post_processors(config)


def tokenizer_name(folder: Path) -> str:
    """The tokenizer that a checkpoint's pre-processor names; empty if it names none."""
    for step in read_pipeline(folder, PROCESSORS[0])["steps"]:
        if "tokenizer_name" in step.get("config", {}):
            return str(step["config"]["tokenizer_name"])
    return ""


def build_lerobot_policy(config: Any) -> Any:
    """LeRobot's policy of a config, with random weights from torch's global generator."""
    from lerobot.policies import get_policy_class

    # The checkpoint holds all weights, so LeRobot need not download those of parts.
    if getattr(config, "pretrained_backbone_weights", None):
        config.pretrained_backbone_weights = None
    pretrained_vlm = getattr(config, "load_vlm_weights", False)
    if pretrained_vlm:
        config.load_vlm_weights = False
    with (
        explain_hub_errors(getattr(config, "vlm_model_name", config.type)),
        contextlib.redirect_stdout(io.StringIO()),
        described_by(f"config.json of a {config.type}"),
    ):
        lerobot: Any = get_policy_class(config.type)(config)
    if pretrained_vlm:
        config.load_vlm_weights = True
        # LeRobot would have loaded the language model in bfloat16.
        lerobot.model.vlm_with_expert.vlm.to(torch.bfloat16)
    return lerobot


def write_checkpoint(lerobot: Any, processors: Any, folder: str | Path) -> Path:
    """Writes what LeRobot's ``from_pretrained`` and ``make_pre_post_processors`` read.

    Args:
        lerobot: the policy.
        processors: the ``Processors`` that it was trained with.
        folder: must not exist, or be empty.

    Raises:
        UserError: the folder is not empty, or it cannot be written. No half-written checkpoint is
            left behind.
    """
    with writing_checkpoint(folder) as scratch:
        lerobot.config.device = None  # whoever loads it then uses the device that is there
        lerobot.save_pretrained(scratch)
        lerobot.config.device = "cpu"
        for pipeline in (processors.pre, processors.post):
            pipeline.save_pretrained(scratch)
    return Path(folder)


@contextlib.contextmanager
def writing_checkpoint(folder: str | Path) -> Iterator[Path]:
    """A folder to write into, which becomes ``folder`` at the end of the block.

    Raises:
        UserError: ``folder`` is not empty, or it cannot be written. No half-written checkpoint is
            left behind.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(
            f"{folder} is not empty. Give a new folder, so that two checkpoints do not mix."
        )
    try:
        with replacing_folder(folder) as scratch:
            yield scratch
    except OSError as error:
        raise UserError(
            f"{folder} could not be written ({error}). Free some space, or give another folder."
        ) from error
