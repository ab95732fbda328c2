"""AnyFlow's causal network as backbone: its cache, its sampling, and its flow map."""

import json

import pytest
import torch
from diffusers import AnyFlowFARTransformer3DModel, AutoencoderKLWan
from diffusers.models.transformers.transformer_anyflow_far import AnyFlowCausalAttnProcessor
from squares import SIZE, VAE, squares, two_views

from embodyrl.errors import UserError
from embodyrl.world_models.env import WorldModelConfig, WorldModelEnv
from embodyrl.world_models.init import build_model
from embodyrl.world_models.keyframes import add_keyframes
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.nets.pretrained.anyflow import GRIDS, AnyFlowBackbone
from embodyrl.world_models.nets.pretrained.load import load_wan
from embodyrl.world_models.reflectors.calibration import Calibration
from embodyrl.world_models.stage import Stage
from embodyrl.world_models.train import WorldTrainConfig
from embodyrl.world_models.trainer import WorldTrainer
from embodyrl.world_models.training_losses import noisy_change

FAR = {
    "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16, "ffn_dim": 64, "num_layers": 2,
}  # fmt: skip
TOY = {
    "num_attention_heads": 4,
    "freq_dim": 64,
    "ffn_dim": 128,
    "num_layers": 1,
    "full_chunk_limit": 4,
}
DIMS = {"action_dim": 2, "horizon": 3, "proprio_dim": 2}


def backbone(**changes) -> AnyFlowBackbone:
    torch.manual_seed(0)
    return AnyFlowBackbone(2, **DIMS, wan_config=FAR | changes, stochastic=True).eval()


def chunk(rows: int = 3, views: int = 2) -> tuple[torch.Tensor, ...]:
    """Context, proprio, actions, count and noise, for ``AnyFlowBackbone.forward``."""
    generator = torch.Generator().manual_seed(1)
    context = torch.randn(rows, 3, views, 4, 4, 4, generator=generator)
    actions = torch.rand(rows, 3, 2, generator=generator)
    count = torch.arange(rows) % 3 + 1
    return (
        context,
        torch.rand(rows, 2, generator=generator),
        actions,
        count,
        torch.linspace(0, 0.3, rows),
    )


@pytest.fixture(scope="module")
def anyflow(tmp_path_factory) -> str:
    """An AnyFlow of random weights in diffusers' layout."""
    folder = tmp_path_factory.mktemp("anyflow")
    torch.manual_seed(0)
    AutoencoderKLWan(**VAE).save_pretrained(folder / "vae")
    AnyFlowFARTransformer3DModel(**FAR).save_pretrained(folder / "transformer")
    return str(folder)


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("full", [2, 3, 4])
@torch.no_grad()
def test_with_the_cache_it_says_what_it_says_without(steps, full) -> None:
    net, given = backbone(full_chunk_limit=full), chunk()
    x = torch.randn(3, 2, 4, 4, 4)
    cached, moved = net.denoise(*given, x, steps)
    one = torch.ones(3)
    for left in range(steps, 0, -1):
        clean, other = net(*given, x, one * left / steps, one * (left - 1) / steps)
        x = clean + (left - 1) / left * (x - clean)
    assert torch.allclose(cached, x, atol=1e-5) and torch.allclose(moved, other, atol=1e-5)


@torch.no_grad()
def test_the_context_is_looked_at_once_and_does_not_see_the_next_frame() -> None:
    net, given, seen, last = backbone(), chunk(), [], []
    net.wan.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    net.denoise(*given, torch.randn(3, 2, 4, 4, 4), 4)
    assert seen == [3, 1, 1, 1, 1]
    net.wan.blocks[-1].register_forward_hook(lambda _, __, out: last.append(out))
    for seed in (0, 1):
        net(
            *given,
            torch.randn(3, 2, 4, 4, 4, generator=torch.Generator().manual_seed(seed)),
            torch.full((3,), 0.5),
        )
    context = (
        2 + 2 * 8
    )  # the first frame is compressed: 1x2 patches of 4x4, the other two have 2x4 of 2x2
    assert torch.equal(last[0][:, :context], last[1][:, :context])
    assert not torch.allclose(last[0][:, context:], last[1][:, context:], atol=1e-3)


@torch.no_grad()
def test_its_attention_is_the_flex_attention_of_diffusers() -> None:
    net, given = backbone(), (*chunk(), torch.randn(3, 2, 4, 4, 4), torch.tensor([0.0, 0.4, 1.0]))
    change, _ = net(*given)
    mask = net.wan.build_attention_mask(chunk_partition=[1] * 4, height=4, width=8, device="cpu")
    for block in net.wan.blocks:
        block.attn1.set_processor(flex(mask))
    assert torch.allclose(net(*given)[0], change, atol=1e-5)


def flex(mask):
    """diffusers' own attention with a mask that it knows."""
    own = AnyFlowCausalAttnProcessor()
    return lambda attn, x, attention_mask, rotary_emb: own(attn, x, None, mask, rotary_emb)


def test_it_is_the_same_after_it_was_saved_and_loaded(tmp_path) -> None:
    net, given = backbone(), (*chunk(), torch.randn(3, 2, 4, 4, 4), 2)
    net.save_pretrained(tmp_path)
    with torch.no_grad():
        loaded = AnyFlowBackbone.from_pretrained(tmp_path).denoise(*given)
        assert all(torch.equal(a, b) for a, b in zip(net.denoise(*given), loaded, strict=True))


