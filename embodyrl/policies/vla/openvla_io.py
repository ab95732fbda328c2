"""Reads published OpenVLA checkpoints, without any code of theirs.

    config.json                            architecture, norm_stats of the data sets
    dataset_statistics.json                norm_stats of a fine-tuning; replaces those of config.json
    preprocessor_config.json               how pictures are resized and normalised
    tokenizer.json                         of Llama
    model*.safetensors, with an index      weights
    action_head--*_checkpoint.pt           OpenVLA-OFT: regression head
    proprio_projector--*_checkpoint.pt     OpenVLA-OFT: proprioception as a token

(openvla/openvla: prismatic/extern/hf/; moojink/openvla-oft: experiments/robot/openvla_utils.py.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from embodyrl.build import described_by
from embodyrl.errors import UserError, did_you_mean
from embodyrl.policies.safe_torch_load import read_state_dict
from embodyrl.policies.vla.lerobot_io import require_fit
from embodyrl.policies.vla.openvla_prompt import REMEDY
from embodyrl.policies.vla.prismatic import ImageTransform, PrismaticNet
from embodyrl.policies.vla.timm_vit import SIZES, ViTSize
from embodyrl.storage.env_spec import unlike
from embodyrl.storage.paths import files_of, require_readable
from embodyrl.storage.plain_data import ANYTHING, COUNT, FLAG, NUMBER, TEXT, first_line, inside
from embodyrl.storage.plain_data import read_json as read_plain
from embodyrl.storage.profiles import PROFILES
from embodyrl.types import EnvSpec

STATISTICS = {
    ...: {
        "action": {"q01": [NUMBER], "q99": [NUMBER], "mask?": [FLAG], ...: ANYTHING},
        "proprio?": {"q01": [NUMBER], "q99": [NUMBER], "mask?": [FLAG], ...: ANYTHING},
        ...: ANYTHING,
    }
}
"""Structure of ``norm_stats``: data set -> quantiles of every dim."""
CONFIG = {
    "model_type": TEXT,
    "text_config": {...: ANYTHING},
    "norm_stats?": ANYTHING,
    "n_action_bins?": COUNT,
    "pad_token_id?": COUNT,
    "pad_to_multiple_of?": COUNT,
    "timm_model_ids?": [TEXT],
    "image_sizes?": [COUNT],
    "use_fused_vision_backbone?": FLAG,
    "vision_sizes?": [{...: ANYTHING}],
    ...: ANYTHING,
}
"""Structure of config.json. ``vision_sizes`` is ours: the sizes of encoders that timm has not."""
PICTURES = {
    "image_resize_strategy": TEXT,
    "input_sizes": [[COUNT]],
    "interpolations": [TEXT],
    "means": [[NUMBER]],
    "stds": [[NUMBER]],
    ...: ANYTHING,
}
"""Structure of preprocessor_config.json."""
FAMILIES = {"libero_": "libero_openvla"}
"""Start of a data set's name -> profile of its conventions."""


def read_openvla_config(folder: Path) -> dict[str, Any]:
    """config.json of an OpenVLA.

    Raises:
        UserError: there is none, it is one of another model, or one with another architecture.
    """
    file = folder / "config.json"
    require_readable(file)
    if not file.is_file():
        raise UserError(
            f"{folder} holds no config.json, so it is no OpenVLA checkpoint. Give the folder with "
            "it."
        )
    kind = read_plain(file, {...: ANYTHING}, REMEDY).get("model_type")
    if kind != "openvla":
        raise UserError(
            f"{folder} is a checkpoint of {kind or 'no transformers model'}, not of openvla. Give "
            "an OpenVLA checkpoint, for example openvla/openvla-7b."
        )
    config = read_plain(file, CONFIG, REMEDY)
    text = config["text_config"].get("model_type", "llama")
    if not config.get("use_fused_vision_backbone", True) or text != "llama":
        raise UserError(
            f"{folder} has one image encoder, or a language model of the kind {text}. Only DINOv2 "
            "and SigLIP with a Llama are supported, as in openvla/openvla-7b."
        )
    return config


