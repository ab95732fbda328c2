"""pi0 and pi0.5, built small: equal to LeRobot's own, the policy's promises, files both ways."""

import copy
import shutil
from importlib import import_module

import pytest
import torch
from vla_models import (
    SENTENCES,
    SPEC,
    check_goes_on,
    check_times,
    gen,
    lerobot_batch,
    lerobot_from,
    observation,
    shrink,
    stir,
)

from embodyrl import registry
from embodyrl.algorithms.imitation import imitation_loss
from embodyrl.build import make_policy
from embodyrl.checks import check_policy
from embodyrl.errors import UserError
from embodyrl.functional.flow import randn, sample_training_time
from embodyrl.policies.vla.make_small import make_small_smolvla

pytest.importorskip("lerobot.policies", reason="the extra vla is not installed")
pytest.importorskip("num2words", reason="the extra vla is not installed")


@pytest.fixture(scope="module", params=["pi0", "pi05"])
def checkpoint(request, tmp_path_factory):
    """The name, and the folder of a LeRobot checkpoint with a thousandth of the parameters.

    LeRobot has no smaller variant than 300 M parameters, and fixes vocabulary and image encoder in
    its code: the configs are shrunk on their way into transformers.
    """
    name = request.param
    with pytest.MonkeyPatch.context() as patch:
        shrink(name, patch)
        folder = tmp_path_factory.mktemp(name)
        make_small_smolvla(folder / "words", SENTENCES, width=16, heads=2)
        write_config(name, folder / "empty", str(folder / "words" / "vlm"), patch)
        policy = make(name, folder / "empty", horizon=6, random_weights=True)
        stir(policy, gen(1))
        policy.fit_inputs(*(torch.randn(200, d, generator=gen(2)) * 0.15 + 0.1 for d in (6, 4)))
        policy.save_lerobot(folder / "trained")
        yield name, folder / "trained"


def write_config(name, folder, tokenizer, patch):
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies import make_policy_config, make_pre_post_processors
    from lerobot.processor import TokenizerProcessorStep

    image = {"observation.images.front": PolicyFeature(FeatureType.VISUAL, (3, 24, 32))}
    config = make_policy_config(
        name,
        device="cpu",
        chunk_size=6,
        n_action_steps=6,
        max_state_dim=8,
        max_action_dim=8,
        image_resolution=(28, 28),
        tokenizer_max_length=64,
        num_inference_steps=3,
        empty_cameras=1,
        input_features={**image, "observation.state": PolicyFeature(FeatureType.STATE, (6,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (4,))},
    )
    folder.mkdir()
    config._save_pretrained(folder)
    processing = import_module(f"lerobot.policies.{name}.processor_{name}")
    local = lambda **k: TokenizerProcessorStep(**{**k, "tokenizer_name": tokenizer})  # noqa: E731
    patch.setattr(processing, "TokenizerProcessorStep", local)
    for pipeline in make_pre_post_processors(config):
        pipeline.save_pretrained(folder)


def make(name, folder, **settings):
    settings = {"pretrained": str(folder), "execute": 4, "num_denoise_steps": 3, **settings}
    return make_policy(registry.load("policies", name).Config(**settings), SPEC, 0)


@pytest.mark.parametrize("transition", ["flow_sde", "flow_cps", "flow_noise"])
def test_promises_of_a_policy(checkpoint, transition):
    check_policy(make(*checkpoint, transition=transition), observation(), SPEC)


def test_without_noise_it_is_lerobots_own(checkpoint):
    obs, ours = observation(), make(*checkpoint, eta=0.0)
    theirs, pre, post = lerobot_from(checkpoint[1])
    expected = post(
        theirs.predict_action_chunk(pre(lerobot_batch(obs)), noise=randn((3, 6, 8), gen()))
    )
    expected = expected.clamp(-1, 1)[:, :4]
    for mode in ("eval", "train"):
        actions = ours.sample(obs, generator=gen(), mode=mode).actions
        torch.testing.assert_close(actions, expected, atol=1e-5, rtol=1e-5)
    assert (
        expected.abs() < 1
    ).float().mean() > 0.9 and expected.std() > 0.05  # neither clipped nor constant


def test_a_time_for_every_action(checkpoint):
    check_times(make(*checkpoint))


@pytest.mark.slow
def test_it_goes_on_the_way_that_it_is_given(checkpoint):
    check_goes_on(make(*checkpoint, execute=6, max_prefix=2), steps=200)


def test_the_imitation_loss_is_lerobots_own(checkpoint):
    ours = make(*checkpoint, execute=6)
    theirs, pre, _ = lerobot_from(checkpoint[1])
    obs, actions = observation(), torch.rand(3, 6, 4, generator=gen(5)) * 2 - 1
    loss = imitation_loss(ours, obs, actions, torch.ones(3, 6, dtype=torch.bool), gen(7))
    generator = gen(7)
    noise = randn((3, 6, 8), generator)
    time = sample_training_time(3, generator)
    theirs.model.sample_noise, theirs.model.sample_time = lambda *_: noise, lambda *_: time
    expected, _ = theirs.forward(pre({**lerobot_batch(obs), "action": actions}))
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-5)


