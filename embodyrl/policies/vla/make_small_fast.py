"""Makes the files of a pi0-FAST without pretrained weights, and its two tokenizers.

They serve for tests, and for measurements with ``policy.random_weights=true``. Nothing is
downloaded: PaliGemma's tokenizer, which is gated, is replaced by one that is trained on the sentences
of the task, and FAST's by one that is trained on chunks of actions.
"""

# pyright: reportCallIssue=false, reportAttributeAccessIssue=false
# transformers fills in its configs' fields at run time.
from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.policies.vla.fast_tokenizer import BPE_FOLDER
from embodyrl.policies.vla.lerobot_io import require_lerobot
from embodyrl.storage.atomic_files import write_json

RESERVED = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
"""PaliGemma's first tokens. Those of single bytes follow."""
PALIGEMMA_TOKENS = 257152


def fit_fast_tokenizer(
    folder: str | Path, chunks: np.ndarray, *, scale: float = 10.0, size: int = 512
) -> Path:
    """Trains a FAST tokenizer and writes it in the layout of ``lerobot/fast-action-tokenizer``.

    Unlike the published one it has a token for every byte, so that any coefficient can be written.

    Args:
        folder: to make.
        chunks: (B, C, A) normalised actions.
        scale: coefficients are multiplied with it, and rounded.
        size: number of tokens, 257 or more.
    """
    from scipy import fft
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    # Chunks as texts: a character for each rounded coefficient.
    spectrum: Any = fft.dct(np.asarray(chunks), axis=1, norm="ortho")
    numbers = np.around(spectrum * scale).reshape(len(chunks), -1).astype(int)
    lowest = int(numbers.min())
    # Byte-pair encoding of these texts.
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=10000,
        show_progress=False,
    )
    texts = ("".join(map(chr, row - lowest)) for row in numbers)
    tokenizer.train_from_iterator(texts, trainer)
    # The published files.
    folder = Path(folder)
    (folder / BPE_FOLDER).mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / BPE_FOLDER / "tokenizer.json"))
    write_json(
        folder / BPE_FOLDER / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False},
    )
    settings = {"scale": scale, "min_token": lowest, "vocab_size": size}
    write_json(
        folder / "processor_config.json",
        {**settings, "action_dim": None, "time_horizon": None},
    )
    return folder


def make_paligemma_tokenizer(
    folder: str | Path, sentences: Iterable[str], *, size: int = PALIGEMMA_TOKENS
) -> Path:
    """Writes a tokenizer that treats text as PaliGemma's does, with ``size`` tokens.

    Args:
        folder: to make.
        sentences: instructions whose parts become tokens; any other text is spelled in bytes.
        size: number of tokens. Those that the sentences leave over stand for image regions.
    """
    require_lerobot()
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import GemmaTokenizer

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")  # type: ignore[assignment]
    # No token holds punctuation and something else, so that "Action: " is three.
    tokenizer.pre_tokenizer = pre_tokenizers.Punctuation()  # type: ignore[assignment]
    reserved = [*RESERVED, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=len(reserved) + 200,
        special_tokens=reserved,
        initial_alphabet=["\u2581", "|", *"0123456789-:,;"],
        max_token_length=7,  # otherwise a sentence would become a single token
        show_progress=False,
    )
    texts = [*(["Action", "Task", "State"] * 50), "Task: , State: 0;\n", *sentences]
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary: dict[str, int] = dict(model["vocab"])
    # The rest of the vocabulary, behind the words.
    for number in range(len(vocabulary), size):
        vocabulary[f"<loc{number:06}>"] = number
    merges: Any = [tuple(pair) for pair in model["merges"]]
    GemmaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True).save_pretrained(folder)
    return Path(folder)


def write_pi0_fast(
    folder: str | Path, config: Any, statistics: dict[str, dict[str, Any]] | None = None
) -> Path:
    """Writes LeRobot's config and pipelines of a pi0-FAST, without weights.

    Args:
        folder: to fill.
        config: LeRobot's, which names both tokenizers.
        statistics: of a data set, as LeRobot names them; None for none.
    """
    from lerobot.policies.pi0_fast.processor_pi0_fast import (
        Pi0FastPrepareStateAndLanguageTokenizerProcessorStep,
    )
    from lerobot.processor import (
        ActionTokenizerProcessorStep,
        TokenizerProcessorStep,
        make_default_policy_processor_steps,
        make_policy_processor_pipelines,
    )

    # The same steps as LeRobot's make_pi0_fast_pre_post_processors. The last of them would load a
    # FAST tokenizer and run its code: it is made around an empty one, and saved with its name.
    steps = make_default_policy_processor_steps(config, statistics)
    say_actions = ActionTokenizerProcessorStep(
        action_tokenizer_input_object=object(),
        max_action_tokens=config.max_action_tokens,
        fast_skip_tokens=config.fast_skip_tokens,
        paligemma_tokenizer_name=config.text_tokenizer_name,
        trust_remote_code=False,
    )
    input_steps = [
        steps.rename_observations,
        steps.add_batch_dim,
        steps.normalize,
        Pi0FastPrepareStateAndLanguageTokenizerProcessorStep(max_state_dim=config.max_state_dim),
        TokenizerProcessorStep(
            tokenizer_name=config.text_tokenizer_name,
            max_length=config.tokenizer_max_length,
            padding_side="right",
            padding="max_length",
        ),
        say_actions,
        steps.to_device,
    ]
    pipelines = make_policy_processor_pipelines(
        input_steps=input_steps, output_steps=[steps.unnormalize, steps.to_cpu]
    )
    # It is saved as LeRobot would save it.
    say_actions.action_tokenizer_input_object = None
    say_actions.action_tokenizer_name = config.action_tokenizer_name
    say_actions.trust_remote_code = True
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config._save_pretrained(folder)
    for pipeline in pipelines:
        pipeline.save_pretrained(folder)
    return folder


def make_pi0_fast(folder: str | Path, sentences: Iterable[str]) -> Path:
    """The files of pi0-FAST in the real size (2.9 B parameters), for measurements.

    It plans and executes 10 actions, as ``lerobot/pi0fast-libero`` does. ``folder/vlm`` and
    ``folder/fast`` are its tokenizers.
    """
    require_lerobot()
    from lerobot.policies.pi0_fast.configuration_pi0_fast import PI0FastConfig

    folder = Path(folder).resolve()
    make_paligemma_tokenizer(folder / "vlm", sentences)
    draw = np.random.default_rng(0)
    fit_fast_tokenizer(folder / "fast", draw.normal(size=(500, 10, 7)).cumsum(1) / 3, size=2048)
    config = PI0FastConfig(
        device="cpu",
        chunk_size=10,
        n_action_steps=10,
        text_tokenizer_name=str(folder / "vlm"),
        action_tokenizer_name=str(folder / "fast"),
    )
    return write_pi0_fast(folder, config)
