"""Makes the config of a VLA without pretrained weights: a small SmolVLA, or one in real size.

The result is a folder for ``policy.pretrained`` with ``policy.random_weights=true``. It serves for
tests, for measurements, and for training the architecture from random weights where pretrained ones
are not available. Nothing is downloaded: the tokenizer is trained on the sentences of the task.
"""

# pyright: reportCallIssue=false, reportAttributeAccessIssue=false
# transformers fills in its configs' fields and the names of its modules at run time.
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from embodyrl.policies.vla.lerobot_io import require_lerobot


def make_small_smolvla(
    folder: str | Path,
    sentences: Iterable[str],
    *,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    vision_layers: int = 2,
    image_size: int = 64,
    patch_size: int = 8,
    max_dim: int = 32,
) -> Path:
    """Writes the configs of a small SmolVLA.

    The folder gets LeRobot's config.json, and ``vlm/`` gets the language model's config, tokenizer
    and image processor.

    Args:
        folder: to make.
        sentences: instructions whose words become tokens; any other text is spelled in bytes.
        width: of the tokens; the action expert has three quarters of it.
        layers: of language model and expert.
        heads: attention heads; must divide ``width``.
        vision_layers: of the image encoder.
        image_size: images are resized to this many pixels; a multiple of twice ``patch_size``.
        patch_size: of the image encoder; four patches make a token.
        max_dim: width that proprioception and actions are padded to.
    """
    require_lerobot()
    tokenizer = _smolvlm_tokenizer(sentences)
    attention = {"num_attention_heads": heads, "intermediate_size": 4 * width, "hidden_size": width}
    text = {
        **attention,
        "head_dim": width // heads,
        "num_key_value_heads": max(1, heads // 2),
        "vocab_size": len(tokenizer),
    }
    vision = {
        **attention,
        "num_hidden_layers": vision_layers,
        "image_size": image_size,
        "patch_size": patch_size,
    }
    _write_smolvlm(Path(folder) / "vlm", tokenizer, vision, text, layers, scale=2)
    return _write_smolvla(Path(folder), layers, image_size, max_dim)


def make_libero_smolvla(
    folder: str | Path, sentences: Iterable[str], *, n_action_steps: int = 10, **sizes: int
) -> Path:
    """A small SmolVLA with random weights, in the layout of the public LIBERO checkpoints.

    Args:
        folder: to make.
        sentences: see ``make_small_smolvla``.
        n_action_steps: actions that are executed of the 50 planned ones.
        sizes: see ``make_small_smolvla``.
    """
    from lerobot.configs import PreTrainedConfig

    folder = Path(folder)
    make_small_smolvla(folder, sentences, **sizes)
    config: Any = PreTrainedConfig.from_pretrained(folder)
    config.n_action_steps = n_action_steps
    return write_libero_checkpoint(config, folder)


def write_libero_checkpoint(config: Any, folder: Path) -> Path:
    """Fills a folder like ``lerobot/pi05_libero_finetuned`` on the hub, with random weights.

    It gets the features of LeRobot's LIBERO data (cameras ``image`` and ``image2``, a state of
    eight numbers, seven actions), and statistics of about the size of theirs.

    Args:
        config: LeRobot's, of a SmolVLA, pi0, pi0.5 or pi0-FAST.
        folder: to write.
    """
    import torch
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies import get_policy_class, make_pre_post_processors

    images = ("observation.images.image", "observation.images.image2")
    config.input_features = {
        **{key: PolicyFeature(type=FeatureType.VISUAL, shape=(3, 256, 256)) for key in images},
        "observation.state": PolicyFeature(type=FeatureType.STATE, shape=(8,)),
    }
    config.output_features = {"action": PolicyFeature(type=FeatureType.ACTION, shape=(7,))}
    config.load_vlm_weights = False
    stats = {key: _spread([0.5] * 3, [0.25] * 3) for key in images}
    stats = {
        key: {name: value.view(3, 1, 1) for name, value in values.items()}
        for key, values in stats.items()
    }
    stats["observation.state"] = _spread(*LIBERO_STATE)
    stats["action"] = _spread(*LIBERO_ACTION)
    pipelines = make_pre_post_processors(config, dataset_stats=stats)
    get_policy_class(config.type)(config).to(torch.float32).save_pretrained(folder)
    for pipeline in pipelines:
        pipeline.save_pretrained(folder)
    return folder


LIBERO_STATE = (
    [-0.05, 0.03, 0.76, 2.97, -0.22, -0.13, 0.027, -0.027],
    [0.11, 0.15, 0.38, 0.34, 0.91, 0.33, 0.014, 0.014],
)
"""Rough mean and standard deviation of the state of LeRobot's LIBERO data."""
LIBERO_ACTION = (
    [0.06, 0.09, -0.09, 0.0, 0.005, -0.006, -0.03],
    [0.33, 0.38, 0.44, 0.04, 0.06, 0.08, 1.0],
)
"""The same of its actions."""


def _spread(mean: list[float], std: list[float]) -> dict[str, Any]:
    """Statistics of a data set, as LeRobot names them, of a mean and a standard deviation."""
    import torch

    middle, width = torch.tensor(mean), 2 * torch.tensor(std)
    ends = {"min": middle - width, "max": middle + width}
    quantiles = {"q01": middle - width, "q99": middle + width}
    return {"mean": middle, "std": width / 2, **ends, **quantiles}


def make_smolvla(folder: str | Path, sentences: Iterable[str]) -> Path:
    """As ``make_small_smolvla``, in the real size (450 M parameters), for measurements."""
    require_lerobot()
    vision = {
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "image_size": 512,
        "patch_size": 16,
    }
    text = {
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "intermediate_size": 2560,
        "hidden_size": 960,
        "vocab_size": 49280,
    }
    tokenizer = _smolvlm_tokenizer(sentences)
    _write_smolvlm(Path(folder) / "vlm", tokenizer, vision, text, layers=32, scale=4)
    # SmolVLA uses the first half of the language model's 32 layers.
    return _write_smolvla(Path(folder), layers=16, image_size=512, max_dim=32)


def make_pi0(folder: str | Path, sentences: Iterable[str]) -> Path:
    """The config and pipelines of pi0 in the real size (3.3 B parameters), for measurements.

    The tokenizer is trained on ``sentences``: PaliGemma's, which LeRobot would load, is gated.
    """
    require_lerobot()
    from lerobot.policies.pi0.configuration_pi0 import PI0Config
    from lerobot.policies.pi0.processor_pi0 import Pi0NewLineProcessor
    from lerobot.processor import (
        TokenizerProcessorStep,
        make_default_policy_processor_steps,
        make_policy_processor_pipelines,
    )

    folder = Path(folder)
    _smolvlm_tokenizer(sentences).save_pretrained(folder / "vlm")
    config = PI0Config(device="cpu")
    tokenize = TokenizerProcessorStep(
        tokenizer_name=str((folder / "vlm").resolve()),
        max_length=config.tokenizer_max_length,
        padding_side="right",
        padding="max_length",
    )
    # The same steps as LeRobot's make_pi0_pre_post_processors, with our tokenizer.
    steps = make_default_policy_processor_steps(config, None)
    input_steps = [
        steps.rename_observations,
        steps.add_batch_dim,
        Pi0NewLineProcessor(),
        tokenize,
        steps.to_device,
        steps.normalize,
    ]
    pipelines = make_policy_processor_pipelines(
        input_steps=input_steps, output_steps=[steps.unnormalize, steps.to_cpu]
    )
    config._save_pretrained(folder)
    for pipeline in pipelines:
        pipeline.save_pretrained(folder)
    return folder


def _write_smolvlm(
    folder: Path, tokenizer: Any, vision: Any, text: Any, layers: int, scale: int
) -> None:
    """Writes the language model's config, tokenizer and image processor.

    Args:
        folder: to write.
        tokenizer: of the instructions.
        vision: config of the image encoder.
        text: config of the language model.
        layers: of the language model.
        scale: scale * scale image patches make a token.
    """
    from transformers import (
        SmolVLMConfig,
        SmolVLMImageProcessor,
        SmolVLMProcessor,
        SmolVLMVideoProcessor,
    )

    size = {"longest_edge": vision["image_size"]}
    tokens_per_side = vision["image_size"] // vision["patch_size"] // scale
    SmolVLMProcessor(
        SmolVLMImageProcessor(size=size, max_image_size=size),
        tokenizer,
        SmolVLMVideoProcessor(size=size, max_image_size=size),
        image_seq_len=tokens_per_side**2,
    ).save_pretrained(folder)
    SmolVLMConfig(
        vision_config=vision,
        text_config={
            **text,
            "model_type": "llama",
            "num_hidden_layers": layers,
            "pad_token_id": tokenizer.pad_token_id,
        },
        scale_factor=scale,
        image_token_id=tokenizer.get_vocab()["<image>"],
    ).save_pretrained(folder)


def _write_smolvla(folder: Path, layers: int, image_size: int, max_dim: int) -> Path:
    """Writes LeRobot's config of a SmolVLA.

    It uses the first ``layers`` layers of the language model in ``folder/vlm``.
    """
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig

    SmolVLAConfig(
        vlm_model_name=str((folder / "vlm").resolve()),
        num_vlm_layers=layers,
        resize_imgs_with_padding=(image_size, image_size),
        max_state_dim=max_dim,
        max_action_dim=max_dim,
        device="cpu",
    )._save_pretrained(folder)
    return folder


def _smolvlm_tokenizer(sentences: Iterable[str]) -> Any:
    """A byte-pair tokenizer of ``sentences`` with the special tokens that SmolVLM needs."""
    extra = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    }
    return train_tokenizer(sentences, ["<pad>", *extra.values()], extra)


def train_tokenizer(
    sentences: Iterable[str], special: Sequence[str], named: Mapping[str, str] | None = None
) -> Any:
    """A byte-pair tokenizer of ``sentences``; any other text is spelled in bytes.

    Args:
        sentences: whose words become tokens.
        special: tokens that no text is split into; ``<pad>`` must be one.
        named: attributes of the tokenizer that are such tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=list(special),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", extra_special_tokens=dict(named or {})
    )
