"""pi0-FAST at its published size, without data: apart from the tests that shrink LeRobot's network."""

import dataclasses

import pytest
import torch
from fast_models import tokenizers
from vla_models import SPEC

pytest.importorskip("lerobot.policies", reason="the extra vla is not installed")
pytest.importorskip("num2words", reason="the extra vla is not installed")


@pytest.mark.timeout(300)
def test_names_and_shapes_at_the_published_size(tmp_path, monkeypatch):
    """Both on the meta device; the numbers are PaliGemma's (arXiv:2407.07726)."""
    import transformers.dynamic_module_utils as modules
    from lerobot.policies.pi0_fast.configuration_pi0_fast import PI0FastConfig
    from lerobot.policies.pi0_fast.modeling_pi0_fast import PI0FastPolicy

    from embodyrl.policies.vla.make_small_fast import make_pi0_fast
    from embodyrl.policies.vla.pi0_fast import Pi0Fast, Pi0FastConfig

    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = make_pi0_fast(tmp_path / "real", ["go"])
    tokenizers(tmp_path / "code")  # with the code that LeRobot's constructor runs
    with torch.device("meta"):
        spec = dataclasses.replace(SPEC, action_dim=7, proprio_dim=8)
        ours = Pi0Fast(Pi0FastConfig(pretrained=str(folder), random_weights=True), spec)
        config = PI0FastConfig(
            text_tokenizer_name=str(folder / "vlm"),
            action_tokenizer_name=str(tmp_path / "code" / "fast"),
            input_features=ours.net.config.input_features,
            output_features=ours.net.config.output_features,
        )
        config.device = "meta"
        theirs = PI0FastPolicy(config)
    found = {k: tuple(v.shape) for k, v in ours.net.state_dict().items()}
    assert found == {k: tuple(v.shape) for k, v in theirs.state_dict().items()}
    start = "model.paligemma_with_expert.paligemma."
    gemma = start + "model.language_model."
    assert found[gemma + "embed_tokens.weight"] == (257152, 2048)
    assert found[start + "lm_head.weight"] == (257152, 2048)
    assert found[gemma + "layers.17.mlp.gate_proj.weight"] == (16384, 2048)
    assert found[gemma + "layers.17.self_attn.k_proj.weight"] == (256, 2048)
    assert found[start + "model.multi_modal_projector.linear.weight"] == (2048, 1152)
    # PaliGemma's 2.92 B, and an output layer apart from the embedding.
    count = sum(p.numel() for p in ours.net.parameters())
    assert count == 3_449_982_704 and round((count - 257152 * 2048) / 1e7) == 292
