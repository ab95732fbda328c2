"""Losses against their textbook forms, closed-form gradients and the defects they must not have."""

import math

import pytest
import torch
import torch.nn.functional as F

from embodyrl.functional.losses import (
    flow_matching_loss,
    masked_mean,
    nft_branches,
    nft_loss,
    one_step_loss,
    ppo_policy_loss,
    sac_actor_loss,
    td_loss,
    temperature_loss,
    value_loss,
)
from embodyrl.functional.returns import group_advantages

F64 = torch.float64
ALL = torch.ones(64, dtype=torch.bool)


def batch(seed=0, n=64, spread=0.5):
    g = torch.Generator().manual_seed(seed)
    old, change, advantage = (torch.randn(n, generator=g, dtype=F64) for _ in range(3))
    return old + spread * change, old, advantage


def textbook(logprob, old, advantage, low, high, dual=None):
    """PPO as published: minus the mean gain min(r A, clip(r) A).

    With dual clip (arXiv:1912.09729) the gain is at least c A where A < 0.
    """
    ratio = (logprob - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if dual is not None:
        gain = torch.where(advantage < 0, torch.maximum(gain, dual * advantage), gain)
    return -gain.mean()


def gradient(loss_of, logprob):
    leaf = logprob.clone().requires_grad_()
    loss = loss_of(leaf)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad


def single(log_ratio, advantage, low=0.2, high=0.2, dual=None):
    """Loss and gradient of one decision."""
    one = torch.ones(1, dtype=torch.bool)
    a, zero = torch.tensor([advantage], dtype=F64), torch.zeros(1, dtype=F64)
    start = torch.tensor([log_ratio], dtype=F64)
    loss, grad = gradient(lambda x: ppo_policy_loss(x, zero, a, one, low, high, dual)[0], start)
    return float(loss), float(grad)


# PPO


@pytest.mark.parametrize("dual", [None, 1.5, 3.0])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.1, 1.0)])
def test_policy_loss_and_its_gradient_are_the_textbook_ones(low, high, dual):
    logprob, old, advantage = batch()
    ours = gradient(lambda x: ppo_policy_loss(x, old, advantage, ALL, low, high, dual)[0], logprob)
    theirs = gradient(lambda x: textbook(x, old, advantage, low, high, dual), logprob)
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))


def test_16_gradient_at_ratio_1_is_reinforce():
    """d loss / d logprob_i = -A_i / B."""
    _, old, advantage = batch()
    _, grad = gradient(lambda x: ppo_policy_loss(x, old, advantage, ALL, 0.2, 0.2, 3.0)[0], old)
    assert torch.allclose(grad, -advantage / 64)


def test_16_clip_stops_what_has_gone_far_enough_and_nothing_else():
    up, down = math.log(1.5), math.log(0.5)
    assert single(up, 1.0) == pytest.approx((-1.2, 0.0))  # better already made likelier
    assert single(down, -1.0) == pytest.approx((0.8, 0.0))  # worse already made rarer
    assert single(down, 1.0) == pytest.approx(
        (-0.5, -0.5)
    )  # a step in the wrong direction is always undone
    assert single(up, -1.0) == pytest.approx((1.5, 1.5))


def test_16_dual_clip_bounds_the_loss_of_negative_advantages():
    assert single(math.log(10.0), -2.0) == pytest.approx((20.0, 20.0))
    assert single(math.log(10.0), -2.0, dual=3.0) == pytest.approx((6.0, 0.0))
    assert single(math.log(2.0), -2.0, dual=3.0) == pytest.approx(
        (4.0, 4.0)
    )  # not yet at the bound
    assert single(math.log(10.0), 2.0, high=20.0, dual=3.0) == pytest.approx(
        (-20.0, -20.0)
    )  # not for A > 0


def test_16_clip_higher_acts_for_positive_advantages_only():
    for log_ratio in (math.log(1.25), math.log(0.75), math.log(1.6), math.log(0.4)):
        assert single(log_ratio, -1.0, high=0.28) == single(log_ratio, -1.0, high=0.2)
    assert single(math.log(1.25), 1.0, high=0.28) == pytest.approx((-1.25, -1.25))
    assert single(math.log(1.25), 1.0, high=0.2) == pytest.approx((-1.2, 0.0))


