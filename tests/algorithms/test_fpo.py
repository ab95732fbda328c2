"""FPO: its ratio at the old parameters, a shift of the loss in closed form, and that it moves towards what worked."""

import copy
import dataclasses

import pytest
import torch

from embodyrl.algorithms.fpo import FPO, FPOConfig, draw_pairs, pair_losses
from embodyrl.build import make_policy
from embodyrl.errors import UserError
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.rollouts.batches import RolloutBatch
from embodyrl.types import EnvSpec, Obs

H, A, N = 2, 2, 32
SPEC = EnvSpec("test/arm", N, A, 3, "torque", 25.0, 20, {})
TINY = {
    "width": 16,
    "layers": 1,
    "heads": 2,
    "text_layers": 0,
    "critic_width": 8,
    "horizon": H,
    "action_patch": H,
}


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def make(*, policy=None, **settings):
    policy = make_policy(FlowVLAConfig(**TINY, critic="shared", **(policy or {})), SPEC, 0)
    with torch.no_grad():
        for p in policy.actor_parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=gen(1)))
    return FPO(
        FPOConfig(**{"warmup_iterations": 0, "lr": 1e-3, "lr_warmup": 1, **settings}), policy
    )


def observed(n=N):
    return Obs({}, torch.randn(n, 3, generator=gen(2)), ["go"] * n)


def rollout(algorithm, reward):
    """One chunk per env, every episode over after it; ``reward(actions)`` is (N,)."""
    obs = observed()
    sample = algorithm.policy.sample(obs, generator=gen(3), mode="train")
    rewards = torch.zeros(1, N, H)
    rewards[0, :, -1] = reward(sample.actions)
    done = torch.ones(1, N, dtype=torch.bool)
    return RolloutBatch(
        obs=obs,
        trace=sample.trace,
        logprob=sample.logprob,
        value=sample.value[None],
        next_value=torch.zeros(1, N),
        reward=rewards,
        valid=torch.ones(1, N, H, dtype=torch.bool),
        terminated=done,
        truncated=~done,
        episodes=[],
        env_steps=N * H,
    )


@pytest.mark.parametrize("per_pair", [True, False])
@pytest.mark.parametrize("eta", [0.0, 0.5])
def test_18_ratio_is_one_at_the_old_parameters(per_pair, eta):
    algorithm = make(per_pair=per_pair, epochs=1, minibatch_size=N, policy={"eta": eta})
    figures = algorithm.update(
        rollout(algorithm, lambda a: a[:, 0, 0]), progress=0.0, generator=gen(4)
    )
    assert figures["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert figures["approx_kl"] == pytest.approx(0.0, abs=1e-6) and figures["clip_fraction"] == 0


def test_18_a_shifted_velocity_shifts_the_loss_by_a_closed_form():
    policy, obs = make().policy, observed()
    pairs = draw_pairs(torch.randn(N, H, A, generator=gen(5)), 4, gen(6))
    before = pair_losses(policy, obs, pairs)
    velocity, c = policy.velocity, torch.randn(H, A, generator=gen(7))
    x = (1 - pairs.t)[..., None, None] * pairs.action[:, None] + pairs.t[
        ..., None, None
    ] * pairs.noise
    residual = velocity(policy.encode(obs), x, pairs.t) - (pairs.noise - pairs.action[:, None])
    policy.velocity = lambda *inputs: velocity(*inputs) + c
    shift = (2 * c * residual + c**2).sum(dim=(-2, -1))
    torch.testing.assert_close(
        pair_losses(policy, obs, pairs) - before, shift, atol=1e-4, rtol=1e-4
    )


def test_pairs_are_seeded_and_depend_on_nothing_else():
    action = torch.randn(N, H, A)
    a, b, c = (
        draw_pairs(action, 4, gen(0)),
        draw_pairs(action + 1, 4, gen(0)),
        draw_pairs(action, 4, gen(1)),
    )
    assert torch.equal(a.noise, b.noise) and torch.equal(a.t, b.t) and not torch.equal(a.t, c.t)
    assert (
        a.noise.shape == (N, 4, H, A)
        and a.t.shape == (N, 4)
        and (a.t > 0).all()
        and (a.t <= 1).all()
    )


def mean_action(policy):
    actions = policy.sample(observed(512), generator=gen(8), mode="eval").actions
    return float(actions[:, 0, 0].mean())


@pytest.mark.parametrize("per_pair", [True, False])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_it_moves_towards_what_was_rewarded(per_pair, sign):
    algorithm = make(per_pair=per_pair, epochs=4, policy={"eta": 0.0})
    before = mean_action(algorithm.policy)
    for i in range(12):
        algorithm.update(
            rollout(algorithm, lambda a: sign * a[:, 0, 0]), progress=0.0, generator=gen(20 + i)
        )
    assert sign * (mean_action(algorithm.policy) - before) > 0.1


def test_resumes_bit_for_bit():
    one = make()
    batch = rollout(one, lambda a: a[:, 0, 0])
    one.update(batch, progress=0.0, generator=gen(4))
    two = FPO(one.config, copy.deepcopy(one.policy))
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for algorithm in (one, two):
        algorithm.update(batch, progress=0.1, generator=gen(5))
    for p, q in zip(one.policy.parameters(), two.policy.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    "setting",
    [{"ratio": "per_dim"}, {"behaviour_cap": 2.0}, {"entropy_coef": 0.1}],
)
def test_refuses_what_it_cannot_do(setting):
    with pytest.raises(UserError, match=next(iter(setting))):
        dataclasses.replace(FPOConfig(), **setting)
