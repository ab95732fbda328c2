"""OpenVLA: published files, the same tokens as transformers' own Llama, training, refusals."""

import dataclasses
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as tvf
from openvla_models import ACTION, STATISTICS, architecture, make, published, write_weights
from PIL import Image
from safetensors.torch import load_file
from scale_runs import GRPO, PPO
from vla_models import SENTENCES, SPEC, gen, observation, stir

from embodyrl.algorithms.sft import SFT, SFTConfig
from embodyrl.checks import check_policy
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.errors import UserError
from embodyrl.policies.vla.action_tokens import ActionTokens
from embodyrl.policies.vla.openvla import OpenVLA, OpenVLAConfig
from embodyrl.policies.vla.openvla_prompt import PromptTokenizer
from embodyrl.policies.vla.prismatic import ImageTransform, crop_middle
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_to_json
from embodyrl.types import Conventions

pytest.importorskip("lerobot.policies", reason="the extra vla is not installed")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return published(tmp_path_factory.mktemp("openvla"))


def copied(trained, tmp_path, **keys):
    """The checkpoint with other keys in its config.json."""
    folder = shutil.copytree(trained, tmp_path / "copy", dirs_exist_ok=True)
    config = json.loads((trained / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    return folder


def test_it_keeps_the_promises_of_a_policy(trained):
    check_policy(make(trained), observation(), SPEC)
    chooses = make(trained, chooser_width=8, proposals=2)
    chooses.chooser.ready.fill_(True)
    check_policy(chooses, observation(), SPEC)


def inputs_of(policy, obs, row):
    """The language model's inputs for one observation, with nothing padded."""
    text = f"In: What action should the robot take to {obs.instruction[row].lower()}?\nOut:"
    ids = policy.tokenizer._tokenizer.encode(text).ids
    assert ids[0] == 1 and ids[-1] != policy.tokenizer.space
    words = policy.net.embed(torch.tensor([[*ids, policy.tokenizer.space]]))
    picture = policy.image_tokens(obs[row : row + 1])
    return torch.cat([words[:, :1], picture, words[:, 1:]], dim=1)


def test_its_tokens_are_those_that_llama_generates(trained):
    """Transformers' own generate, kept to the tokens of actions: the last 256 of the vocabulary."""
    policy, obs = make(trained), observation()
    rows = policy.net.language_model.config.vocab_size
    first = policy.vocabulary - 256
    others = [*range(first), *range(policy.vocabulary, rows)]
    actions = policy.sample(obs, generator=gen(), mode="eval").actions
    edges = np.linspace(-1, 1, 256)
    middles = (edges[:-1] + edges[1:]) / 2
    for row in range(len(obs)):
        with torch.no_grad():
            said = policy.net.language_model.generate(
                inputs_embeds=inputs_of(policy, obs, row), max_new_tokens=4, do_sample=False,
                suppress_tokens=others, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        # OpenVLA's predict_action: token -> middle of the bin -> the data's units.
        normalised = middles[np.clip(policy.vocabulary - said[0].numpy() - 1, 0, 254)]
        low, high = np.array(ACTION["q01"]), np.array(ACTION["q99"])
        expected = np.where(ACTION["mask"], 0.5 * (normalised + 1) * (high - low) + low, normalised)
        np.testing.assert_allclose(actions[row, 0].numpy(), expected.clip(-1, 1), atol=1e-6)


def test_its_probabilities_are_llamas_among_the_tokens_of_actions(trained):
    policy, obs = make(trained, temperature=1.6), observation()
    sample = policy.sample(obs, generator=gen(7), mode="train")
    numbers = sample.trace.x[:, 1, 0].long()
    ids = policy.vocabulary - 1 - numbers
    for row in range(len(obs)):
        inputs = torch.cat([inputs_of(policy, obs, row), policy.net.embed(ids[row : row + 1])], 1)
        with torch.no_grad():
            logits = policy.net.language_model(inputs_embeds=inputs).logits[0, -5:-1]
        # The bins' tokens stand at the end of the vocabulary, the last bin first.
        logits = logits[:, policy.vocabulary - 256 : policy.vocabulary] / 1.6
        place = ids[row] - (policy.vocabulary - 256)
        expected = logits.log_softmax(-1).gather(-1, place[:, None]).sum()
        torch.testing.assert_close(sample.logprob[row, 0], expected, rtol=1e-4, atol=1e-4)


def test_bins_are_those_of_the_published_tokenizer():
    """numpy's digitize, as in openvla/openvla: prismatic/vla/action_tokenizer.py."""
    tokens = ActionTokens(ACTION, 256)
    actions = torch.rand(500, 4, generator=gen()) * 2.4 - 1.2
    actions[0] = 1.0
    actions[1] = -1.0
    low, high = np.array(ACTION["q01"]), np.array(ACTION["q99"])
    scaled = 2 * (actions.double().numpy() - low) / (high - low + 1e-8) - 1
    scaled = np.where(ACTION["mask"], scaled, actions.numpy()).clip(-1, 1)
    expected = np.digitize(scaled, np.linspace(-1, 1, 256)) - 1
    assert (tokens(actions).numpy() == expected).mean() > 0.999  # edges differ by a rounding
    assert tokens(actions).max() == 255 and tokens(actions).min() == 0
    # The middle of an interval comes back to it; 254 and 255 are the same one.
    numbers = torch.arange(255.0)[:, None].expand(255, 4)
    assert torch.equal(tokens(tokens.inverse(numbers)), numbers)
    assert torch.equal(
        tokens.inverse(torch.full((1, 4), 255.0)), tokens.inverse(torch.full((1, 4), 254.0))
    )
    # The gripper is not scaled, and a dim that never changes has the middle of the range.
    still = ActionTokens({"q01": [0.2, 0.0], "q99": [0.2, 1.0], "mask": [True, False]}, 256)
    assert still(torch.tensor([[0.2, 0.0]])).tolist() == [[127.0, 127.0]]
    assert still.inverse(torch.tensor([[127.0, 127.0]]))[0].tolist() == pytest.approx([0.2, 0.0])


def test_pictures_are_resized_as_by_pillow():
    images = observation().images["front"]
    means, stds = [[0.485, 0.456, 0.406], [0.5] * 3], [[0.229, 0.224, 0.225], [0.5] * 3]
    ours = ImageTransform(28, means, stds, 1.0)(images)
    for image, pixels in zip(images, ours, strict=True):
        theirs = Image.fromarray(image.numpy()).resize((28, 28), Image.Resampling.BICUBIC)
        expected = torch.cat(
            [tvf.normalize(tvf.to_tensor(theirs), m, s) for m, s in zip(means, stds, strict=True)]
        )
        # One of 255 steps where a half is rounded the other way.
        assert (pixels - expected).abs().max() < 1.01 / 255 / 0.22
        assert (pixels - expected).abs().gt(1e-6).float().mean() < 0.02
    # A picture of the right size is only normalised.
    square = torch.randint(0, 256, (1, 28, 28, 3), generator=gen(), dtype=torch.uint8)
    plain = ImageTransform(28, means, stds, 1.0)(square)[0, 3:]
    torch.testing.assert_close(plain, square[0].permute(2, 0, 1) / 127.5 - 1.0)


def test_the_middle_is_cut_out_as_by_tensorflow():
    """A ramp stays a ramp: crop_and_resize puts the crop's corners into the corner pixels."""
    ramp = torch.arange(28.0).expand(1, 3, 28, 28)
    side = 0.9**0.5
    expected = (1 - side) / 2 * 27 + torch.arange(28.0) * side
    torch.testing.assert_close(crop_middle(ramp, 0.9, 28)[0, 0, 0], expected)
    rows = crop_middle(ramp.transpose(2, 3), 0.9, 28)[0, 0, :, 0]
    torch.testing.assert_close(rows, expected)


def test_a_prompt_is_lower_case_and_padding_changes_nothing(trained):
    tokenizer = PromptTokenizer(trained)
    ids, mask = tokenizer(["GO", SENTENCES[2]], 99)
    again, _ = tokenizer(["go"], 99)
    assert ids[0, mask[0] == 1].tolist() == again[0].tolist()
    assert (ids[0, mask[0] == 0] == 99).all() and (mask[0] == 0).any()
    text = tokenizer._tokenizer.decode(again[0].tolist(), skip_special_tokens=False)
    assert text.replace("\u2581", " ").endswith("What action should the robot take to go?\nOut:")


def demonstrations(count=32):
    """Actions that the picture tells: a white one means forward, a black one backward."""
    way = torch.arange(count) % 2
    images = way.mul(255).to(torch.uint8)[:, None, None, None].expand(count, 24, 32, 3)
    actions = (way * 0.8 - 0.4)[:, None].expand(count, 4).clone()
    zeros = torch.zeros(count, dtype=torch.long)
    return Demonstrations(
        1, {"front": images.numpy()}, torch.zeros(count, 6), actions, torch.arange(count), zeros,
        ["go"],
    )  # fmt: skip


def test_it_imitates_and_its_checkpoint_acts_the_same(trained, tmp_path):
    policy, demos = make(trained, train="all"), demonstrations()
    config = SFTConfig(
        steps_per_iteration=150, batch_size=16, lr=1e-2, warmup=0.0, shift=0, ema=0.5
    )
    sft = SFT(config, policy)
    sft.update(demos, progress=0.0, generator=gen())
    batch = demos.batch(torch.arange(32))
    learned = sft.result
    assert float(learned.imitation_loss(*batch)) < 0.5 < np.log(2)  # blind to the picture log 2
    obs = batch[0]
    actions = learned.sample(obs, generator=gen(), mode="eval").actions
    assert (actions - batch[1]).abs().max() < 0.02
    checkpoint.save(
        tmp_path / "step_000001",
        {"policy": learned.state_dict()},
        {"spec": spec_to_json(SPEC), "config": {"policy": dataclasses.asdict(learned.config)}},
    )
    other = make(trained)
    assert not torch.equal(other.sample(obs, generator=gen(), mode="eval").actions, actions)
    checkpoint.load_weights(tmp_path / "step_000001", other, SPEC)
    assert torch.equal(other.sample(obs, generator=gen(), mode="eval").actions, actions)
    # In the published layout again, it reads back: bfloat16 rounds the weights alone.
    folder = architecture(tmp_path / "again", STATISTICS)
    write_weights(learned.net, folder)
    again = make(folder)
    for name, value in learned.net.state_dict().items():
        torch.testing.assert_close(
            again.net.state_dict()[name], value.bfloat16().float(), rtol=0, atol=0
        )


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 2}])
def test_what_is_exported_has_the_published_layout_and_acts_the_same(trained, tmp_path, settings):
    policy, obs = make(trained, **settings), observation()
    stir(policy.net, gen(9))
    policy.fit_inputs(torch.zeros(9, 6), torch.linspace(-1, 1, 9)[:, None].expand(9, 4))
    policy.save_published(tmp_path / "exported")
    index = json.loads((trained / "model.safetensors.index.json").read_text())
    assert (
        load_file(tmp_path / "exported" / "model.safetensors").keys() == index["weight_map"].keys()
    )
    read = make(tmp_path / "exported")
    assert read.config.unnorm_key == "toy"
    for name in ("low", "high", "mask"):
        ours = getattr(policy.normalize_action.scale, name)
        assert torch.equal(getattr(read.normalize_action.scale, name), ours)
    with torch.no_grad():
        tokens = torch.zeros(3, 4, dtype=torch.long)
        expected = policy.logits(policy.encode(obs), tokens)
        found = read.logits(read.encode(obs), tokens)
    assert (found - expected).abs().max() < 0.05 * expected.std()  # bfloat16 rounds the weights
    with pytest.raises(UserError, match="is not empty"):
        policy.save_published(tmp_path / "exported")


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_ppo_and_grpo_make_good_actions_likelier(trained, kind):
    from embodyrl.algorithms.grpo import GRPO as Grpo
    from embodyrl.algorithms.grpo import GRPOConfig
    from embodyrl.algorithms.ppo import PPO as Ppo
    from embodyrl.algorithms.ppo import PPOConfig
    from embodyrl.rollouts.batches import Episode, EpisodeBatch, GroupBatch, RolloutBatch

    policy = make(trained)
    obs = observation()[torch.arange(48) % 3]
    sample = policy.sample(obs, generator=gen(5), mode="train")
    words = sample.trace.x[:, 1].flatten(1).long()
    reward = (words[:, 0] >= 128).float()
    settings = {"epochs": 12, "lr": 1e-2, "lr_warmup": 0}
    if kind == "ppo":
        settings = {**PPO, **settings, "warmup_iterations": 0, "minibatch_size": 48}
        algorithm = Ppo(PPOConfig(**settings), policy)
        done = torch.ones(1, 48, dtype=torch.bool)
        batch = RolloutBatch(
            obs, sample.trace, sample.logprob, sample.value[None], sample.value[None],
            reward[None, :, None], torch.ones(1, 48, 1, dtype=torch.bool), done, ~done,
        )  # fmt: skip
    else:
        groups = {"rewards": ("success",), "num_episodes": 48, "group_size": 16}
        algorithm = Grpo(GRPOConfig(**{**GRPO, **groups, **settings}), policy)
        episodes = [Episode(0, "t", bool(r), float(r), 1) for r in reward]
        kept = EpisodeBatch(obs, sample.trace, sample.logprob, torch.arange(48), episodes, 48)
        batch = GroupBatch(kept, episodes, 48, 1)

    def chance():
        with torch.no_grad():
            logits = policy.logits(policy.encode(obs), words)
        return float(logits[:, 0].softmax(-1)[:, 128:].sum(-1).mean())

    before = chance()
    row = algorithm.update(batch, progress=0.0, generator=gen())
    assert chance() > before + 0.02
    assert row["ratio"] > 0


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({}, {"projector", "language_model"}),
        ({"train": "all"}, {"projector", "language_model", "vision_backbone"}),
        ({"lora_rank": 2}, {"language_model"}),
    ],
)
def test_what_is_trained_and_shared(trained, settings, parts):
    import copy

    policy = make(trained, precision="bfloat16", **settings)
    trained_names = [k for k, p in policy.net.named_parameters() if p.requires_grad]
    assert {name.split(".")[0] for name in trained_names} == parts
    if "lora_rank" in settings:
        assert all("lora_" in name for name in trained_names)
    for name, p in policy.net.named_parameters():
        assert p.dtype == (torch.float32 if p.requires_grad else torch.bfloat16), name
        assert not p.requires_grad or ".blocks.2." not in name  # the last block is not read
    assert policy.net.language_model.model.rotary_emb.inv_freq.dtype == torch.float32
    loss = policy.imitation_loss(
        observation(), torch.zeros(3, 1, 4), torch.ones(3, 1, dtype=torch.bool)
    )
    loss.backward()
    assert all(p.grad is not None for p in policy.net.parameters() if p.requires_grad)
    other = copy.deepcopy(policy)
    for a, b in zip(policy.net.parameters(), other.net.parameters(), strict=True):
        assert (a is b) == (not a.requires_grad)
    # Close to what float32 says.
    exact = make(trained, **settings)
    with torch.no_grad():
        near = exact.imitation_loss(
            observation(), torch.zeros(3, 1, 4), torch.ones(3, 1, dtype=torch.bool)
        )
    assert float(loss.detach()) == pytest.approx(float(near), rel=0.03)