def test_weights_scale_each_decisions_share_and_nothing_else():
    logprob, old, advantage = batch()
    weight = torch.rand(64, dtype=F64, generator=torch.Generator().manual_seed(1))
    loss, grad = gradient(
        lambda x: ppo_policy_loss(x, old, advantage, ALL, 0.2, 0.2, 3.0, weight)[0], logprob
    )
    _, plain = gradient(
        lambda x: ppo_policy_loss(x, old, advantage, ALL, 0.2, 0.2, 3.0)[0], logprob
    )
    assert torch.allclose(grad, weight * plain)
    same, _ = gradient(
        lambda x: ppo_policy_loss(x, old, advantage, ALL, 0.2, 0.2, 3.0, ALL.double())[0], logprob
    )
    assert torch.allclose(same, textbook(logprob, old, advantage, 0.2, 0.2, 3.0)) and loss != same


def dppo_loss(logprob, old, advantage, low, high, discount):
    """DPPO (arXiv:2409.00588): PPO on each of K steps (B, K); later ones are nearer the reward."""
    steps = logprob.shape[1]
    weight = discount ** torch.arange(steps - 1, -1, -1, dtype=F64)
    return textbook(
        logprob.flatten(), old.flatten(), (weight * advantage[:, None]).flatten(), low, high
    )


def test_23_dppo_without_denoising_discount_on_one_step_is_ppo():
    logprob, old, advantage = batch()
    ours = gradient(lambda x: ppo_policy_loss(x, old, advantage, ALL, 0.2, 0.2)[0], logprob)
    dppo = gradient(
        lambda x: dppo_loss(x[:, None], old[:, None], advantage, 0.2, 0.2, 1.0), logprob
    )
    assert all(torch.allclose(a, b) for a, b in zip(ours, dppo, strict=True))
    # On more steps it is not: DPPO clips each step on its own, the joint ratio all of them at once.
    two = torch.stack([logprob, logprob], 1), torch.stack([old, old], 1)
    joint, _ = ppo_policy_loss(two[0].sum(1), two[1].sum(1), advantage, ALL, 0.2, 0.2)
    assert not torch.allclose(joint, dppo_loss(*two, advantage, 0.2, 0.2, 1.0))


def test_8_first_minibatch_figures():
    _, old, advantage = batch()
    _, stats = ppo_policy_loss(old, old, advantage, ALL, 0.2, 0.2, 3.0)
    assert stats["ratio"] == 1 and stats["approx_kl"] == 0 and stats["log_ratio_max"] == 0
    assert stats["clip_fraction"] == 0 and stats["dual_clip_fraction"] == 0


def test_figures_by_hand():
    log_ratio = torch.tensor([0.0, math.log(1.3), math.log(0.5), math.log(4.0)], dtype=F64)
    advantage = torch.tensor([1.0, 1.0, 1.0, -1.0], dtype=F64)
    mask = torch.ones(4, dtype=torch.bool)
    _, stats = ppo_policy_loss(log_ratio, torch.zeros(4, dtype=F64), advantage, mask, 0.2, 0.4, 3.0)
    assert float(stats["ratio"]) == pytest.approx((1 + 1.3 + 0.5 + 4) / 4)
    assert float(stats["clip_fraction"]) == 0.5  # .5 and 4, not 1.3
    assert float(stats["dual_clip_fraction"]) == 0.25
    assert float(stats["approx_kl"]) == pytest.approx(
        sum(r - 1 - math.log(r) for r in (1, 1.3, 0.5, 4)) / 4
    )
    assert float(stats["log_ratio_max"]) == pytest.approx(math.log(4))


def test_approx_kl_estimates_the_kl_of_two_gaussians():
    """KL(old | new) of N(0, 1) and N(.3, 1) is .045."""
    x = torch.randn(200_000, dtype=F64, generator=torch.Generator().manual_seed(0))
    old, new = -0.5 * x**2, -0.5 * (x - 0.3) ** 2
    _, stats = ppo_policy_loss(
        new, old, torch.zeros_like(x), torch.ones_like(x, dtype=torch.bool), 0.2, 0.2
    )
    assert float(stats["approx_kl"]) == pytest.approx(0.045, rel=0.03)


