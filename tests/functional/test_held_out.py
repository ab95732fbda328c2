"""Held-out episodes: the draw, the AUROC of outcomes, slopes within groups, and their intervals."""

import numpy as np
import pytest

from embodyrl.functional.held_out import (
    RESAMPLES,
    folds,
    interval,
    outcome_auroc,
    resamples,
    slope,
    slope_sums,
    within,
)


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("count", [2, 5])
def test_each_stratum_is_spread_evenly_to_within_one_episode(count):
    # Many small strata of tasks, and an uneven outcome.
    strata = [(k % 3 == 0, k % 7) for k in range(211)]
    for seed in range(20):
        fold = folds(strata, count, rng(seed))
        some = [np.ones(211, dtype=bool)]
        some += [np.array([s[0] == outcome for s in strata]) for outcome in (True, False)]
        some += [np.array([s == stratum for s in strata]) for stratum in set(strata)]
        for rows in some:
            sizes = np.bincount(fold[rows], minlength=count)
            assert len(sizes) == count and sizes.max() - sizes.min() <= 1


def test_each_episode_is_as_likely_in_each_fold_and_the_seed_decides():
    strata = [(k < 3, 0) for k in range(11)]
    share = np.mean([folds(strata, 2, rng(seed)) for seed in range(3000)], axis=0)
    # Five standard errors of a half.
    np.testing.assert_allclose(share, 0.5, atol=5 * 0.5 / np.sqrt(3000))
    assert (folds(strata, 2, rng(5)) == folds(strata, 2, rng(5))).all()


def test_a_resample_has_as_many_episodes_of_each_stratum():
    strata = np.array([1, 0, 0, 1, 1])
    draws = resamples(strata, rng())
    assert draws.shape == (RESAMPLES, 5)
    assert (strata[draws].sum(1) == 3).all()
    # Each of the two failed ones is drawn as often.
    assert abs((draws == 1).mean() - (draws == 2).mean()) < 0.03


def test_values_are_compared_at_the_same_share_of_an_episode():
    # Two solved episodes of two chunks and two failed ones of eight: the value is how far it is.
    lengths = [2, 2, 8, 8]
    solved = np.array([True, True, False, False])
    episode = np.repeat(np.arange(4), lengths)
    share = np.concatenate([np.round(4 * np.linspace(0, 1, n)) / 4 for n in lengths])
    draws = resamples(solved, rng())
    area, _ = outcome_auroc((share >= 1).astype(float), episode, solved, draws)
    # Of two chunks the last stands for the shares of a half and more (rounded to even: .75 alone).
    assert area == pytest.approx((0.5 + 0.5 + 0.5 + 1.0) / 4)
    # Values that know the outcome, and their opposite.
    known = solved[episode].astype(float)
    assert outcome_auroc(known, episode, solved, draws) == (1.0, (1.0, 1.0))
    assert outcome_auroc(-known, episode, solved, draws) == (0.0, (0.0, 0.0))


def test_what_is_left_within_groups_knows_neither_constant_nor_control():
    own = rng()
    group = np.repeat([3, 7], 50)
    control = own.normal(size=100)
    x = own.normal(size=100) + 2 * control * (group == 7) - 50.0 * (group == 3)
    left = within(x, control, group)
    for k in (3, 7):
        rows = group == k
        assert left[rows].sum() == pytest.approx(0, abs=1e-9)
        assert left[rows] @ control[rows] == pytest.approx(0, abs=1e-9)
    # What is of constant and control alone leaves nothing, also where the control never differs.
    np.testing.assert_allclose(within(5 - 3 * control, control, group), 0, atol=1e-9)
    np.testing.assert_allclose(within(x, np.ones(100), group)[:50], x[:50] - x[:50].mean())


def test_a_slope_is_a_ratio_of_sums():
    z, x, y = np.array([1.0, -2.0, 3.0]), np.array([2.0, 1.0, 1.0]), np.array([1.0, 0.0, 3.0])
    sums = slope_sums(z, x, y, np.array([0, 0, 1]), 2)
    assert sums.tolist() == [[1.0, 0.0], [9.0, 3.0]]
    assert slope(sums.sum(0)) == pytest.approx(10 / 3)
    assert slope(sums).tolist() == [0.0, 3.0]


def test_a_value_that_is_known_from_few_draws_does_not_bias_the_slope():
    # Nothing is earned of an advantage; all that is known of a state's value are few draws.
    own = rng()
    count, draws, at = 100_000, 2, np.zeros(100_000, dtype=int)
    value = own.normal(size=count)
    q = value + own.normal(size=count)
    one = value + own.normal(size=(count, draws)).mean(1)
    other = value + own.normal(size=(count, draws)).mean(1)
    y = value + own.normal(size=count)
    z = within(q - one, other, at)
    for earned in (0.0, 0.5):
        given = y + earned * (q - value)
        sums = slope_sums(z, within(q, other, at), within(given, other, at), at, 1)
        assert slope(sums.sum(0)) == pytest.approx(earned, abs=0.02)
    # With the same draws on both sides it would seem that a third is earned.
    naive = slope_sums(q - one, q - one, y - one, at, 1)
    assert slope(naive.sum(0)) == pytest.approx(1 / 3, abs=0.02)


def test_the_interval_of_a_slope_covers_it_in_about_95_percent_though_an_episode_shares_its_noise():
    missed = 0
    for seed in range(200):
        own = rng(seed)
        episode = np.repeat(np.arange(40), 5)
        x = own.normal(size=40)[episode] + own.normal(size=200)
        y = 0.5 * x + own.normal(size=40)[episode]
        sums = slope_sums(x, x, y, episode, 40)
        draws = resamples(np.zeros(40), own)
        low, high = interval(slope(sums[draws].sum(1)))
        missed += not low <= 0.5 <= high
    assert 2 <= missed <= 24