def test_statistics_of_several_data_sets(trained, tmp_path):
    other = {"action": {"q01": [-1.0] * 4, "q99": [1.0] * 4}}
    folder = copied(trained, tmp_path, norm_stats={**STATISTICS, "bridge_orig": other})
    with pytest.raises(UserError, match=r"2 data sets.*policy\.unnorm_key.*bridge_orig, toy"):
        make(folder)
    with pytest.raises(UserError, match=r"no such data set\. Did you mean 'bridge_orig'"):
        make(folder, unnorm_key="bridge_origin")
    chosen = make(folder, unnorm_key="bridge_orig")
    assert chosen.normalize_action.scale.high.tolist() == [1.0] * 4
    assert chosen.normalize_action.scale.mask.all()
    # Those of a fine-tuning lie apart, and replace those of the config.
    own = {"mine": {"action": {"q01": [-0.1] * 4, "q99": [0.1] * 4}}}
    (folder / "dataset_statistics.json").write_text(json.dumps(own))
    assert make(folder).config.unnorm_key == "mine"


def test_a_family_of_data_sets_asks_for_its_conventions(trained, tmp_path):
    folder = copied(trained, tmp_path, norm_stats={"libero_object_no_noops": STATISTICS["toy"]})
    make(folder)  # an env that says nothing is not compared
    wrong = dataclasses.replace(SPEC, conventions=Conventions(gripper=(1.0, -1.0)))
    with pytest.raises(UserError, match=r"gripper=\(0\.0, 1\.0\).*env\.profile=libero_openvla"):
        make(folder, wrong)
    # How pictures of another shape are resized is a matter of data.
    right = Conventions("mirrored", fit="crop", gripper=(0.0, 1.0))
    make(folder, dataclasses.replace(SPEC, conventions=right))