def test_what_we_save_lerobot_loads(checkpoint, tmp_path):
    name, folder = checkpoint
    policy, obs = make(name, folder), observation()
    with torch.no_grad():
        for p in policy.actor_parameters():
            p.mul_(1.05)
    expected = policy.sample(obs, generator=gen(), mode="eval").actions
    policy.save_lerobot(tmp_path / "out")
    theirs, pre, post = lerobot_from(tmp_path / "out")
    chunk = post(
        theirs.predict_action_chunk(pre(lerobot_batch(obs)), noise=randn((3, 6, 8), gen()))
    )
    torch.testing.assert_close(chunk.clamp(-1, 1)[:, :4], expected, atol=1e-5, rtol=1e-5)


def test_gradients_reach_the_expert_alone(checkpoint):
    policy, obs = make(*checkpoint), observation()
    sample = policy.sample(obs, generator=gen(), mode="train")
    policy.evaluate(obs, sample.trace).logprob.sum().backward()
    touched = {
        n for n, p in policy.net.named_parameters() if p.grad is not None and p.grad.abs().max() > 0
    }
    assert any("gemma_expert.model.layers" in n for n in touched)
    assert not any("paligemma.model" in n for n in touched)
    untouched = {id(p) for n, p in policy.net.named_parameters() if n not in touched}
    # The last layer of the language model ends in nothing; all else that is trained has a gradient.
    assert not untouched & {id(p) for p in policy.actor_parameters()}
    twin = dict(copy.deepcopy(policy).named_parameters())
    assert {n for n, p in policy.named_parameters() if p is twin[n]} == {
        n for n, p in policy.named_parameters() if not p.requires_grad
    }


def test_every_option_at_once(checkpoint, tmp_path):
    name, folder = checkpoint
    options = {"lora_rank": 2, "precision": "bfloat16", "checkpointing": True, "keep_prefixes": 4}
    policy, obs = make(name, folder, **options), observation()
    trained = {n: p.dtype for n, p in policy.net.named_parameters() if p.requires_grad}
    assert set(trained.values()) == {torch.float32} and any(
        "gemma_expert" in n and "lora_A" in n for n in trained
    )
    assert not any("paligemma." in n for n in trained)
    sample = policy.sample(obs, generator=gen(), mode="train")
    scored = policy.evaluate(obs, sample.trace)
    assert len(policy._prefixes) == 3 and (scored.logprob - sample.logprob).abs().max() < 1
    scored.logprob.sum().backward()
    assert all(p.grad is not None for n, p in policy.net.named_parameters() if "lora_B" in n)
    kept, computed = (
        policy.encode(obs[[2, 0]]),
        make(name, folder, precision="bfloat16").encode(obs[[2, 0]]),
    )
    torch.testing.assert_close(kept.pooled, computed.pooled, atol=0.05, rtol=0.05)
    policy.save_lerobot(tmp_path / "out")
    theirs, pre, _ = lerobot_from(tmp_path / "out")
    assert torch.isfinite(theirs.predict_action_chunk(pre(lerobot_batch(obs)))).all()


def test_weights_that_lerobot_would_leave_random_are_refused(checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    name, folder = checkpoint
    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    del weights["model.action_out_proj.weight"]
    save_file(weights, broken / "model.safetensors")
    with pytest.raises(UserError, match=r"action_out_proj.weight is missing"):
        make(name, broken)
