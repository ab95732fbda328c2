"""OpenVLA-OFT: published files, bidirectional attention, imitation, what it refuses."""

import dataclasses
import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from openvla_models import ACTION, PROPRIO, TWO_CAMERAS, make_oft, oft_before, published_oft
from vla_models import SENTENCES, SPEC, gen, observation, stir

from embodyrl.algorithms.grpo import GRPO, GRPOConfig
from embodyrl.algorithms.ppo import PPO, PPOConfig
from embodyrl.algorithms.sft import SFT, SFTConfig
from embodyrl.checks import check_policy
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.errors import UserError
from embodyrl.policies.vla.action_tokens import QuantileScale
from embodyrl.policies.vla.openvla_oft import OpenVLAOFT, OpenVLAOFTConfig
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_to_json

pytest.importorskip("lerobot.policies", reason="the extra vla is not installed")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return published_oft(tmp_path_factory.mktemp("oft"))


def test_it_keeps_the_promises_of_a_policy(trained):
    assert check_policy(make_oft(trained), observation(TWO_CAMERAS), TWO_CAMERAS) == ["Imitates"]
    executes_one = make_oft(trained, execute=1)
    check_policy(executes_one, observation(TWO_CAMERAS), TWO_CAMERAS)


def test_its_weights_are_those_of_the_files(trained, tmp_path):
    """The head was saved in bfloat16 and by several GPUs, the projector in float32."""
    saved, read = oft_before(tmp_path / "before"), make_oft(trained)
    ours = read.state_dict()
    for name, value in saved.state_dict().items():
        if name.startswith(("net.", "action_head.")):
            value = value.bfloat16().float()
        assert torch.equal(ours[name], value), name


def test_the_published_names_of_the_parts():
    """moojink/openvla-oft: prismatic/models/action_heads.py, projectors.py; LIBERO's sizes."""
    with torch.device("meta"):
        from embodyrl.policies.vla.openvla_oft import ActionHead, ProprioProjector

        head = {k: tuple(v.shape) for k, v in ActionHead(7, 4096).state_dict().items()}
        projector = {k: tuple(v.shape) for k, v in ProprioProjector(8, 4096).state_dict().items()}
    expected = {
        "model.layer_norm1.weight": (28672,),
        "model.layer_norm1.bias": (28672,),
        "model.fc1.weight": (4096, 28672),
        "model.fc1.bias": (4096,),
        "model.layer_norm2.weight": (4096,),
        "model.layer_norm2.bias": (4096,),
        "model.fc2.weight": (7, 4096),
        "model.fc2.bias": (7,),
    }
    for i in range(2):
        expected |= {
            f"model.mlp_resnet_blocks.{i}.ffn.0.weight": (4096,),
            f"model.mlp_resnet_blocks.{i}.ffn.0.bias": (4096,),
            f"model.mlp_resnet_blocks.{i}.ffn.1.weight": (4096, 4096),
            f"model.mlp_resnet_blocks.{i}.ffn.1.bias": (4096,),
        }
    assert head == expected
    assert projector == {
        "fc1.weight": (4096, 8),
        "fc1.bias": (4096,),
        "fc2.weight": (4096, 4096),
        "fc2.bias": (4096,),
    }


def test_it_predicts_what_llama_without_a_causal_mask_does(trained):
    """Row by row, without padding, by the layers of Llama one after the other and plain softmax."""
    policy, obs = make_oft(trained), observation(TWO_CAMERAS)
    with torch.no_grad():
        together = policy.predict(obs)
        for row in range(len(obs)):
            hidden = all_to_all(policy.net.language_model.model, inputs_of(policy, obs, row))
            # The space and all tokens of the chunk but the last.
            states = hidden[:, -10:-2].reshape(1, 2, 4 * 16)
            expected = policy.action_head(states)
            torch.testing.assert_close(together[row : row + 1], expected, rtol=1e-4, atol=1e-5)
    actions = policy.sample(obs, generator=gen(), mode="eval").actions
    low, high = torch.tensor(ACTION["q01"]), torch.tensor(ACTION["q99"])
    units = torch.where(
        torch.tensor(ACTION["mask"]), 0.5 * (together + 1) * (high - low) + low, together
    )
    torch.testing.assert_close(actions, units.clamp(-1, 1))