def test_masked_decisions_count_in_nothing_even_when_they_are_nan():
    logprob, old, advantage = batch()
    mask = torch.arange(64) % 4 != 0
    nan = torch.tensor(float("nan"), dtype=F64)
    kept = (logprob[mask], old[mask], advantage[mask], mask[mask])
    spoiled = [torch.where(mask, x, nan) for x in (logprob, old, advantage)]
    expected, stats = ppo_policy_loss(*kept, 0.2, 0.2, 3.0)
    loss, spoiled_stats = ppo_policy_loss(*spoiled, mask, 0.2, 0.2, 3.0)
    assert torch.allclose(loss, expected)
    for key, value in stats.items():
        assert torch.allclose(spoiled_stats[key], value), key
    _, grad = gradient(
        lambda x: ppo_policy_loss(x, spoiled[1], spoiled[2], mask, 0.2, 0.2, 3.0)[0], logprob
    )
    assert torch.isfinite(grad).all() and (grad[~mask] == 0).all() and (grad[mask] != 0).any()


def test_nothing_left_gives_0():
    logprob, old, advantage = batch()
    loss, stats = ppo_policy_loss(logprob, old, advantage, ~ALL, 0.2, 0.2)
    assert loss == 0 and stats["clip_fraction"] == 0
    assert value_loss(logprob, old, advantage, ~ALL)[0] == 0


@pytest.mark.parametrize("log_ratio", [200.0, -200.0, 800.0])
def test_ratio_beyond_floating_point_leaves_the_gradient_finite(log_ratio):
    for advantage in (1.0, -1.0):
        loss, grad = single(log_ratio, advantage, dual=3.0)
        assert math.isfinite(loss) and math.isfinite(grad)


def test_grpo_raises_the_success_and_lowers_the_failure():
    """GRPO is the same loss with group advantages: the gradient has their sign and sums to 0."""
    returns = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]], dtype=F64)
    advantage, old = group_advantages(returns).flatten(), torch.zeros(8, dtype=F64)
    mask = torch.ones(8, dtype=torch.bool)
    _, grad = gradient(lambda x: ppo_policy_loss(x, old, advantage, mask, 0.2, 0.28)[0], old)
    assert grad[0] < 0 and (grad[1:4] > 0).all() and (grad[4:] == 0).all()
    assert abs(float(grad.sum())) < 1e-12


# Value


def test_value_loss_is_huber():
    value, ret = torch.tensor([1.0, 30.0], dtype=F64), torch.zeros(2, dtype=F64)
    mask = torch.ones(2, dtype=torch.bool)
    loss, stats = value_loss(value, value, ret, mask, huber=10.0)
    assert float(loss) == pytest.approx((0.5 * 1 + 10 * (30 - 5)) / 2)
    assert float(stats["value_error"]) == pytest.approx(15.5) and stats["value_clip_fraction"] == 0


def test_value_clip_is_pessimistic():
    """Beyond the clip, a value past the return keeps its gradient; one before it has none."""
    old, one = torch.zeros(1, dtype=F64), torch.ones(1, dtype=torch.bool)
    value = torch.tensor([0.5], dtype=F64)

    def towards(ret):
        return gradient(
            lambda v: value_loss(v, old, torch.tensor([ret], dtype=F64), one, clip=0.2)[0], value
        )

    loss, grad = towards(1.0)
    assert float(loss) == pytest.approx(0.5 * 0.8**2) and float(grad) == 0
    loss, grad = towards(-1.0)
    assert float(loss) == pytest.approx(0.5 * 1.5**2) and float(grad) == pytest.approx(1.5)


def test_value_loss_ignores_masked_nan():
    value, ret, old = batch()
    mask = torch.arange(64) % 2 == 0
    spoiled = torch.where(mask, ret, torch.nan)
    expected, _ = value_loss(value[mask], old[mask], ret[mask], mask[mask], 0.2)
    loss, grad = gradient(lambda v: value_loss(v, old, spoiled, mask, 0.2)[0], value)
    assert (
        torch.allclose(loss, expected) and torch.isfinite(grad).all() and (grad[~mask] == 0).all()
    )


# Flow matching


def test_flow_matching_loss_and_its_masks():
    g = torch.Generator().manual_seed(0)
    pred, target = torch.randn(3, 4, 2, generator=g), torch.randn(3, 4, 2, generator=g)
    assert torch.allclose(flow_matching_loss(pred, target), F.mse_loss(pred, target))
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1, 2:] = False
    kept = (pred - target).square()[mask].mean()
    assert torch.allclose(flow_matching_loss(pred, target, mask), kept)
    assert torch.allclose(flow_matching_loss(pred, target, mask[..., None].expand(3, 4, 2)), kept)
    spoiled = torch.where(mask[..., None], target, torch.nan)
    loss, grad = gradient(lambda x: flow_matching_loss(x, spoiled, mask), pred)
    assert torch.allclose(loss, kept) and torch.isfinite(grad).all()


