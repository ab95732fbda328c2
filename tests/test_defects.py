"""Checks that embodyrl passes, and a defect of published code (``defects.py``) fails."""

import math

import defects
import pytest
import torch

from embodyrl.build import make_policy
from embodyrl.functional.flow import (
    DenoisingTransition,
    draw_stochastic_steps,
    initial_log_prob,
    randn,
    timesteps,
)
from embodyrl.functional.losses import ppo_policy_loss, value_loss
from embodyrl.functional.returns import group_advantages
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.types import EnvSpec, Obs

F64 = torch.float64


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def toy_velocity(x, t, m=0.5, s=0.3):
    """Of data a ~ N(m, s^2)."""
    return -m + (t - (1 - t) * s**2) / ((1 - t) ** 2 * s**2 + t**2) * (x - (1 - t) * m)


def first_ratio_is_1(sampling_times, scoring_times):
    """Before any update, scoring a path gives the probability with which it was sampled."""
    for steps in (2, 4):
        transition, log_std, generator = (
            DenoisingTransition("flow_noise", steps),
            torch.full((1, 1), math.log(0.12)),
            seeded(),
        )
        x, log_ratio = randn((500, 1, 1), generator).to(F64), torch.zeros(500, dtype=F64)
        for k in range(steps):
            sampled, scored = (
                toy_velocity(x, float(t(steps)[k])) for t in (sampling_times, scoring_times)
            )
            x_next = x - sampled / steps + log_std.exp() * randn((500, 1, 1), generator)
            log_ratio += transition.log_prob(x, x_next, scored, k, log_std)
            log_ratio -= transition.log_prob(x, x_next, sampled, k, log_std)
            x = x_next
        assert log_ratio.abs().max() < 1e-6


def scores_average_to_0(noise):
    """E[d log p / d log sigma] = E[e^2] - 1 = 0: otherwise the learned noise drifts by itself."""
    e = torch.linspace(-8, 8, 100_001, dtype=F64)
    weight = torch.softmax(-0.5 * e**2, 0)
    assert abs(float((weight * (noise(e) ** 2 - 1)).sum())) < 1e-6


def unlikely_samples_have_a_gradient(log_prob):
    """d log N(x; mu, sigma) / d mu = (x - mu) / sigma^2, 4 sigma away as anywhere."""
    mean = torch.zeros((), requires_grad=True)
    (gradient,) = torch.autograd.grad(
        log_prob(torch.distributions.Normal(mean, 0.1).log_prob(torch.tensor(0.4))), mean
    )
    assert float(gradient) == pytest.approx(40.0)


def every_step_is_trained_in_a_batch(draw):
    assert draw(64, 4, "one", seeded()).any(0).all()


def joint_ratio_is_that_of_the_path(joint):
    initial, old = initial_log_prob(randn((8, 2, 3), seeded())), randn((8, 4), seeded(1))
    new = old + 0.1
    log_ratio = joint(initial, new) - joint(initial, old)
    torch.testing.assert_close(log_ratio, torch.full((8,), 0.4))  # log N(x_init) cancels


def clip_range_means_the_joint_ratio(log_ratio):
    """A path 1.35 times as likely is outside a range of .2, however many dims it has."""
    per_dim = torch.full((8, 4, 5, 4), 0.3 / 80)
    one = torch.ones(8, dtype=torch.bool)
    _, stats = ppo_policy_loss(log_ratio(per_dim), torch.zeros(8), torch.ones(8), one, 0.2, 0.2)
    assert stats["clip_fraction"] == 1


def rollout_and_training_value_the_same(at_rollout, in_training):
    spec = EnvSpec("test/arm", 5, 4, 6, "ee_delta_pos", 25.0, 20, {}, privileged_dim=3)
    policy = make_policy(
        FlowVLAConfig(width=32, layers=1, heads=2, text_layers=0, critic_width=16), spec, seed=0
    )
    torch.nn.init.normal_(policy.critic[-1].weight, generator=seeded())
    obs = Obs(
        {}, torch.randn(5, 6, generator=seeded()), ["go"] * 5, torch.randn(5, 3, generator=seeded())
    )
    trace = policy.sample(obs, generator=seeded(), mode="train").trace
    torch.testing.assert_close(at_rollout(policy, obs, trace), in_training(policy, obs, trace))


def clip_fraction_counts_what_moved(fraction):
    value, old = torch.tensor([0.1, 0.3, -0.5, 0.2]), torch.zeros(4)
    assert float(fraction(value, old, 0.2)) == 0.5


def dual_clip_bounds_the_loss(loss):
    arguments = (
        torch.tensor([math.log(10.0)]),
        torch.zeros(1),
        torch.tensor([-2.0]),
        torch.ones(1, dtype=torch.bool),
    )
    assert float(loss(*arguments, 0.2, 0.2, 3.0)[0]) == pytest.approx(6.0)


def equal_rewards_teach_nothing(advantages):
    assert (advantages(torch.full((4, 8), 0.1)) == 0).all()


def noise_follows_the_generator(noise):
    assert not torch.equal(noise((4, 2), seeded(1)), noise((4, 2), seeded(2)))


def right_clip_fraction(value, old, clip):
    return value_loss(value, old, old, torch.ones(4, dtype=torch.bool), clip)[1][
        "value_clip_fraction"
    ]


CASES = [
    (
        first_ratio_is_1,
        (timesteps, timesteps),
        (defects.reinflow_sampling_times, defects.reinflow_scoring_times),
    ),
    (scores_average_to_0, (lambda e: e,), (defects.reinflow_clamped_noise,)),
    (unlikely_samples_have_a_gradient, (lambda x: x,), (defects.reinflow_clamped_log_prob,)),
    (
        every_step_is_trained_in_a_batch,
        (draw_stochastic_steps,),
        (defects.one_step_for_the_whole_batch,),
    ),
    (
        joint_ratio_is_that_of_the_path,
        (lambda initial, steps: initial + steps.sum(1),),
        (defects.mean_over_k_plus_1_terms,),
    ),
    (clip_range_means_the_joint_ratio, (lambda x: x.sum((1, 2, 3)),), (defects.mean_over_dims,)),
    (
        rollout_and_training_value_the_same,
        (
            lambda policy, obs, trace: policy.sample(obs, generator=seeded(), mode="train").value,
            lambda policy, obs, trace: policy.evaluate(obs, trace).value,
        ),
        (defects.value_averaged_over_steps, defects.value_at_the_trained_step),
    ),
    (
        clip_fraction_counts_what_moved,
        (right_clip_fraction,),
        (defects.clip_fraction_after_clipping,),
    ),
    (dual_clip_bounds_the_loss, (ppo_policy_loss,), (defects.ppo_loss_that_ignores_dual_clip,)),
    (equal_rewards_teach_nothing, (group_advantages,), (defects.group_advantages_of_rounding,)),
    (noise_follows_the_generator, (randn,), (defects.noise_of_seed_0,)),
]


@pytest.mark.parametrize(
    ("check", "right", "wrong"), CASES, ids=[case[0].__name__ for case in CASES]
)
def test_the_check_passes_what_is_right_and_catches_the_defect(check, right, wrong):
    check(*right)
    with pytest.raises(AssertionError):
        check(*wrong)
