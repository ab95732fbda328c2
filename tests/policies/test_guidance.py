"""RL guidance: weight 0 is the base, 1 the trained policy, any other a mixture of velocities."""

import copy
from dataclasses import replace

import pytest
import torch
from vla_models import SPEC, gen, observation, stir

from embodyrl.errors import UserError
from embodyrl.policies.actor_critic import ActorCritic
from embodyrl.policies.flow_mlp import FlowMLP, FlowMLPConfig
from embodyrl.policies.flow_vla import FlowVLA, FlowVLAConfig
from embodyrl.policies.guidance import GuidedPolicy

CONFIG = FlowVLAConfig(
    width=16, layers=1, heads=2, text_layers=0, horizon=5, critic_width=8, num_denoise_steps=3
)


@pytest.fixture(scope="module")
def pair():
    base = FlowVLA(CONFIG, SPEC)
    stir(base, gen(0))
    trained = copy.deepcopy(base)
    stir(trained, gen(1))
    return trained.eval(), base.eval()


def act(policy) -> torch.Tensor:
    return policy.sample(observation(), generator=gen(7), mode="eval").actions


def test_the_ends_are_the_two_policies(pair):
    trained, base = pair
    assert not torch.allclose(act(trained), act(base))
    assert torch.equal(act(GuidedPolicy(trained, base, 0.0)), act(base))
    torch.testing.assert_close(act(GuidedPolicy(trained, base, 1.0)), act(trained))


def test_one_step_goes_as_far_as_it_is_told(pair):
    config = replace(CONFIG, num_denoise_steps=1)
    trained, base = (FlowVLA(config, SPEC).eval() for _ in range(2))
    trained.load_state_dict(pair[0].state_dict())
    base.load_state_dict(pair[1].state_dict())
    for policy in (
        trained,
        base,
    ):  # so that no action is clipped, and the end is linear in the velocity
        policy.normalize_action.std.fill_(1e-3)
        policy.normalize_action.mean.zero_()
    expected = act(base) + 2.5 * (act(trained) - act(base))
    torch.testing.assert_close(act(GuidedPolicy(trained, base, 2.5)), expected)


def test_policies_that_do_not_go_together_are_refused(pair):
    trained, base = pair
    other = copy.deepcopy(base)
    other.normalize_action.std.mul_(2)
    for wrong in (other, FlowVLA(replace(CONFIG, num_denoise_steps=2), SPEC)):
        with pytest.raises(UserError, match="do not go together"):
            GuidedPolicy(trained, wrong, 1.5)
    with pytest.raises(UserError, match="must not be negative"):
        GuidedPolicy(trained, base, -1.0)
    with pytest.raises(UserError, match="can only be evaluated"):
        GuidedPolicy(trained, base, 1.0).sample(observation(), generator=gen(), mode="train")
    states = replace(SPEC, cameras={}, tasks=("one",))
    with pytest.raises(UserError, match="do not go together"):
        GuidedPolicy(FlowMLP(FlowMLPConfig(), states), base, 1.0)
    critic_only = ActorCritic()
    critic_only.config = replace(CONFIG, name="token_vla")
    with pytest.raises(UserError, match="token_vla is not a flow policy"):
        GuidedPolicy(critic_only, base, 1.0)
