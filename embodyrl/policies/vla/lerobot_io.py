"""LeRobot checkpoints: found, read and written, and refused in words where they cannot be used."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from embodyrl.errors import MissingDependencyError, UserError, did_you_mean
from embodyrl.policies.vla.processors import ACTION, IMAGES, STATE
from embodyrl.types import EnvSpec

WEIGHTS = "model.safetensors"
PROCESSORS = ("policy_preprocessor", "policy_postprocessor")


def require() -> None:
    """Refuses to go on without the packages of the extra ``vla``."""
    try:
        for package in ("transformers", "num2words", "lerobot.policies"):
            importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(
            f"SmolVLA, pi0 and pi0.5 need LeRobot and transformers, of which {error.name or error} "
            "is not here: pip install 'embodyrl[vla]'."
        ) from error


def find(path: str, revision: str = "", weights: bool = True) -> Path:
    """The folder of a checkpoint: one on this machine, or a download (or its cached copy) from the Hugging Face hub.

    Args:
        path: the folder, or the id.
        revision: of an id.
        weights: whether they are wanted too.

    Raises:
        UserError: there is none, it may not be read, or the hub cannot be reached.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        near = (
            [p.name for p in folder.parent.iterdir() if p.is_dir()]
            if folder.parent.is_dir()
            else []
        )
        hint = (
            did_you_mean(folder.name, near)
            if near
            else "Give a folder, or an id of the hub like lerobot/pi0_base."
        )
        raise UserError(f"policy.pretrained is {path!r}, and there is no such folder. {hint}")
    from huggingface_hub import snapshot_download

    with explained(path):
        patterns = ["*.json", "*.safetensors"] if weights else ["*.json"]
        return Path(snapshot_download(path, revision=revision or None, allow_patterns=patterns))


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Turns what the Hugging Face libraries raise about ``name`` into a sentence with the mend."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:
        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(cause)

        def among(*kinds: type[BaseException]) -> bool:
            return any(isinstance(e, kinds) for e in chain)

        if among(GatedRepoError):
            what = (
                "is gated: accept its licence on its page at huggingface.co, then log in with `hf "
                "auth login` (or set HF_TOKEN)"
            )
        elif among(RepositoryNotFoundError, RevisionNotFoundError):
            what = "is not on the Hugging Face hub, or is private: check the id and policy.revision, or `hf auth login`"
        elif among(OfflineModeIsEnabled, LocalEntryNotFoundError, HfHubHTTPError, ConnectionError):
            what = (
                "is not on this machine, and the Hugging Face hub cannot be reached: download it "
                f"where there is a network (`hf download {name}`), and give the folder"
            )
        else:
            first = str(error).strip().partition("\n")[0]
            what = f"cannot be used ({first[:300]}): give a folder that holds it, or an id of the Hugging Face hub"
        raise UserError(f"{name} {what}.") from error


def read_config(folder: Path, name: str, weights: bool = True) -> Any:
    """LeRobot's config in a checkpoint's folder.

    Raises:
        UserError: there is none, it is another model's, another version of LeRobot wrote it, or,
            where ``weights`` are wanted, none lie beside it.
    """
    from lerobot.configs import PreTrainedConfig

    try:
        kind = json.loads((folder / "config.json").read_text()).get("type")
    except FileNotFoundError:
        raise UserError(
            f"{folder} holds no config.json, so it is no LeRobot checkpoint. Give the folder with "
            "it."
        ) from None
    except (ValueError, AttributeError) as error:
        raise UserError(
            f"{folder / 'config.json'} is damaged ({error}). Use another copy of the checkpoint."
        ) from error
    if kind != name:
        other = (
            f"Use policy.name={kind}."
            if kind in ("smolvla", "pi0", "pi05")
            else "Give a checkpoint of this kind."
        )
        raise UserError(
            f"{folder} is a checkpoint of {kind or 'no LeRobot policy'}, not of {name}. {other}"
        )
    if weights and not (folder / WEIGHTS).exists():
        raise UserError(
            f"{folder} holds no {WEIGHTS}. Give a checkpoint that does, or set "
            "policy.random_weights=true to train this architecture from nothing."
        )
    try:
        return PreTrainedConfig.from_pretrained(folder)
    except Exception as error:  # draccus has a family of its own
        first = " ".join(str(error).split())[:300]
        raise UserError(
            f"{folder / 'config.json'} does not fit the installed LeRobot: {first}. It may come "
            "from another version; mend the key, or install the version that wrote it."
        ) from error


def camera_keys(config: Any, spec: EnvSpec, given: tuple[str, ...], folder: Path) -> dict[str, str]:
    """Camera of the env -> key of the checkpoint.

    Raises:
        UserError: one of the env's cameras has no counterpart; both lists are named.
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
    """Tells LeRobot's config what the env gives and takes."""
    from lerobot.configs import FeatureType, PolicyFeature

    for what, dims, most in (
        ("action", spec.action_dim, config.max_action_dim),
        ("proprio", spec.proprio_dim, config.max_state_dim),
    ):
        if dims > most:
            raise UserError(
                f"{spec.name} has {dims} {what} dims, but this model was made for at most {most}."
            )
    images = {
        k: v for k, v in (config.input_features or {}).items() if v.type == FeatureType.VISUAL
    }
    if not keep_cameras:
        sizes = spec.cameras.items()
        images = {
            IMAGES + n: PolicyFeature(type=FeatureType.VISUAL, shape=(3, *size))
            for n, size in sizes
        }
    state = PolicyFeature(type=FeatureType.STATE, shape=(spec.proprio_dim,))
    config.input_features = {**images, STATE: state}
    config.output_features = {
        ACTION: PolicyFeature(type=FeatureType.ACTION, shape=(spec.action_dim,))
    }


