"""Training-time real-time chunking: a chunk continues the actions that it is given."""

import pytest
import torch
from vla_models import SENTENCES, check_goes_on, check_times, gen, stir
from vla_models import SPEC as VLA_SPEC

from embodyrl.algorithms.sft import SFT, SFTConfig
from embodyrl.build import make_policy
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.errors import UserError
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.policies.sample_path import given_prefix, integrate_after
from embodyrl.policies.vla.policy import VLAConfig
from embodyrl.real_robot.policy_link.real_time_chunking import sample_after
from embodyrl.types import EnvSpec, Obs

SPEC = EnvSpec("test/arm", 64, 1, 2, "ee_delta_pos", 25.0, 20, {}, privileged_dim=2)
CONFIG = FlowVLAConfig(
    width=32,
    layers=2,
    heads=2,
    text_layers=0,
    critic_width=8,
    horizon=5,
    action_patch=1,
    max_prefix=2,
)


def test_given_actions_are_clean_and_their_time_is_that_of_data():
    x, clean = torch.ones(2, 3, 1), torch.full((2, 3, 1), 7.0)
    chunk, times = given_prefix(x, torch.tensor([0.5, 0.9]), clean, torch.tensor([0, 2]))
    assert chunk[..., 0].tolist() == [[1, 1, 1], [7, 7, 1]]
    torch.testing.assert_close(times, torch.tensor([[0.5, 0.5, 0.5], [0.0, 0.0, 0.9]]))
    end = integrate_after(lambda x, t: torch.ones_like(x), 4, x[:, None], clean[:, None], 1)[:, 0]
    assert end[..., 0].tolist() == [[7, 0, 0], [7, 0, 0]]


def test_a_time_for_every_action_is_the_time_of_all_where_they_are_equal():
    policy = make_policy(CONFIG, SPEC, 0)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    obs = Obs({}, torch.randn(3, 2), ["go"] * 3, torch.zeros(3, 2))
    context, x, t = policy.encode(obs), torch.randn(3, 2, 5, 1), torch.rand(3, 2)
    each = t[..., None].expand(3, 2, 5)
    torch.testing.assert_close(policy.velocity(context, x, t), policy.velocity(context, x, each))
    other = each.clone()
    other[..., 0] = 0.0
    assert not torch.allclose(policy.velocity(context, x, t), policy.velocity(context, x, other))


def test_a_chunk_goes_on_the_way_that_it_is_given():
    """Half of the episodes go one way, half the other, and nothing but the actions says which."""
    g = torch.Generator().manual_seed(0)
    way = torch.where(torch.rand(40, generator=g) < 0.5, 0.6, -0.6).repeat_interleave(10)[:, None]
    episode, zeros = torch.arange(40).repeat_interleave(10), torch.zeros(400, dtype=torch.long)
    demos = Demonstrations(5, {}, torch.zeros(400, 2), way, episode, zeros, ["go"])
    config = SFTConfig(steps_per_iteration=250, batch_size=64, lr=3e-3, warmup=0.0, ema=0.9)
    sft = SFT(config, make_policy(CONFIG, SPEC, 0))
    sft.update(demos, progress=0.0, generator=g)
    policy = sft.result
    obs = Obs({}, torch.zeros(64, 2), ["go"] * 64, torch.zeros(64, 2))
    free = policy.sample(obs, generator=g, mode="eval").actions.mean((1, 2))
    assert 0.2 < (free > 0).float().mean() < 0.8
    for sign in (0.6, -0.6):
        actions = sample_after(policy, obs, torch.full((64, 5, 1), sign), 2, g)[:, 0]
        torch.testing.assert_close(actions[:, :2], torch.full((64, 2, 1), sign))
        assert ((actions[:, 2:] * sign > 0).all(1)).float().mean() > 0.95


def test_it_needs_a_time_for_every_action():
    for wrong in ({"action_patch": 5}, {"max_prefix": 5}, {"max_prefix": -1}):
        with pytest.raises(UserError, match=r"policy\.max_prefix"):
            FlowVLAConfig(**{"horizon": 5, "action_patch": 1, "max_prefix": 2, **wrong})


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """SmolVLA's architecture alone."""
    pytest.importorskip("num2words", reason="the extra vla is not installed")
    from embodyrl.policies.vla.make_small import make_small_smolvla

    size = {
        "width": 16,
        "layers": 2,
        "heads": 2,
        "vision_layers": 1,
        "image_size": 16,
        "patch_size": 4,
        "max_dim": 8,
    }
    return make_small_smolvla(tmp_path_factory.mktemp("small"), SENTENCES, **size)


def make_vla(folder, **settings):
    settings = {
        "pretrained": str(folder),
        "random_weights": True,
        "horizon": 5,
        "num_denoise_steps": 4,
        **settings,
    }
    return make_policy(VLAConfig(max_prefix=2, **settings), VLA_SPEC, 0)


def test_smolvla_takes_a_time_for_every_action(small):
    policy = make_vla(small)
    stir(policy, gen(1))
    check_times(policy)


def test_smolvla_goes_on_the_way_that_it_is_given(small):
    check_goes_on(make_vla(small), steps=200)


def test_a_prefix_leaves_something_to_ask_smolvla_for():
    with pytest.raises(UserError, match=r"policy\.max_prefix"):
        VLAConfig(horizon=5, max_prefix=5)
