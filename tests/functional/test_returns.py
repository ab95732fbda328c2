"""Returns and advantages against hand computations, a slow reference loop and closed forms."""

import math

import pytest
import torch

from embodyrl.errors import UserError
from embodyrl.functional.returns import (
    chunk_rewards,
    chunk_td_target,
    combined_group_advantages,
    discounted_returns,
    ensemble_value,
    equal_episode_weights,
    gae,
    group_advantages,
    masked_whiten,
)

F64 = torch.float64


def column(*values):
    """(T, 1) float64."""
    return torch.tensor(values, dtype=F64)[:, None]


def flags(*values):
    return torch.tensor(values, dtype=torch.bool)[:, None]


def rollout(seed, steps=20, envs=6, p_end=0.15):
    """Random rewards, values and episode ends, with one action per chunk.

    The value after an episode's end has nothing to do with that of the next chunk.
    """
    g = torch.Generator().manual_seed(seed)
    reward, value, after = (torch.randn(steps, envs, generator=g, dtype=F64) for _ in range(3))
    terminated = torch.rand(steps, envs, generator=g) < p_end
    done = terminated | (torch.rand(steps, envs, generator=g) < p_end)
    next_value = torch.where(done, after, torch.cat([value[1:], after[-1:]]))
    return reward, value, next_value, terminated, done


def slow_gae(reward, value, next_value, discount, terminated, done, lam):
    """The definition: TD errors up to the episode's end, weighted by lambda * discount."""
    out = torch.zeros_like(reward)
    for n in range(reward.shape[1]):
        for start in range(reward.shape[0]):
            weight = 1.0
            for t in range(start, reward.shape[0]):
                bootstrap = 0.0 if terminated[t, n] else discount[t, n] * next_value[t, n]
                out[start, n] += weight * (reward[t, n] + bootstrap - value[t, n])
                weight *= lam * float(discount[t, n])
                if done[t, n]:
                    break
    return out


# Chunks


def test_chunk_reward_and_td_target_by_hand():
    """21: sum gamma^i r_i + gamma^h V, over the valid actions."""
    reward = torch.tensor(
        [[1.0, 2.0, 4.0], [1.0, 2.0, 4.0], [1.0, 2.0, 4.0], [1.0, 2.0, 4.0]], dtype=F64
    )
    valid = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 0], [0, 0, 0]], dtype=torch.bool)
    terminated = torch.tensor([False, False, True, False])
    assert chunk_rewards(reward, valid, 0.5).tolist() == [1 + 1 + 1, 1 + 1, 1 + 1, 0]
    target = chunk_td_target(reward, valid, torch.full((4,), 8.0, dtype=F64), terminated, 0.5)
    assert target.tolist() == [
        3 + 8 / 8,
        2 + 8 / 4,
        2,
        8,
    ]  # gamma^3, gamma^2, terminated, nothing executed
    assert chunk_rewards(reward.view(2, 2, 3), valid.view(2, 2, 3), 0.5).shape == (2, 2)


def test_chunk_target_is_the_step_wise_target_applied_h_times():
    g = torch.Generator().manual_seed(0)
    reward = torch.randn(7, 5, generator=g, dtype=F64)
    valid = torch.arange(5) < torch.randint(0, 6, (7, 1), generator=g)
    target = next_value = torch.randn(7, generator=g, dtype=F64)
    for i in reversed(range(5)):
        target = torch.where(valid[:, i], reward[:, i] + 0.9 * target, target)
    none = torch.zeros(7, dtype=torch.bool)
    assert torch.allclose(chunk_td_target(reward, valid, next_value, none, 0.9), target)


def test_discounted_returns_by_hand_and_as_one_long_sum():
    """Chunks of 3, 1 and 2 actions, gamma 1/2; then any chunks against sum_i gamma^i r_i."""
    reward = torch.tensor([[4.0, 4, 4], [8, 99, 99], [16, 32, 99]], dtype=F64)
    valid = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]], dtype=torch.bool)
    last = 16 + 32 / 2
    middle = 8 + last / 2
    assert discounted_returns(reward, valid, 0.5).tolist() == [4 + 2 + 1 + middle / 8, middle, last]
    g = torch.Generator().manual_seed(0)
    reward = torch.randn(6, 4, generator=g, dtype=F64)
    valid = torch.arange(4) < torch.randint(1, 5, (6, 1), generator=g)
    found = discounted_returns(reward, valid, 0.9)
    for t in range(6):
        rest = reward[t:][valid[t:]]
        total = (0.9 ** torch.arange(len(rest), dtype=F64) * rest).sum()
        assert float(found[t]) == pytest.approx(float(total))
    assert discounted_returns(reward[:1], valid[:1], 0.9).shape == (1,)