def inputs_of(policy, obs, row):
    """Images of both cameras, the robot's state, the prompt, eight empty tokens, end of text."""
    embed = policy.net.language_model.get_input_embeddings()
    text = f"In: What action should the robot take to {obs.instruction[row].lower()}?\nOut:"
    ids = [*policy.tokenizer._tokenizer.encode(text).ids, policy.tokenizer.space]
    views = [
        policy.net.projector(policy.net.vision_backbone(policy.pictures(obs.images[name][[row]])))
        for name in ("front", "wrist")
    ]
    low, high = torch.tensor(PROPRIO["q01"]), torch.tensor(PROPRIO["q99"])
    state = (2 * (obs.proprio[[row]] - low) / (high - low) - 1).clamp(-1, 1)
    words = embed(torch.tensor([ids]))
    token = policy.proprio_projector(state)[:, None]
    end = embed(torch.tensor([[2]]))
    return torch.cat([words[:, :1], *views, token, words[:, 1:], torch.zeros(1, 8, 16), end], dim=1)


def all_to_all(llama, x):
    """Llama with attention in both directions, from its weights."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = llama.rotary_emb(x, torch.arange(x.shape[1])[None])
    for layer in llama.layers:
        attention = layer.self_attn
        normed = layer.input_layernorm(x)
        query, key, value = (
            project(normed).unflatten(-1, (2, 8)).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        weights = F.softmax(query @ key.transpose(-1, -2) / 8**0.5, dim=-1)
        x = x + attention.o_proj((weights @ value).transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return llama.norm(x)


def test_both_cameras_and_the_state_matter(trained):
    policy, obs = make_oft(trained), observation(TWO_CAMERAS)
    with torch.no_grad():
        base = policy.predict(obs)
        for change in ("front", "wrist", "proprio"):
            other = observation(TWO_CAMERAS)
            if change == "proprio":
                other = dataclasses.replace(other, proprio=-other.proprio)
            else:
                other.images[change] = 255 - other.images[change]
            assert (policy.predict(other) - base).abs().amax((1, 2)).min() > 1e-5
        # Their order is that of policy.cameras.
        swapped = make_oft(trained, cameras=("wrist", "front"))
        assert (swapped.predict(obs) - base).abs().max() > 1e-5


def test_it_imitates_and_its_checkpoint_acts_the_same(trained, tmp_path):
    policy = make_oft(trained)
    proprio = torch.randn(64, 6, generator=gen()).sign()
    actions = proprio[:, :4] * 0.5
    images = {
        name: torch.zeros(64, *size, 3, dtype=torch.uint8).numpy()
        for name, size in TWO_CAMERAS.cameras.items()
    }
    zeros = torch.zeros(64, dtype=torch.long)
    demos = Demonstrations(2, images, proprio, actions, torch.arange(64), zeros, ["go"])
    config = SFTConfig(
        steps_per_iteration=250, batch_size=32, lr=5e-3, warmup=0.0, shift=0, ema=0.5
    )
    batch = demos.batch(torch.arange(64))
    sft = SFT(config, policy)
    sft.update(demos, progress=0.0, generator=gen())
    learned = sft.result
    assert float(learned.imitation_loss(*batch).detach()) < 0.25  # blind to the state: 1
    sample = learned.sample(batch[0], generator=gen(), mode="eval").actions
    checkpoint.save(
        tmp_path / "step_000001",
        {"policy": learned.state_dict()},
        {
            "spec": spec_to_json(TWO_CAMERAS),
            "config": {"policy": dataclasses.asdict(learned.config)},
        },
    )
    other = make_oft(trained)
    checkpoint.load_weights(tmp_path / "step_000001", other, TWO_CAMERAS)
    assert torch.equal(other.sample(batch[0], generator=gen(), mode="eval").actions, sample)


def test_the_loss_counts_what_the_mask_keeps(trained):
    policy, obs = make_oft(trained), observation(TWO_CAMERAS)
    actions = torch.rand(3, 2, 4, generator=gen()) - 0.5
    keep = torch.tensor([[True, False], [True, True], [False, False]])
    with torch.no_grad():
        error = (policy.predict(obs) - policy.normalize_action(actions)).abs().mean(-1)
        loss = policy.imitation_loss(obs, actions, keep)
    assert float(loss) == pytest.approx(float(error[keep].mean()), rel=1e-5)


def test_quantiles_have_an_inverse_within_their_range():
    scale = QuantileScale(ACTION)
    x = torch.tensor([[0.5, -0.4, 0.2, 0.3]])
    assert scale(x)[0].tolist() == pytest.approx([1.0, -1.0, 0.0, 0.3], abs=1e-6)
    torch.testing.assert_close(scale.inverse(scale(x)), x)
    scale.fit(torch.linspace(-1, 1, 1001)[:, None].expand(1001, 4))
    assert scale.low.tolist() == pytest.approx([-0.98] * 4)
    assert scale.mask.tolist() == ACTION["mask"]


def test_what_needs_a_density_cannot_train_it(trained):
    policy = make_oft(trained)
    for algorithm in (lambda: PPO(PPOConfig(), policy), lambda: GRPO(GRPOConfig(), policy)):
        with pytest.raises(UserError, match=r"cannot train OpenVLAOFT.*no density.*sft.*openvla"):
            algorithm()


def test_missing_and_wrong_files_are_refused(trained, tmp_path):
    def refused(match, folder, spec=TWO_CAMERAS, **settings):
        with pytest.raises(UserError, match=match):
            make_oft(folder, spec, **settings)

    refused("no camera", trained, dataclasses.replace(SPEC, cameras={}))
    refused("execute is 3, but a chunk has 2", trained, execute=3)
    more = dataclasses.replace(TWO_CAMERAS, proprio_dim=7)
    refused("proprioception of 6 dims, and test/arm has 7", trained, more)

    folder = shutil.copytree(trained, tmp_path / "copy")
    head = folder / "action_head--500_checkpoint.pt"
    shutil.copy(head, folder / "action_head--900_checkpoint.pt")
    refused("2 files action_head", folder)
    (folder / "action_head--900_checkpoint.pt").unlink()
    kept = head.read_bytes()
    head.unlink()
    refused("0 files action_head", folder)
    head.write_bytes(kept[:-50])
    refused("is refused", folder)
    torch.save({"model.fc1.weight": torch.zeros(3)}, head)
    refused(r"model\.layer_norm1\.weight is missing", folder)
    torch.save({"action_head": OpenVLAOFTConfig()}, head)
    refused("only tensors are read|opcode", folder)
    head.write_bytes(kept)

    # Without the projector of proprioception, the model does not read it.
    (folder / "proprio_projector--500_checkpoint.pt").unlink()
    blind = make_oft(folder, more)
    assert blind.proprio_projector is None
    stir(blind, gen())
    blind.sample(observation(more), generator=gen(), mode="eval")
    blind.fit_inputs(torch.randn(9, 7), torch.randn(9, 4))
    statistics = json.loads((folder / "dataset_statistics.json").read_text())
    del statistics["toy"]["proprio"]
    (folder / "dataset_statistics.json").write_text(json.dumps(statistics))
    shutil.copy(trained / "proprio_projector--500_checkpoint.pt", folder)
    refused("proprioception of 0 dims", folder)


def test_one_instruction_more_changes_no_other_row(trained):
    policy, obs = make_oft(trained), observation(TWO_CAMERAS)
    longer = dataclasses.replace(obs, instruction=[*obs.instruction[:2], SENTENCES[0] * 3])
    with torch.no_grad():
        torch.testing.assert_close(
            policy.predict(longer)[:2], policy.predict(obs)[:2], rtol=1e-5, atol=1e-5
        )


def test_memory_is_estimated_without_weights(trained):
    with torch.device("meta"):
        config = OpenVLAOFTConfig(pretrained=str(trained), horizon=2)
        policy = OpenVLAOFT(config, TWO_CAMERAS).to("meta")
    assert all(p.device.type == "meta" for p in policy.parameters())