def test_missing_and_damaged_files_are_refused(trained, tmp_path):
    def refused(match, folder=trained, spec=SPEC, **settings):
        with pytest.raises(UserError, match=match):
            make(folder, spec, **settings)

    refused("no such folder", tmp_path / "nothing")
    refused("one camera.*has front, wrist", spec=_cameras("front", "wrist"))
    refused("no camera", spec=_cameras(), cameras=("front",))
    refused("names 'top'", cameras=("top",))
    make(trained, _cameras("front", "wrist"), cameras=("wrist",))
    refused("actions of 4 dims, and test/arm has 7", spec=dataclasses.replace(SPEC, action_dim=7))
    refused("no adapters on the image encoders", lora_rank=2, train="all")

    folder = copied(trained, tmp_path)
    shard = folder / "model-00002-of-00002.safetensors"
    kept = shard.read_bytes()
    shard.unlink()
    refused(r"lacks 1 of its 2 files of weights: model-00002-of-00002\.safetensors", folder)
    make(folder, random_weights=True)
    shard.write_bytes(kept[: len(kept) // 2])
    refused(r"model-00002-of-00002\.safetensors is damaged", folder)
    shard.write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    refused("is missing.*do not fit|do not fit.*is missing", folder)
    shard.write_bytes(kept)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["projector.fc1.weight"] = "../elsewhere.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused("lies outside", folder)
    (folder / "model.safetensors.index.json").unlink()
    refused(r"lacks 1 of its 1 files of weights: model\.safetensors", folder)

    for name, match in (
        ("tokenizer.json", "no tokenizer.json.*openvla-7b"),
        ("preprocessor_config.json", "preprocessor_config.json is damaged"),
        ("config.json", "no config.json"),
    ):
        folder = copied(trained, tmp_path)
        (folder / name).unlink()
        refused(match, folder)
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"model_type": "llava"}, "is a checkpoint of llava"),
        ({"use_fused_vision_backbone": False}, "one image encoder"),
        ({"text_config": {"model_type": "phi"}}, "kind phi"),
        ({"text_config": {"hidden_size": -3}}, "text_config.*malformed"),
        ({"norm_stats": {"toy": {"action": {"q01": [0.0], "q99": [1.0, 2.0]}}}}, "other lengths"),
        ({"norm_stats": {"toy": {}}}, "has no 'action'"),
        ({"vision_sizes": [{"width": 8}]}, "cannot be built"),
        ({"n_action_bins": 100000}, "100000 bins"),
    ],
)
def test_a_config_of_another_model_is_refused(trained, tmp_path, keys, match):
    with pytest.raises(UserError, match=match):
        make(copied(trained, tmp_path, **keys))