def test_masked_mean():
    x = torch.tensor([[1.0, 2.0], [3.0, float("nan")]])
    assert masked_mean(x, torch.tensor([[True, True], [True, False]])) == 2
    assert masked_mean(x, torch.tensor([True, False])) == 2
    assert masked_mean(x, torch.tensor([[1.0, 1.0], [0.0, 0.0]])) == 1.5
    assert masked_mean(x, torch.zeros(2, 2)) == 0


# SAC


def test_sac_losses_by_hand():
    q, logprob = torch.tensor([1.0, 5.0], dtype=F64), torch.tensor([2.0, 8.0], dtype=F64)
    assert float(sac_actor_loss(q, logprob, 0.5)) == (1 - 1 + 4 - 5) / 2
    log_alpha = torch.tensor(math.log(3.0), dtype=F64, requires_grad=True)
    loss = temperature_loss(log_alpha, logprob, -7.0)
    assert float(loss.detach()) == pytest.approx(3 * (-5 + 7))  # alpha (H - H_target)
    (slope,) = torch.autograd.grad(loss, log_alpha)
    assert float(slope) == pytest.approx(6.0)


def test_the_temperature_sends_no_gradient_into_the_actor():
    logprob = torch.randn(4, requires_grad=True)
    loss = temperature_loss(torch.zeros((), requires_grad=True), logprob, -1.0)
    loss.backward()
    assert logprob.grad is None


def test_td_loss_is_the_mean_over_the_batch_and_the_sum_over_critics():
    q = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 6.0]], dtype=F64)
    target = torch.tensor([0.0, 2.0, 5.0], dtype=F64)
    assert float(td_loss(q, target)) == pytest.approx((1 + 0 + 4) / 3 + (0 + 4 + 1) / 3)


# NFT


def test_nft_branches_mirror_each_other_at_the_old_velocity():
    new, old = torch.tensor([5.0, -1.0]), torch.tensor([1.0, 3.0])
    plus, minus = nft_branches(new, old, 0.25)
    assert plus.tolist() == [2.0, 2.0] and minus.tolist() == [0.0, 4.0]


@pytest.mark.parametrize("shape", [(2, 3), (2, 2, 3)])
def test_nft_loss_by_hand(shape):
    """Row means of r |plus - u|^2 + (1 - r) |minus - u|^2, then their weighted mean."""
    g = torch.Generator().manual_seed(0)
    plus, minus, target = (torch.randn(shape, generator=g, dtype=F64) for _ in range(3))
    r, weight = torch.tensor([0.2, 0.9], dtype=F64), torch.tensor([3.0, 0.5], dtype=F64)
    rows = [
        float(
            r[b] * ((plus - target)[b] ** 2).mean() + (1 - r[b]) * ((minus - target)[b] ** 2).mean()
        )
        for b in range(2)
    ]
    assert float(nft_loss(plus, minus, target, r)) == pytest.approx(sum(rows) / 2)
    weighted = nft_loss(plus, minus, target, r, weight)
    assert float(weighted) == pytest.approx((3 * rows[0] + 0.5 * rows[1]) / 2)


# Edges: of ranges, of masks and of batches


def decisions(log_ratio, advantage, low=0.2, high=0.4, dual=3.0):
    """Figures of decisions with these ratios and advantages."""
    log_ratio = torch.tensor(log_ratio, dtype=F64)
    advantage = torch.tensor(advantage, dtype=F64)
    mask = torch.ones_like(log_ratio, dtype=torch.bool)
    return ppo_policy_loss(log_ratio, torch.zeros_like(log_ratio), advantage, mask, low, high, dual)


@pytest.mark.parametrize("low", [1.0, 1.5])
def test_a_lower_clip_of_1_or_more_is_none(low):
    assert single(-5.0, -1.0, low=low) == pytest.approx((math.exp(-5), math.exp(-5)))
    assert decisions([-30.0], [-1.0], low=low)[1]["clip_fraction"] == 0