def test_discounts_have_the_rewards_precision():
    """0.9^i in float32 is off by 1e-8."""
    reward, valid = torch.ones(2, 3, 5, dtype=F64), torch.ones(2, 3, 5, dtype=torch.bool)
    chunk = (1 - 0.9**5) / 0.1
    torch.testing.assert_close(
        chunk_rewards(reward, valid, 0.9), torch.full((2, 3), chunk, dtype=F64), rtol=1e-14, atol=0
    )
    none = torch.zeros(2, 3, dtype=torch.bool)
    target = chunk_td_target(reward, valid, torch.full((2, 3), 2.0, dtype=F64), none, 0.9)
    assert target.dtype == F64 and target.shape == (2, 3)
    torch.testing.assert_close(
        target, torch.full((2, 3), chunk + 2 * 0.9**5, dtype=F64), rtol=1e-14, atol=0
    )
    returns = discounted_returns(reward[0], valid[0], 0.9)
    expected = [(1 - 0.9**n) / 0.1 for n in (15, 10, 5)]
    assert returns.tolist() == pytest.approx(expected, rel=1e-14)


# GAE


def test_15_gae_by_hand():
    """Three steps, gamma .9, lambda .8: TD errors 1.3, .49, -.5.

    Each advantage is its TD error + .72 * the next advantage.
    """
    reward, value, next_value = (
        column(1.0, 0.5, 0.0),
        column(0.6, 1.0, 1.1),
        column(1.0, 1.1, 2 / 3),
    )
    no = flags(0, 0, 0)
    advantage, ret = gae(reward, value, next_value, column(0.9, 0.9, 0.9), no, no, 0.8)
    assert advantage.flatten().tolist() == pytest.approx([1.3936, 0.13, -0.5])
    assert ret.flatten().tolist() == pytest.approx([1.9936, 1.13, 0.6])


def test_15_truncation_bootstraps_and_termination_does_not():
    reward, value, next_value = column(0.0, 1.0, 0.0), column(0.0, 0.0, 0.0), column(0.0, 10.0, 5.0)
    discount = column(0.9, 0.9, 0.9)
    cut = flags(0, 1, 0)
    truncated, _ = gae(reward, value, next_value, discount, flags(0, 0, 0), cut, 1.0)
    terminated, _ = gae(reward, value, next_value, discount, cut, cut, 1.0)
    assert truncated.flatten().tolist() == pytest.approx([0.9 * 10, 1 + 9, 4.5])
    assert terminated.flatten().tolist() == pytest.approx([0.9, 1, 4.5])


def test_15_defect_treating_truncation_as_termination_loses_the_future():
    """The reward is always 1, so V = 1 / (1 - gamma) is exact.

    Then every advantage is 0, unless a time limit is taken for an end.
    """
    value = torch.full((5, 1), 10.0, dtype=F64)
    reward, discount = torch.ones_like(value), torch.full_like(value, 0.9)
    no, cut = flags(0, 0, 0, 0, 0), flags(0, 0, 0, 0, 1)
    right, _ = gae(reward, value, value, discount, no, cut, 0.95)
    wrong, _ = gae(reward, value, value, discount, cut, cut, 0.95)
    assert right.abs().max() < 1e-12 and wrong.max() < -4


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_15_gae_equals_the_slow_reference(lam):
    for seed in range(3):
        reward, value, next_value, terminated, done = rollout(seed)
        discount = torch.where(torch.rand(reward.shape) < 0.5, 0.9, 0.81).to(F64)
        advantage, ret = gae(reward, value, next_value, discount, terminated, done, lam)
        assert torch.allclose(
            advantage, slow_gae(reward, value, next_value, discount, terminated, done, lam)
        )
        assert torch.allclose(ret, advantage + value)


def test_15_lambda_0_is_the_td_error():
    reward, value, next_value, terminated, done = rollout(1)
    discount = torch.full_like(reward, 0.9)
    advantage, _ = gae(reward, value, next_value, discount, terminated, done, 0.0)
    assert torch.allclose(
        advantage, reward + 0.9 * torch.where(terminated, 0.0, next_value) - value
    )


