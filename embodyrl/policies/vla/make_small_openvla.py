"""Makes the JSON files of an OpenVLA without pretrained weights, small or in real size.

The result is a folder for ``policy.pretrained`` with ``policy.random_weights=true``, in the layout
of the published checkpoints. Nothing is downloaded: the tokenizer is trained on the sentences of
the task.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from embodyrl.policies.vla.timm_vit import SIZES, ViTSize

PICTURES = {
    "image_resize_strategy": "resize-naive",
    "interpolations": ["bicubic", "bicubic"],
    "means": [[0.485, 0.456, 0.406], [0.5, 0.5, 0.5]],
    "stds": [[0.229, 0.224, 0.225], [0.5, 0.5, 0.5]],
}
"""What openvla-7b's preprocessor_config.json says beside sizes: ImageNet's and SigLIP's colours."""


def make_small_openvla(
    folder: str | Path,
    sentences: Iterable[str],
    *,
    statistics: dict[str, Any],
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    vision_width: int = 32,
    vision_layers: int = 3,
    image_size: int = 28,
    patch_size: int = 14,
) -> Path:
    """Writes the JSON files of a small OpenVLA.

    Args:
        folder: to make.
        sentences: instructions whose words become tokens; any other text is spelled in bytes.
        statistics: data set -> ``{"action": {"q01", "q99", "mask"}, "proprio": ...}``.
        width: of the language model's tokens.
        layers: of the language model.
        heads: attention heads, of language model and image encoders.
        vision_width: of DINOv2's tokens; SigLIP's are one and a half times as wide.
        vision_layers: of the image encoders, the last of which is not used.
        image_size: pixels of a picture's side.
        patch_size: pixels of a patch's side.
    """
    sizes = [
        ViTSize(vision_width, vision_layers, heads, 2 * vision_width, patch_size, 4, True, False),
        ViTSize(
            3 * vision_width // 2,
            vision_layers,
            heads,
            3 * vision_width,
            patch_size,
            0,
            False,
            True,
        ),
    ]
    text = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    vision = {"vision_sizes": [asdict(size) for size in sizes], "image_sizes": [image_size] * 2}
    return _write(Path(folder), sentences, text, vision, statistics)


def make_openvla(
    folder: str | Path, sentences: Iterable[str], *, statistics: dict[str, Any]
) -> Path:
    """As ``make_small_openvla``, in the real size (7.5 B parameters), for measurements."""
    vision = {"timm_model_ids": list(SIZES), "image_sizes": [224, 224]}
    return _write(Path(folder), sentences, {"vocab_size": 32064}, vision, statistics)


def _write(
    folder: Path, sentences: Iterable[str], text: dict[str, Any], vision: Any, statistics: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_llama_like(sentences)
    tokenizer.save(str(folder / "tokenizer.json"))
    words = tokenizer.get_vocab_size()
    # The pad token is the first of the 64 rows behind the vocabulary.
    config = {
        "model_type": "openvla",
        "use_fused_vision_backbone": True,
        **vision,
        "text_config": {"model_type": "llama", "vocab_size": words + 64, **text},
        "n_action_bins": 256,
        "pad_to_multiple_of": 64,
        "norm_stats": statistics,
    }
    config["pad_token_id"] = config["text_config"]["vocab_size"] - 64
    config["text_config"]["pad_token_id"] = config["pad_token_id"]
    pictures = {**PICTURES, "input_sizes": [[3, size, size] for size in vision["image_sizes"]]}
    for name, content in (("config", config), ("preprocessor_config", pictures)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2))
    return folder


def _train_llama_like(sentences: Iterable[str]) -> Any:
    """A byte-pair tokenizer that treats text as Llama 2's does: a "\u2581" for every space."""
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        normalizers,
        processors,
        trainers,
    )

    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(  # type: ignore[assignment]
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # type: ignore[assignment]
    prompts = [f"In: What action should the robot take to {s.lower()}?\nOut:" for s in sentences]
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=special,
        initial_alphabet=["\u2581"],
        max_token_length=6,  # otherwise a prompt would become a single token
        show_progress=False,
    )
    tokenizer.train_from_iterator(prompts, trainer)
    # Room for the tokens of the actions, which stand at the end of the vocabulary.
    tokenizer.add_tokens([AddedToken(f"<action{i}>") for i in range(256)])
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A", special_tokens=[("<s>", start)]
    )
    return tokenizer