def test_an_advantage_of_0_adds_nothing_however_large_the_ratio():
    assert single(800.0, 0.0) == (0.0, 0.0)


def test_ratios_at_a_bound_are_inside():
    _, stats = decisions([math.log1p(0.4), math.log1p(-0.2), math.log(3.0)], [1.0, 1.0, -1.0])
    assert float(stats["clip_fraction"]) == pytest.approx(1 / 3)  # the 3 alone
    assert stats["dual_clip_fraction"] == 0


def test_the_dual_clip_counts_negative_advantages_alone():
    _, stats = decisions([2.0, 2.0, 2.0], [0.0, 0.5, -0.5])
    assert float(stats["dual_clip_fraction"]) == pytest.approx(1 / 3)


def test_figures_of_one_decision_and_of_none():
    _, stats = decisions([math.log(2.0)], [1.0])
    assert float(stats["ratio"]) == pytest.approx(2.0) and stats["clip_fraction"] == 1
    loss, stats = decisions([], [])
    assert loss == 0 and stats["ratio"] == 1 and stats["log_ratio_max"] == 0
    assert stats["approx_kl"] == 0 and stats["clip_fraction"] == 0


def value_by_hand(value, old, ret, clip, huber):
    """The larger loss of the value and of old + clip(value - old)."""

    def loss(error):
        small = 0.5 * error**2
        return small if abs(error) <= huber else huber * (abs(error) - 0.5 * huber)

    bounded = old + min(max(value - old, -clip), clip)
    return max(loss(value - ret), loss(bounded - ret))


@pytest.mark.parametrize("ret", [-4.0, 1.0, 9.0])
@pytest.mark.parametrize("value", [0.0, 1.9, 2.1, 5.0])
def test_the_clipped_value_loss_by_hand(value, ret):
    old, clip, huber = 2.0, 0.5, 2.5
    one = torch.ones(1, dtype=torch.bool)
    loss, stats = value_loss(
        *(torch.tensor([x], dtype=F64) for x in (value, old, ret)), one, clip, huber
    )
    assert float(loss) == pytest.approx(value_by_hand(value, old, ret, clip, huber))
    assert float(stats["value_error"]) == pytest.approx(abs(value - ret))
    assert float(stats["value_clip_fraction"]) == (abs(value - old) > clip)


def test_figures_of_the_value_count_what_the_mask_keeps():
    value, old, ret = (
        torch.tensor(x, dtype=F64) for x in ([1.0, 5.0, 9.0], [1.25, 1.0, 9.0], [0.0, 2.0, 3.0])
    )
    mask = torch.tensor([True, True, False])
    _, stats = value_loss(value, old, ret, mask, clip=0.25)
    assert float(stats["value_error"]) == (1 + 3) / 2
    assert float(stats["value_clip_fraction"]) == 0.5  # a change of .25 is inside
    assert stats["value_clip_fraction"].dtype == F64


def test_the_value_loss_is_quadratic_up_to_10():
    value, mask = torch.tensor([10.5], dtype=F64), torch.ones(1, dtype=torch.bool)
    loss, _ = value_loss(value, value, torch.zeros(1, dtype=F64), mask)
    assert float(loss) == pytest.approx(10 * (10.5 - 5))


def test_the_gradient_of_a_one_step_head_is_that_of_distance_and_value():
    """2 alpha (a - target) / (B H A) - dQ/da / (B scale), and nothing reaches target or scale."""
    action = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(1), requires_grad=True)
    slope = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(2))
    q = (slope * action).sum((1, 2))
    scale = (action.sum() * 0 + 4.0).requires_grad_()
    loss = one_step_loss(action, target, q, 3.0, scale)
    wanted = 3.0 * (action - target).square().mean() - q.mean() / 4.0
    torch.testing.assert_close(loss, wanted)
    found = torch.autograd.grad(loss, [action, target, scale], allow_unused=True)
    by_hand = 2 * 3.0 * (action - target) / action.numel() - slope / (5 * 4.0)
    torch.testing.assert_close(found[0], by_hand.detach())
    assert found[1] is None and found[2] is None


def test_values_of_a_one_step_head_are_not_scaled_unless_asked():
    action = torch.zeros(2, 1, 1)
    loss = one_step_loss(action, action + 2.0, torch.tensor([1.0, 3.0]), 0.5)
    assert float(loss) == 0.5 * 4.0 - 2.0