def test_shortcuts_stand_where_sampling_asks_and_leave_the_mean_alone() -> None:
    net, generator = backbone(), torch.Generator().manual_seed(0)
    given, change = chunk(rows=64), torch.randn(64, 2, 4, 4, 4)
    sample, time = noisy_change(change, generator)
    new, t, r, goal = net.shortcut_targets(*given, change, sample, time, generator)
    far = t > r
    assert 8 < far.sum() < 32 and (time[far] > 0).all()
    steps = 1 / (t - r)[far]
    assert set(steps.round().int().tolist()) <= set(GRIDS) and torch.allclose(
        steps, steps.round(), atol=1e-3
    )
    assert torch.allclose((t[far] * steps), (t[far] * steps).round(), atol=1e-3)
    for before, after in ((sample, new), (time, t), (time, r), (change, goal)):
        assert torch.equal(before[~far], after[~far])


def test_few_steps_of_the_learned_flow_map_find_one_of_two_futures() -> None:
    """The next frame is all 1 or all -1 by chance; one step of a flow ends in the middle."""
    torch.manual_seed(0)
    net = AnyFlowBackbone(1, **DIMS, wan_config=FAR | TOY, stochastic=True)
    rows, generator = 64, torch.Generator().manual_seed(0)
    given = (
        torch.zeros(rows, 3, 1, 4, 2, 2),
        torch.zeros(rows, 2),
        torch.zeros(rows, 3, 2),
        torch.full((rows,), 3),
    )
    given, steps = (*given, torch.zeros(rows)), 300
    matrices = [p for name, p in net.blocks.named_parameters() if p.ndim == 2]
    x = torch.randn(rows, 1, 4, 2, 2, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = net.denoise(*given, x, 1)[0]
    stage, losses = Stage(net, matrices, (0.02, 0.01), steps), []
    for _ in range(steps):
        future = (
            torch.randint(0, 2, (rows, 1, 1, 1, 1), generator=generator)
            .mul(2.0)
            .sub(1)
            .expand(rows, 1, 4, 2, 2)
        )
        time = torch.rand(rows, generator=generator).clamp_min(1e-3)
        t, noise = time.view(-1, 1, 1, 1, 1), torch.randn(future.shape, generator=generator)
        *noisy, goal = net.shortcut_targets(
            *given, future, (1 - t) * future + t * noise, time, generator
        )
        loss = (net(*given, *noisy)[0] - goal).square().mean()
        stage.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(stage.nets.parameters(), 1.0)
        stage.optimizer_step()
        losses.append(float(loss.detach()))
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])
    stage.finish()
    with torch.no_grad():
        flow = net(*given, x, torch.ones(rows))[0]
        made = [net.denoise(*given, x, n)[0] for n in (1, 4)]
    # The mean square distance to the nearer of the two; it is 1 from the middle.
    before, flow, one, four = (
        float((change.abs() - 1).square().mean()) for change in (before, flow, *made)
    )
    assert one < 0.5 * before and one < 0.5 * flow and four < 0.4 * flow, (before, flow, one, four)


def test_it_learns_is_saved_and_dreams(anyflow, tmp_path) -> None:
    clips = two_views()
    config = WorldTrainConfig(
        data=("memory",),
        wan=anyflow,
        horizon=3,
        stochastic=True,
        steps=3,
        inverse_steps=6,
        batch_size=8,
        out=str(tmp_path / "run"),
    )
    rows = torch.arange(len(clips))
    model = build_model(config, clips, rows)
    assert isinstance(model.backbone, AnyFlowBackbone)
    kept = model.backbone.wan.patch_embedding.weight.clone()
    loaded = AnyFlowFARTransformer3DModel.from_pretrained(
        anyflow, subfolder="transformer"
    ).patch_embedding.weight
    assert torch.equal(kept, loaded)
    (tmp_path / "run").mkdir()
    WorldTrainer(config, tmp_path / "run", model, clips, rows, lambda: None).run()
    written = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert (
        written[-1]["iteration"] == 3 + config.codec_steps + config.inverse_steps
        and written[-1]["picture"] > 0
    )
    assert not torch.equal(kept, model.backbone.wan.patch_embedding.weight)

    add_keyframes(model.eval(), clips, torch.zeros(len(clips), dtype=torch.bool))
    model.calibration, model.max_disagreement = Calibration(bias=-50.0, threshold=1.0), 1e9
    model.save(tmp_path / "model")
    for name, value in WorldModel.load(tmp_path / "model").state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    for steps in (0, 2):
        env = WorldModelEnv(
            WorldModelConfig(
                model=str(tmp_path / "model"), num_envs=2, sampling_steps=steps, precision="f32"
            )
        )
        obs = env.reset(init=[0, 1])
        assert {k: tuple(v.shape) for k, v in obs.images.items()} == {
            k: (2, SIZE, SIZE, 3) for k in ("front", "side")
        }
        env.step(torch.zeros(2, 3, 2))


def test_other_transformers_and_sizes_that_do_not_fit_are_refused(anyflow, tmp_path) -> None:
    AutoencoderKLWan(**VAE).save_pretrained(tmp_path / "vae")
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(
        json.dumps({"_class_name": "FluxTransformer2DModel"})
    )
    config = WorldTrainConfig(data=("m",), wan=str(tmp_path), horizon=3)
    clips = squares(2, 0)
    with pytest.raises(
        UserError, match="is a FluxTransformer2DModel, which cannot be a world model's backbone"
    ):
        build_model(config, clips, torch.arange(len(clips)))
    with pytest.raises(UserError, match="5x4 latent cells"):
        load_wan(anyflow, 1, (40, 32), **DIMS)
    with pytest.raises(UserError, match="full_chunk_limit is 1"):
        backbone(full_chunk_limit=1)