def build_openvla_net(config: dict[str, Any], folder: Path, weights: bool) -> PrismaticNet:
    """The network of a config.json, with the checkpoint's weights or random ones.

    Args:
        config: see ``read_openvla_config``.
        folder: of the checkpoint.
        weights: read its weights, in the number format of the file.

    Raises:
        UserError: the config names an unknown encoder, or the weights do not fit.
    """
    from transformers import LlamaConfig

    # Weights are built in float32 here and cast by the policy.
    left_out = ("torch_dtype", "dtype")
    text = {k: v for k, v in config["text_config"].items() if k not in left_out}
    try:
        llama = LlamaConfig(**text)
    except Exception as error:  # transformers' validators raise errors of their own
        raise UserError(
            f"The text_config in {folder / 'config.json'} is malformed ({first_line(error)}). "
            f"{REMEDY}"
        ) from error
    sizes = _encoder_sizes(config, folder)
    image_size = config.get("image_sizes", [224])[0]
    if not weights:
        return PrismaticNet(sizes, image_size, llama)
    # On the meta device nothing is allocated; the weights of the file take the place of the
    # parameters. What no file holds, the frequencies of the rotary embedding, is computed anew.
    with torch.device("meta"):
        net = PrismaticNet(sizes, image_size, llama)
    _read_weights(net, folder)
    language_model = net.language_model.model
    language_model.rotary_emb = type(language_model.rotary_emb)(config=llama)
    return net


def _encoder_sizes(config: dict[str, Any], folder: Path) -> list[ViTSize]:
    if "vision_sizes" in config:
        with described_by(folder / "config.json"):
            return [ViTSize(**size) for size in config["vision_sizes"]]
    names = config.get("timm_model_ids", list(SIZES))
    for name in names:
        if name not in SIZES:
            raise UserError(
                f"{folder} has the image encoder {name}, which is not supported. "
                f"{did_you_mean(name, SIZES)}"
            )
    if len(names) != 2:
        raise UserError(f"{folder} names {len(names)} image encoders, not two. {REMEDY}")
    return [SIZES[name] for name in names]


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: one, or the shards that its index names.

    Raises:
        UserError: there are none, or a shard is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        table = read_plain(index, {"weight_map": {...: TEXT}, ...: ANYTHING}, REMEDY)
        names = sorted(set(table["weight_map"].values()))
        files = [inside(folder, name, links=True) for name in names]
    else:
        files = [folder / "model.safetensors"]
    # All of them must be there before the first one is read, which takes minutes.
    for file in files:
        require_readable(file)
    if missing := [file.name for file in files if not file.is_file()]:
        raise UserError(
            f"{folder} lacks {len(missing)} of its {len(files)} files of weights: "
            f"{', '.join(missing[:4])}. Download it again, or set policy.random_weights=true to "
            "train this architecture from nothing."
        )
    return files