def test_pictures_that_are_prepared_otherwise_are_refused(trained, tmp_path):
    folder = copied(trained, tmp_path)
    file = folder / "preprocessor_config.json"
    said = json.loads(file.read_text())
    for key, value in (
        ("image_resize_strategy", "letterbox"),
        ("interpolations", ["bilinear"] * 2),
    ):
        file.write_text(json.dumps({**said, key: value}))
        with pytest.raises(UserError, match=f"{key} is .*not supported"):
            make(folder)
    file.write_text(json.dumps({**said, "means": [[0.5] * 3]}))
    with pytest.raises(UserError, match="three numbers for each of two encoders"):
        make(folder)


def test_an_unknown_encoder_is_refused(trained, tmp_path):
    folder = copied(trained, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["vision_sizes"]
    config["timm_model_ids"] = [
        "vit_large_patch14_clip_336.openai",
        "vit_so400m_patch14_siglip_224",
    ]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="encoder vit_large_patch14_clip_336"):
        make(folder)


def test_no_code_of_a_checkpoint_is_run(trained, tmp_path):
    """The published config.json names Python files beside it (auto_map)."""
    folder = copied(
        trained, tmp_path, auto_map={"AutoConfig": "configuration_prismatic.OpenVLAConfig"}
    )
    for name in ("configuration_prismatic", "modeling_prismatic"):
        (folder / f"{name}.py").write_text("raise SystemExit('this was run')")
    make(folder)


def test_nothing_heavy_is_imported_before_it_is_built():
    code = (
        "import sys, embodyrl.policies.vla.openvla, embodyrl.policies.vla.openvla_oft;"
        "print([m for m in ('transformers', 'peft', 'tokenizers', 'lerobot') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_memory_is_estimated_without_weights(trained):
    with torch.device("meta"):
        policy = OpenVLA(OpenVLAConfig(pretrained=str(trained)), SPEC).to("meta")
    assert all(p.device.type == "meta" for p in policy.parameters())


def _cameras(*names):
    return dataclasses.replace(SPEC, cameras={name: (24, 32) for name in names})
