"""Fitted Q evaluation in closed form: a small decision process, the loss's minimum, the bootstrap."""

import numpy as np
import pytest
import torch

from embodyrl.functional.fitted_q import (
    bootstrap_interval,
    bootstrap_weights,
    success_target,
    weighted_cross_entropy,
)
from embodyrl.functional.intervals import t_quantile


def test_a_target_is_the_next_value_or_the_outcome() -> None:
    value = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]])
    following = torch.tensor([1, -1, 3, -1])
    solved = torch.tensor([False, True, False, False])
    target = success_target(value, following, solved)
    expected = torch.tensor([[0.2, 1.0, 0.4, 0.0], [0.6, 1.0, 0.8, 0.0]])
    assert torch.equal(target, expected)


def test_the_loss_is_least_at_each_critics_weighted_mean() -> None:
    target = torch.tensor([[1.0, 0.0, 0.5], [1.0, 0.0, 0.5]])
    weight = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 2.0]])
    mean = torch.tensor([[3 / 4], [1 / 4]])
    logit = mean.logit().expand(2, 3).clone().requires_grad_()
    loss = weighted_cross_entropy(logit, target, weight)
    loss.backward()
    assert logit.grad is not None
    # One logit for all three chunks would have no gradient there: it is the weighted mean.
    assert logit.grad.sum(1).tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    # d loss / d logit = w (p - target) / sum of w: a chunk that was solved pulls the logit up.
    assert logit.grad[0, 0].item() == pytest.approx(3 * (0.75 - 1) / 4)
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    second = -(0.5 * np.log(0.75) + 0.5 * (np.log(0.25) + np.log(0.75)) / 2)
    assert loss.item() == pytest.approx(entropy + second, rel=1e-5)


def test_evaluation_of_a_small_decision_process_is_exact() -> None:
    """Two steps of two actions each, 4,000 episodes of a coin; tables in place of critics."""
    rng = np.random.default_rng(0)
    n = 4000
    action = rng.integers(2, size=(n, 2))
    # Action 1 leads to the good state more often, and solves the task more often in either.
    good = rng.random(n) < np.array([0.2, 0.8])[action[:, 0]]
    chance = np.array([[0.1, 0.5], [0.3, 0.9]])[good.astype(int), action[:, 1]]
    solved = rng.random(n) < chance
    state = np.stack([np.full(n, 2), good], axis=1)  # 0 bad, 1 good, 2 the beginning
    rows = torch.arange(2 * n).view(n, 2)
    following = torch.stack([rows[:, 1], torch.full((n,), -1)], dim=1).flatten()
    ended = torch.from_numpy(np.stack([np.zeros(n, bool), solved], axis=1)).flatten()
    s, a = torch.from_numpy(state).flatten(), torch.from_numpy(action).flatten()
    for share in (0.0, 0.3, 1.0):  # how often the policy takes action 1
        table = torch.zeros(3, 2)
        for _ in range(2):
            value = table @ torch.tensor([1 - share, share])
            target = success_target(value[s][None], following, ended)[0]
            # A table's regression is the mean of each state and action.
            for i in range(3):
                for j in range(2):
                    table[i, j] = target[(s == i) & (a == j)].mean()
        estimate = float(table[2] @ torch.tensor([1 - share, share]))
        to_good = 0.2 + 0.6 * share
        exact = to_good * (0.3 + 0.6 * share) + (1 - to_good) * (0.1 + 0.4 * share)
        assert estimate == pytest.approx(exact, abs=0.03)
    # Who played is another policy, with another value.
    assert abs(solved.mean() - exact) > 0.3


def test_a_bootstrap_sample_has_as_many_episodes_and_leaves_a_third_out() -> None:
    weight = bootstrap_weights(400, 50, np.random.default_rng(0))
    assert weight.shape == (50, 400) and bool((weight.sum(1) == 400).all())
    left_out = float((weight == 0).float().mean())
    assert left_out == pytest.approx(np.exp(-1), abs=0.02)
    assert not torch.equal(weight[0], weight[1])


def test_the_deviation_of_replicates_is_the_standard_error() -> None:
    # It is not divided by the root of their number.
    mean, low, high = bootstrap_interval(np.array([0.2, 0.4, 0.6]))
    half = t_quantile(2) * 0.2
    assert (mean, low, high) == pytest.approx((0.4, 0.4 - half, 0.4 + half))
    wider = bootstrap_interval(np.array([0.2, 0.4, 0.6]), 0.99)
    assert wider[1] < low and wider[2] > high
