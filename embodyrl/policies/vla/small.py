"""A small SmolVLA, as a folder that ``policy.pretrained`` takes with ``policy.random_weights=true``.

For tests, and for training the architecture from nothing where no pretrained weights are to be had. Nothing is
downloaded: the tokenizer is made of the sentences of the task.
"""

# pyright: reportCallIssue=false, reportAttributeAccessIssue=false
# transformers fills in its configs' fields and the names of its modules at run time.
from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from embodyrl.policies.vla.files import require


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
    """Writes LeRobot's config.json, and in ``vlm/`` the language model's config, tokenizer and processor.

    Args:
        folder: to make.
        sentences: instructions whose words become tokens; any other text is spelt in bytes.
        width: of the tokens; the expert has three quarters of it.
        layers: of language model and expert.
        heads: attention heads; must divide ``width``.
        vision_layers: of the image encoder.
        image_size: pixels that pictures are resized to; a multiple of twice ``patch_size``.
        patch_size: of the image encoder; four patches make a token.
        max_dim: width that proprioception and actions are padded to.
    """
    require()
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
    from transformers import SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    folder = Path(folder)
    vlm = folder / "vlm"
    tokenizer = _tokenizer(sentences)
    size = {"longest_edge": image_size}
    SmolVLMProcessor(
        SmolVLMImageProcessor(size=size, max_image_size=size),
        tokenizer,
        SmolVLMVideoProcessor(size=size, max_image_size=size),
        image_seq_len=(image_size // patch_size // 2) ** 2,
    ).save_pretrained(vlm)
    attention = {"num_attention_heads": heads, "intermediate_size": 4 * width, "hidden_size": width}
    SmolVLMConfig(
        vision_config={
            **attention,
            "num_hidden_layers": vision_layers,
            "image_size": image_size,
            "patch_size": patch_size,
        },
        text_config={
            **attention,
            "model_type": "llama",
            "head_dim": width // heads,
            "num_key_value_heads": max(1, heads // 2),
            "num_hidden_layers": layers,
            "vocab_size": len(tokenizer),
            "pad_token_id": tokenizer.pad_token_id,
        },
        scale_factor=2,
        image_token_id=tokenizer.get_vocab()["<image>"],
    ).save_pretrained(vlm)
    SmolVLAConfig(
        vlm_model_name=str(vlm.resolve()),
        num_vlm_layers=layers,
        resize_imgs_with_padding=(image_size, image_size),
        max_state_dim=max_dim,
        max_action_dim=max_dim,
        device="cpu",
    )._save_pretrained(folder)
    return folder


def _tokenizer(sentences: Iterable[str]):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        extra_special_tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
    )