def test_15_lambda_1_is_monte_carlo_minus_the_value():
    reward, value, next_value, terminated, done = rollout(2)
    advantage, ret = gae(
        reward, value, next_value, torch.full_like(reward, 0.9), terminated, done, 1.0
    )
    monte_carlo = torch.zeros_like(reward)
    following = next_value[-1]
    for t in reversed(range(len(reward))):
        following = torch.where(done[t], torch.where(terminated[t], 0.0, next_value[t]), following)
        monte_carlo[t] = following = reward[t] + 0.9 * following
    assert torch.allclose(advantage, monte_carlo - value) and torch.allclose(ret, monte_carlo)


def test_15_chunk_gae_with_one_action_is_the_plain_one():
    reward, value, next_value, terminated, done = rollout(3)
    valid = torch.ones(*reward.shape, 1, dtype=torch.bool)
    discount = 0.97 ** valid.sum(-1).to(F64)
    chunked = gae(
        chunk_rewards(reward[..., None], valid, 0.97),
        value,
        next_value,
        discount,
        terminated,
        done,
        0.9,
    )
    plain = gae(reward, value, next_value, torch.full_like(reward, 0.97), terminated, done, 0.9)
    assert all(torch.equal(a, b) for a, b in zip(chunked, plain, strict=True))


@pytest.mark.parametrize("lam", [0.9, 1.0])
def test_15_chunk_gae_equals_step_wise_gae_where_the_value_is_exact(lam):
    """Within a chunk nothing is decided: if the value is exact, only its first step has a TD error.

    Then the advantage of a chunk is that of its first step, with lambda per chunk = lambda^H per
    step. Episodes also end inside a chunk.
    """
    gamma, horizon, chunks = 0.9, 4, 6
    g = torch.Generator().manual_seed(0)
    surprise = torch.zeros(chunks, horizon, dtype=F64)
    surprise[:, 0] = torch.randn(chunks, generator=g, dtype=F64)
    value = torch.randn(chunks * horizon + 1, generator=g, dtype=F64)
    valid = torch.ones(chunks, horizon, dtype=torch.bool)
    valid[2, 2:] = False  # terminated in its second action
    end = torch.zeros(chunks, horizon, dtype=torch.bool)
    end[2, 1] = True
    before, after = value[:-1].view(chunks, horizon), value[1:].view(chunks, horizon)
    reward = torch.where(valid, surprise + before - gamma * torch.where(end, 0.0, after), 0.0)

    steps = valid.flatten()
    step_end = end.flatten()[steps][:, None]
    step_wise, _ = gae(
        reward.flatten()[steps][:, None],
        before.flatten()[steps][:, None],
        after.flatten()[steps][:, None],
        torch.full((int(steps.sum()), 1), gamma, dtype=F64),
        step_end,
        step_end,
        lam ** (1 / horizon),
    )
    h = valid.sum(1)
    last = after[torch.arange(chunks), h - 1]
    chunk_end = end.any(1)[:, None]
    chunked, _ = gae(
        chunk_rewards(reward, valid, gamma)[:, None],
        before[:, :1],
        last[:, None],
        gamma ** h.to(F64)[:, None],
        chunk_end,
        chunk_end,
        lam,
    )
    first = torch.cumsum(h, 0) - h
    assert torch.allclose(chunked, step_wise[first])
    assert torch.allclose(chunked.flatten()[2], surprise[2, 0])  # the terminated one ends its chain


def test_15_an_exact_value_leaves_no_advantage():
    value = torch.randn(9, 3, dtype=F64)
    no = torch.zeros(8, 3, dtype=torch.bool)
    reward = value[:-1] - 0.9 * value[1:]
    advantage, ret = gae(reward, value[:-1], value[1:], torch.full_like(reward, 0.9), no, no, 0.95)
    assert advantage.abs().max() < 1e-12 and torch.allclose(ret, value[:-1])


def test_chunk_without_a_valid_action_has_no_advantage():
    """A broken env: observation unchanged, reward 0, h = 0; the chunk before it bootstraps."""
    reward, value, next_value = column(1.0, 0.0, 0.0), column(2.0, 3.0, 0.0), column(3.0, 3.0, 0.0)
    discount, fault = column(0.9, 1.0, 0.9), flags(0, 1, 0)
    advantage, _ = gae(reward, value, next_value, discount, flags(0, 0, 0), fault, 0.95)
    assert advantage.flatten().tolist() == pytest.approx([1 + 0.9 * 3 - 2, 0, 0])


