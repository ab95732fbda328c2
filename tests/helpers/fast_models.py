"""A small pi0-FAST with weights, in LeRobot's layout, and its tokenizers."""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from vla_models import SENTENCES, SPEC, VOCABULARY, gen, stir

from embodyrl.build import make_policy
from embodyrl.policies.vla.make_small import write_libero_checkpoint
from embodyrl.policies.vla.make_small_fast import (
    fit_fast_tokenizer,
    make_paligemma_tokenizer,
    write_pi0_fast,
)
from embodyrl.policies.vla.pi0_fast import Pi0FastConfig

CHUNK = 4
HERE = Path(__file__).parent


def chunks(count=300, seed=0, horizon=CHUNK, dims=4):
    """Smooth normalised plans."""
    return np.random.default_rng(seed).normal(size=(count, horizon, dims)).cumsum(1) / 3


def tokenizers(folder: Path, horizon=CHUNK, dims=4, sentences=SENTENCES):
    """Both, with the code beside FAST's that LeRobot runs."""
    make_paligemma_tokenizer(folder / "vlm", sentences, size=VOCABULARY)
    fast = fit_fast_tokenizer(
        folder / "fast", chunks(horizon=horizon, dims=dims), scale=4.0, size=320
    )
    shutil.copyfile(HERE / "fast_reference.py", fast / "processing_action_tokenizer.py")
    name = "processing_action_tokenizer.UniversalActionProcessor"
    said = json.loads((fast / "processor_config.json").read_text())
    said |= {"processor_class": name.split(".")[1], "auto_map": {"AutoProcessor": name}}
    (fast / "processor_config.json").write_text(json.dumps(said))
    return {
        "text_tokenizer_name": str(folder / "vlm"),
        "action_tokenizer_name": str(folder / "fast"),
    }


def architecture(folder: Path, **settings) -> Path:
    """The JSON files alone."""
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies import make_policy_config

    image = {"observation.images.front": PolicyFeature(FeatureType.VISUAL, (3, 24, 32))}
    config = make_policy_config(
        "pi0_fast",
        **{
            "device": "cpu",
            "chunk_size": CHUNK,
            "n_action_steps": CHUNK,
            "image_resolution": (28, 28),
            "tokenizer_max_length": 64,
            "max_action_tokens": 40,
            "max_decoding_steps": 24,
            "empty_cameras": 1,
            "input_features": {
                **image,
                "observation.state": PolicyFeature(FeatureType.STATE, (6,)),
            },
            "output_features": {"action": PolicyFeature(FeatureType.ACTION, (4,))},
            **tokenizers(folder / "words"),
            **settings,
        },
    )
    return write_pi0_fast(folder, config)


def public_pi0_fast(folder: Path, sentences=SENTENCES) -> Path:
    """With random weights, in the layout of ``lerobot/pi0fast-libero``."""
    from lerobot.policies import make_policy_config

    config = make_policy_config(
        "pi0_fast",
        device="cpu",
        chunk_size=10,
        n_action_steps=10,
        max_decoding_steps=24,
        image_resolution=(28, 28),
        **tokenizers(folder / "words", horizon=10, dims=7, sentences=sentences),
    )
    return write_libero_checkpoint(config, folder)


def make(folder, spec=SPEC, **settings):
    config = Pi0FastConfig(pretrained=str(folder), critic_width=8, **settings)
    return make_policy(config, spec, 0)


def published(folder: Path) -> Path:
    """A pi0-FAST with random weights."""
    policy = make(architecture(folder / "empty"), random_weights=True)
    stir(policy, gen(1))
    policy.fit_inputs(*(torch.randn(200, d, generator=gen(2)) * 0.15 + 0.1 for d in (6, 4)))
    return policy.save_lerobot(folder / "trained")