def _read_weights(net: nn.Module, folder: Path) -> None:
    """Replaces the parameters of a network by the tensors of a checkpoint, shard by shard.

    Raises:
        UserError: a file is damaged, or a weight is missing, unknown or of another shape.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    # A shard at a time, so that two copies of the model are never in memory.
    wanted = net.state_dict()
    found: set[str] = set()
    for file in _weight_files(folder):
        try:
            part = load_file(file)
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"{file} is damaged ({first_line(error)}). {REMEDY}") from error
        require_fit(part, {k: v for k, v in wanted.items() if k in part}, folder)
        net.load_state_dict(part, strict=False, assign=True)
        found |= part.keys()
    require_fit({k: v for k, v in wanted.items() if k in found}, wanted, folder)


def read_component(module: nn.Module, folder: Path, name: str) -> None:
    """Loads ``NAME--*_checkpoint.pt`` into a part beside the network (OpenVLA-OFT).

    Args:
        module: the part.
        folder: of the checkpoint.
        name: ``action_head`` or ``proprio_projector``.

    Raises:
        UserError: there is no such file, there are several, or it does not fit.
    """
    files = files_of(folder, f"{name}--*checkpoint.pt")
    if len(files) != 1:
        raise UserError(
            f"{folder} holds {len(files)} files {name}--*_checkpoint.pt, and one is needed. Keep the "
            "one of the step that you want."
        )
    # Trained on several GPUs, every name starts with "module.".
    given = {k.removeprefix("module."): v for k, v in read_state_dict(files[0]).items()}
    require_fit(given, module.state_dict(), files[0])
    module.load_state_dict(given)


def read_norm_stats(config: dict[str, Any], folder: Path, key: str) -> tuple[str, dict[str, Any]]:
    """The statistics of one data set, and its name.

    Args:
        config: see ``read_openvla_config``.
        folder: of the checkpoint.
        key: name of the data set; empty if there is only one.

    Raises:
        UserError: there is no such data set, or there are several and none is named.
    """
    # OpenVLA-OFT keeps the statistics of its data in a file of their own.
    file = folder / "dataset_statistics.json"
    if file.is_file():
        stats = read_plain(file, STATISTICS, REMEDY)
    else:
        file = folder / "config.json"
        stats = read_plain(file, {"norm_stats": STATISTICS, ...: ANYTHING}, REMEDY)["norm_stats"]
    if not key and len(stats) != 1:
        raise UserError(
            f"{file} has the statistics of {len(stats)} data sets. Say in policy.unnorm_key whose "
            f"actions to use: {', '.join(sorted(stats)[:40]) or 'it has none'}."
        )
    # The only one, or the one that was named.
    key = key or next(iter(stats))
    if key not in stats:
        raise UserError(
            f"policy.unnorm_key is {key!r}, and {file} has no such data set. "
            f"{did_you_mean(key, stats)}"
        )
    for name in ("action", "proprio"):
        part = stats[key].get(name)
        if part and len({len(part[k]) for k in ("q01", "q99", "mask") if k in part}) != 1:
            raise UserError(f"{file}: the {name} of {key} has lists of other lengths. {REMEDY}")
    return key, stats[key]


def check_family(key: str, spec: EnvSpec) -> None:
    """Refuses an env whose pictures or actions mean something else than those of a data set.

    Args:
        key: name of the data set; one of an unknown family says nothing.
        spec: of the env.

    Raises:
        UserError: naming what differs, and what to give.
    """
    # The name of the data set tells its family.
    for start, profile in FAMILIES.items():
        if key.startswith(start):
            for name in unlike(PROFILES[profile].conventions, spec.conventions):
                if name == "fit":  # how a data set's pictures were resized; an env draws its own
                    continue
                raise UserError(
                    f"{key} has {name}={getattr(PROFILES[profile].conventions, name)!r}, and "
                    f"{spec.name} has {getattr(spec.conventions, name)!r}. Set "
                    f"env.profile={profile}."
                )


def read_pictures(config: dict[str, Any], folder: Path, crop_area: float) -> ImageTransform:
    """How pictures become inputs, from preprocessor_config.json.

    Raises:
        UserError: there is no such file, or it asks for something else than stretching to a square
            by bicubic interpolation.
    """
    file = folder / "preprocessor_config.json"
    said = read_plain(file, PICTURES, REMEDY)
    size = config.get("image_sizes", [224])[0]
    wrong = [
        f"{key} is {value!r}"
        for key, value, right in (
            ("image_resize_strategy", said["image_resize_strategy"], "resize-naive"),
            ("interpolations", said["interpolations"], ["bicubic"] * 2),
            ("input_sizes", said["input_sizes"], [[3, size, size]] * 2),
        )
        if value != right
    ]
    if [len(x) for key in ("means", "stds") for x in said[key]] != [3] * 4:
        wrong.append("means and stds are not three numbers for each of two encoders")
    if wrong:
        raise UserError(f"{file}: {'; '.join(wrong)}, which is not supported. {REMEDY}")
    return ImageTransform(size, said["means"], said["stds"], crop_area)