def test_next_value_of_a_terminated_chunk_may_be_anything():
    yes = flags(1)
    advantage, _ = gae(column(1.0), column(0.5), column(float("nan")), column(0.9), yes, yes, 0.9)
    assert advantage.item() == 0.5


# Groups


@pytest.mark.parametrize("baseline", ["mean", "median", "leave_one_out"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
def test_14_equal_returns_and_groups_of_one_give_0(baseline, value):
    assert (group_advantages(torch.full((3, 7), value), baseline) == 0).all()
    assert (group_advantages(torch.rand(4, 1), baseline) == 0).all()


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_14_advantages_of_a_group_sum_to_0(baseline):
    returns = torch.randn(5, 8, dtype=F64) * 3 + 2
    assert group_advantages(returns, baseline).sum(1).abs().max() < 1e-12


def test_14_k_successes_of_g():
    for size, k in ((8, 1), (8, 3), (4, 2), (16, 15), (2, 1)):
        returns = torch.zeros(1, size, dtype=F64)
        returns[0, :k] = 1.0
        advantage = group_advantages(returns)
        expected = (1 - k / size) / math.sqrt(k * (size - k) / (size * (size - 1)))
        assert float(advantage[0, 0]) == pytest.approx(expected, rel=1e-5)
        assert float(advantage[0, -1]) == pytest.approx(-expected * k / (size - k), rel=1e-5)


def test_leave_one_out_compares_with_the_mean_of_the_others():
    returns = torch.tensor([[1.0, 2.0, 6.0]], dtype=F64)
    assert group_advantages(returns, "leave_one_out", normalize=False).tolist() == [
        [1 - 4, 2 - 3.5, 6 - 1.5]
    ]
    assert group_advantages(returns, "mean", normalize=False).tolist() == [[-2, -1, 3]]


def test_median_ignores_an_outlier():
    returns = torch.tensor([[0.0, 1.0, 2.0, 3.0, 100.0], [0.0, 0.0, 2.0, 4.0, 4.0]])
    assert group_advantages(returns, "median", normalize=False).tolist() == [
        [-2, -1, 0, 1, 98],
        [-2, -2, 0, 2, 2],
    ]
    apart = torch.tensor([[0.0, 1.0, 2.0], [10.0, 12.0, 17.0]])
    assert group_advantages(apart, "median", normalize=False).tolist() == [[-1, 0, 1], [-2, 0, 5]]
    even = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    assert group_advantages(even, "median", normalize=False).tolist() == [[-0.5, -0.5, 0.5, 0.5]]


def test_several_rewards_are_normalised_each_on_its_own():
    """GDPO with weights (1, 1): rewards of any scale count the same.

    Successes (0, 1) in two rewards differ from (1, 0).
    """
    success, score = torch.tensor([[1.0, 0.0, 0.0, 1.0]]), torch.tensor([[0.0, 100.0, 0.0, 100.0]])
    weights = torch.tensor([1.0, 1.0])
    advantage = combined_group_advantages(torch.stack([success, score]), weights)
    assert advantage.tolist()[0] == pytest.approx([0, 0, -math.sqrt(2), math.sqrt(2)], abs=1e-5)
    scaled = combined_group_advantages(torch.stack([success, 1e-3 * score]), weights)
    assert torch.allclose(scaled, advantage, atol=1e-3)
    equal = torch.ones(2, 3, 4)
    assert (combined_group_advantages(equal, weights) == 0).all()


def test_weights_and_baseline_of_several_rewards():
    """Weighted sums of normalised advantages, shifted and scaled as a whole."""
    rewards = torch.tensor([[[1.0, 0, 0, 5], [2, 2, 8, 0]], [[3.0, 1, 4, 1], [5, 9, 2, 6]]])
    weights = torch.tensor([2.0, -0.5])
    for baseline in ("mean", "median"):
        parts = [group_advantages(reward, baseline) for reward in rewards]
        total = 2 * parts[0] - 0.5 * parts[1]
        expected = (total - total.mean()) / total.std(correction=0)
        found = combined_group_advantages(rewards, weights, baseline)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_equal_returns_of_any_size_give_exactly_0(baseline):
    for size in range(2, 40):
        for value in (0.1, 0.3, 0.7, 1.1, 3.3):
            assert (group_advantages(torch.full((1, size), value), baseline) == 0).all()


def test_episode_weights_have_mean_1_and_equal_sums():
    episode = torch.tensor([4, 4, 4, 0, 7, 7])
    weight = equal_episode_weights(episode)
    assert float(weight.mean()) == pytest.approx(1)
    assert [float(weight[episode == e].sum()) for e in (0, 4, 7)] == pytest.approx([2, 2, 2])


def test_a_large_offset_of_the_returns_changes_nothing():
    """1e7 + 3 is exact in float32, and 2e7 + 3 is not."""
    returns = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    torch.testing.assert_close(group_advantages(returns + 1e7), group_advantages(returns))


def test_groups_do_not_mix():
    returns = torch.randn(4, 8)
    together = group_advantages(returns)
    assert torch.allclose(together[2:3], group_advantages(returns[2:3]))


def test_unknown_baseline_is_named():
    with pytest.raises(UserError, match="Did you mean 'median'"):
        group_advantages(torch.rand(2, 2), "medain")


# Whitening


def test_whitening_counts_the_masked_in_entries_alone():
    x, mask = torch.randn(50, dtype=F64) * 4 + 3, torch.arange(50) % 3 > 0
    white = masked_whiten(x, mask)
    assert float(white[mask].mean()) == pytest.approx(0, abs=1e-9)
    assert float(white[mask].std(correction=0)) == pytest.approx(1, abs=1e-6)
    assert (white[~mask] == 0).all()
    assert torch.equal(masked_whiten(torch.where(mask, x, torch.nan), mask), white)


def test_whitening_what_has_no_spread_gives_0():
    for x, mask in (
        (torch.full((7,), 0.1), torch.ones(7, dtype=torch.bool)),
        (torch.randn(7), torch.zeros(7, dtype=torch.bool)),
        (torch.randn(7), torch.arange(7) == 3),
    ):
        assert (masked_whiten(x, mask) == 0).all()


def test_whitening_equal_entries_of_a_part_gives_0():
    """Their mean is rounded, and what is left is not spread."""
    for n in range(3, 60):
        for value in (0.1, 0.3, 3.3):
            mask = torch.arange(n) % 3 > 0
            assert (masked_whiten(torch.full((n,), value), mask) == 0).all()


def test_eps_is_added_to_the_deviation():
    x = torch.tensor([1.0, 3.0], dtype=F64)
    assert masked_whiten(x, torch.ones(2, dtype=torch.bool), eps=1.0).tolist() == [-0.5, 0.5]
    # Of a sample the deviation of 1 and 3 is the root of 2.
    expected = 1 / (math.sqrt(2) + 0.5)
    assert group_advantages(x[None], eps=0.5).tolist()[0] == pytest.approx([-expected, expected])


# What a target takes of an ensemble.


@pytest.mark.parametrize(
    ("how", "count", "expected"),
    [
        ("two", 10, -(math.pi**-0.5)),
        ("mean", 10, 0.0),
        ("least", 10, -1.53875),
        ("least", 3, -0.84628),
    ],
)
def test_the_least_of_many_is_low_where_critics_differ_and_the_value_where_they_agree(
    how, count, expected
):
    """Critics that never learned a state say N(0, 1); the means of the least are order statistics."""
    generator = torch.Generator().manual_seed(0)
    unknown = torch.randn(count, 40_000, generator=generator, dtype=F64)
    value = ensemble_value(unknown, how, generator)
    assert float(value.mean()) == pytest.approx(expected, abs=0.02)
    known = torch.full((count, 5), 0.7, dtype=F64)
    torch.testing.assert_close(ensemble_value(known, how, generator), known[0])


def test_two_are_drawn_anew_at_every_call_and_each_state_has_its_own_least():
    q = torch.tensor([[4.0, 1.0], [2.0, 3.0], [3.0, 5.0]])
    generator = torch.Generator().manual_seed(0)
    drawn = {tuple(ensemble_value(q, "two", generator).tolist()) for _ in range(60)}
    assert drawn == {(2.0, 1.0), (3.0, 1.0), (2.0, 3.0)}
    before = generator.get_state()
    assert ensemble_value(q, "least", generator).tolist() == [2.0, 1.0]
    assert ensemble_value(q, "mean", generator).tolist() == [3.0, 3.0]
    assert torch.equal(generator.get_state(), before)