def read_weights(lerobot: Any, folder: Path) -> None:
    """Loads ``model.safetensors``; LeRobot's own loader goes on with random weights where this one refuses.

    Raises:
        UserError: a weight is missing, unknown, or of another shape.
    """
    from safetensors.torch import load_file

    given = load_file(folder / WEIGHTS)
    fix = getattr(lerobot, "_fix_pytorch_state_dict_keys", None)
    if fix and given.keys() != lerobot.state_dict().keys():  # names of openpi's own checkpoints
        given = fix(given, lerobot.config)
    given = {k if k.startswith("model.") else f"model.{k}": v for k, v in given.items()}
    wanted = lerobot.state_dict()
    # One memory may have two names, of which a file holds one.
    places = {wanted[k].data_ptr() for k in given if k in wanted}
    wrong = [
        f"{k} is missing"
        for k, v in wanted.items()
        if k not in given and v.data_ptr() not in places
    ]
    wrong += [f"{k} is not part of it" for k in given if k not in wanted and not _old_statistics(k)]
    wrong += [
        f"{k} is {tuple(v.shape)}, not {tuple(wanted[k].shape)}"
        for k, v in given.items()
        if k in wanted and v.shape != wanted[k].shape
    ]
    if wrong:
        raise UserError(
            f"The weights in {folder} do not fit its config.json: "
            f"{'; '.join(wrong[:4])}{f'; and {len(wrong) - 4} more' if len(wrong) > 4 else ''}. "
            "Check that the files belong together."
        )
    lerobot.load_state_dict({k: v for k, v in given.items() if k in wanted}, strict=False)


def _old_statistics(key: str) -> bool:
    return key.startswith(("model.normalize_", "model.unnormalize_"))


def read_processors(config: Any, folder: Path, vlm: str) -> tuple[Any, Any]:
    """The pre- and post-processing pipelines that were saved with a checkpoint.

    Raises:
        UserError: there are none, or the tokenizer cannot be had.
    """
    from lerobot.policies import make_pre_post_processors

    if missing := [f"{name}.json" for name in PROCESSORS if not (folder / f"{name}.json").exists()]:
        raise UserError(
            f"{folder} holds no {missing[0]}: without it nobody knows how its inputs were "
            "normalised. It comes from before LeRobot 0.4; `python -m "
            f"lerobot.processor.migrate_policy_normalization --pretrained-path {folder}` makes one "
            "with it."
        )
    # The device that it was trained on may not exist here; ``Processors`` leaves tensors where they
    # are.
    overrides: dict[str, Any] = {"device_processor": {"device": "cpu"}}
    if vlm:
        overrides["tokenizer_processor"] = {"tokenizer_name": vlm}
    with explained(vlm or tokenizer_name(folder)):
        return make_pre_post_processors(
            config,
            str(folder),
            preprocessor_overrides=overrides,
            postprocessor_overrides={"device_processor": {"device": "cpu"}},
        )


def make_processors(config: Any, folder: Path, vlm: str) -> tuple[Any, Any]:
    """New pipelines, without statistics, for a model that is trained from nothing."""
    from lerobot.policies import make_pre_post_processors

    if (folder / f"{PROCESSORS[0]}.json").exists():
        return read_processors(config, folder, vlm)
    with explained(getattr(config, "vlm_model_name", "google/paligemma-3b-pt-224")):
        return make_pre_post_processors(config)


def tokenizer_name(folder: Path) -> str:
    """What a checkpoint's pre-processor names as its tokenizer."""
    steps = json.loads((folder / f"{PROCESSORS[0]}.json").read_text()).get("steps", [])
    return next(
        (
            s["config"].get("tokenizer_name", "")
            for s in steps
            if "tokenizer_name" in s.get("config", {})
        ),
        "",
    )


def build(config: Any) -> Any:
    """LeRobot's policy of a config, with random weights from torch's global generator."""
    from lerobot.policies import get_policy_class

    pretrained_vlm = getattr(config, "load_vlm_weights", False)
    if pretrained_vlm:
        config.load_vlm_weights = False  # the checkpoint holds them: nothing to download
    with (
        explained(getattr(config, "vlm_model_name", config.type)),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        lerobot: Any = get_policy_class(config.type)(config)
    if pretrained_vlm:
        config.load_vlm_weights = True
        lerobot.model.vlm_with_expert.vlm.to(torch.bfloat16)  # as LeRobot has it then
    return lerobot


def write(lerobot: Any, processors: Any, folder: str | Path) -> Path:
    """Writes what LeRobot's ``from_pretrained`` and ``make_pre_post_processors`` read.

    Args:
        lerobot: the policy.
        processors: the ``Processors`` that it was trained with.
        folder: must not exist, or be empty.

    Raises:
        UserError: there is something already, or it cannot be written; nothing is left
            half-written.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(
            f"{folder} is not empty. Give a new folder, so that two checkpoints do not mix."
        )
    scratch = folder.with_name(f".{folder.name}.tmp")
    try:
        scratch.mkdir(parents=True)
        lerobot.config.device = None  # LeRobot then takes what there is
        lerobot.save_pretrained(scratch)
        lerobot.config.device = "cpu"
        for pipeline in (processors.pre, processors.post):
            pipeline.save_pretrained(scratch)
        if folder.exists():
            folder.rmdir()
        scratch.rename(folder)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise UserError(
            f"{folder} could not be written ({error}). Free some space, or give another folder."
        ) from error
    return folder
