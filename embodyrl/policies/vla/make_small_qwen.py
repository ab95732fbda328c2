"""Writes a small Qwen3-VL: a config and a tokenizer, for random weights.

Weights of the published models cannot be had everywhere; the code that loads and trains them is the
same for a small one:

    from embodyrl.policies.vla.make_small_qwen import make_small_qwen3_vl
    make_small_qwen3_vl("small_qwen", ["pick up the red block"])
    # embodyrl train ... policy.name=token_vla policy.vlm=small_qwen policy.random_weights=true
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from embodyrl.policies.vla.lerobot_io import require_lerobot
from embodyrl.policies.vla.make_small import train_tokenizer

IMAGE = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
"""Tokens that stand for an image, a film, and their begin and end."""


def make_small_qwen3_vl(
    folder: str | Path,
    sentences: Iterable[str],
    *,
    width: int = 64,
    layers: int = 4,
    heads: int = 4,
    vision_layers: int = 3,
    patch_size: int = 16,
) -> Path:
    """Writes config and tokenizer of a small Qwen3-VL.

    Args:
        folder: to make.
        sentences: instructions whose words become tokens; any other text is spelled in bytes.
        width: of the tokens.
        layers: of the language model.
        heads: attention heads; must divide ``width``, and ``width / heads`` must divide by 4.
        vision_layers: of the image encoder, at least 2. The tokens of the first are also added to
            the language model's first layer.
        patch_size: of the image encoder; four patches make a token.
    """
    require_lerobot()
    from transformers import Qwen3VLConfig

    tokenizer = train_tokenizer(sentences, [*IMAGE, "<pad>"])
    ids = dict(zip(IMAGE, tokenizer.convert_tokens_to_ids([*IMAGE]), strict=True))
    attention = {"intermediate_size": 4 * width, "hidden_size": width}
    head = width // heads
    # A rotary embedding turns pairs of dims; time, row and column share them.
    turned = head // 2
    side = turned // 4
    folder = Path(folder)
    tokenizer.save_pretrained(folder)
    config: dict[str, Any] = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_config": {
            **attention,
            "depth": vision_layers,
            "num_heads": heads,
            "patch_size": patch_size,
            "out_hidden_size": width,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        "text_config": {
            **attention,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": max(1, heads // 2),
            "head_dim": head,
            "vocab_size": len(tokenizer),
            "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [turned - 2 * side, side, side],
            },
        },
    }
    Qwen3VLConfig(**config).save_pretrained(folder)
    return folder
