"""Wan's networks, built small from a config, as a world model with two cameras."""

import json

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from squares import SIZE, VAE, two_views

from embodyrl import checks
from embodyrl.errors import UserError
from embodyrl.world_models.env import WorldModelConfig, WorldModelEnv
from embodyrl.world_models.init import build_model, continue_model
from embodyrl.world_models.keyframes import add_keyframes
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.reflectors.calibration import Calibration
from embodyrl.world_models.train import WorldTrainConfig
from embodyrl.world_models.trainer import WorldTrainer

WAN = {
    "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16, "ffn_dim": 32, "num_layers": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def wan(tmp_path_factory) -> str:
    """A Wan of random weights in diffusers' layout."""
    folder = tmp_path_factory.mktemp("wan")
    torch.manual_seed(0)
    AutoencoderKLWan(**VAE).save_pretrained(folder / "vae")
    WanTransformer3DModel(**WAN).save_pretrained(folder / "transformer")
    return str(folder)


def test_it_learns_is_saved_and_dreams_in_two_views(wan, tmp_path) -> None:
    clips = two_views()
    config = WorldTrainConfig(
        data=("memory",),
        wan=wan,
        horizon=3,
        stochastic=True,
        steps=3,
        inverse_steps=6,
        batch_size=4,
        out=str(tmp_path / "run"),
    )
    rows = torch.arange(len(clips))
    model = build_model(config, clips, rows)
    before = AutoencoderKLWan.from_pretrained(wan, subfolder="vae").state_dict()
    assert all(torch.equal(v, model.codec.vae.state_dict()[k]) for k, v in before.items())
    kept = model.backbone.wan.patch_embedding.weight.clone()
    loaded = WanTransformer3DModel.from_pretrained(
        wan, subfolder="transformer"
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
    assert not torch.equal(
        kept, model.backbone.wan.patch_embedding.weight
    )  # and the codec is as it was
    assert all(torch.equal(v, model.codec.vae.state_dict()[k]) for k, v in before.items())

    add_keyframes(model.eval(), clips, torch.zeros(len(clips), dtype=torch.bool))
    model.calibration, model.max_disagreement = Calibration(bias=-50.0, threshold=1.0), 1e9
    model.save(tmp_path / "model")
    for name, value in WorldModel.load(tmp_path / "model").state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    env = WorldModelEnv(
        WorldModelConfig(
            model=str(tmp_path / "model"),
            num_envs=2,
            sampling_steps=2,
            starts="any",
            precision="f32",
        )
    )
    obs = env.reset(init=[0, 1])
    assert {k: tuple(v.shape) for k, v in obs.images.items()} == {
        k: (2, SIZE, SIZE, 3) for k in ("front", "side")
    }
    env.step(torch.zeros(2, 3, 2))
    checks.check_env(env, horizon=3)


def test_every_action_and_camera_counts_and_those_not_executed_do_not(wan) -> None:
    clips = two_views()
    model = build_model(
        WorldTrainConfig(data=("m",), wan=wan, horizon=3), clips, torch.arange(len(clips))
    ).eval()
    context = torch.randn(1, 3, 2, *model.codec.latent_shape)
    dream = model.begin(context, torch.rand(1, 2), torch.zeros(1, 256))
    actions, two = torch.rand(1, 3, 2), torch.tensor([2])
    with torch.no_grad():
        base = model.imagine(dream, actions, two).latent
        last, first, view = actions.clone(), actions.clone(), context.clone()
        last[:, 2], first[:, 0], view[:, 2, 1] = -last[:, 2], -first[:, 0], 0.0
        assert torch.equal(model.imagine(dream, last, two).latent, base)
        assert not torch.allclose(model.imagine(dream, first, two).latent, base, atol=1e-6)
        other = model.begin(view, torch.rand(1, 2), torch.zeros(1, 256))
        assert not torch.allclose(
            model.imagine(other, actions, two).latent[:, 0], base[:, 0], atol=1e-6
        )


def test_one_that_knew_the_mean_goes_on_and_learns_to_draw(wan, tmp_path) -> None:
    clips = two_views()
    config = WorldTrainConfig(data=("m",), wan=wan, horizon=3)
    old = build_model(config, clips, torch.arange(len(clips)))
    old.save(tmp_path / "old")
    new = continue_model(
        WorldTrainConfig(data=("m",), init=str(tmp_path / "old"), stochastic=True), clips
    )
    assert not old.stochastic and new.stochastic and type(new.backbone) is type(old.backbone)
    assert all(
        torch.equal(v, old.backbone.state_dict()[k]) for k, v in new.backbone.state_dict().items()
    )


def test_what_is_no_wan_or_does_not_fit_is_refused(wan, tmp_path) -> None:
    from embodyrl.world_models.nets.pretrained.load import load_wan

    dims = {"action_dim": 2, "horizon": 3, "proprio_dim": 2}
    with pytest.raises(UserError, match="holds no Wan in diffusers' layout"):
        load_wan(tmp_path / "nothing", 1, (32, 32), **dims)
    with pytest.raises(UserError, match="multiples of 8, not 30x32"):
        load_wan(wan, 1, (30, 32), **dims)
    AutoencoderKLWan(**VAE).save_pretrained(tmp_path / "vae")
    WanTransformer3DModel(**{**WAN, "in_channels": 8}).save_pretrained(tmp_path / "transformer")
    with pytest.raises(UserError, match="takes 8 latent channels"):
        load_wan(tmp_path, 1, (32, 32), **dims)
