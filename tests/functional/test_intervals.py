from itertools import combinations

import numpy as np
import pytest
from scipy.stats import binomtest, t, trim_mean

from embodyrl.errors import UserError
from embodyrl.functional.intervals import (
    bootstrap_iqm,
    format_rate,
    format_return,
    interquartile_mean,
    mean_interval,
    pass_at_k,
    t_quantile,
    wilson,
)


@pytest.mark.parametrize(
    ("k", "n"), [(0, 1), (1, 1), (0, 50), (50, 50), (3, 10), (83, 100), (213, 256)]
)
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_wilson_equals_scipys(k, n, confidence):
    expected = binomtest(k, n).proportion_ci(confidence, method="wilson")
    assert wilson(k, n, confidence) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_wilson_at_the_edges():
    assert wilson(0, 0) == (0.0, 1.0)
    for n in range(1, 200):
        assert wilson(0, n)[0] == 0.0 and wilson(n, n)[1] == 1.0
    with pytest.raises(UserError, match="11 successes among 10"):
        wilson(11, 10)


def test_wilson_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = []
    for p in (0.1, 0.4, 0.8):
        intervals = [wilson(int(k), 60) for k in rng.binomial(60, p, size=2000)]
        hits += [low <= p <= high for low, high in intervals]
    assert 0.94 < np.mean(hits) < 0.97


def test_format_rate():
    assert format_rate(213, 256) == "83% [78, 87] (213/256)"
    assert format_rate(0, 0) == "no episodes"


@pytest.mark.parametrize("dof", [1, 2, 3, 7, 30, 255])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_students_t_equals_scipys(dof, confidence):
    assert t_quantile(dof, confidence) == pytest.approx(t.ppf(0.5 + confidence / 2, dof), rel=1e-9)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_interval_of_a_mean_covers_the_truth_as_often_as_it_says(n):
    draws = np.random.default_rng(n).normal(3000.0, 400.0, size=(2000, n))
    hits = [low <= 3000 <= high for _, low, high in map(mean_interval, draws.tolist())]
    assert 0.935 < np.mean(hits) < 0.965


def test_the_interval_of_a_mean_equals_scipys():
    scores = [3.0, 5.0, 4.0, 9.0]
    for confidence in (0.5, 0.8, 0.95):
        low, high = t.interval(confidence, 3, np.mean(scores), np.std(scores, ddof=1) / 2)
        assert mean_interval(scores, confidence) == pytest.approx((5.25, low, high))
    assert mean_interval(scores) == mean_interval(scores, 0.95)


def test_the_interval_of_few_returns():
    assert mean_interval([2.0, 2.0, 2.0]) == (2.0, 2.0, 2.0)
    assert mean_interval([5.0]) == (5.0, float("-inf"), float("inf"))
    with pytest.raises(UserError, match="no mean of no scores"):
        mean_interval([])


def test_format_return():
    assert format_return([2800.0, 3000.0, 3001.7]) == "2,934 [2,646, 3,222] (3 episodes)"
    assert format_return([1.0, 1.0]) == "1 [1, 1] (2 episodes)"
    assert format_return([-4.2149]) == "-4.21 (1 episode)" and format_return([]) == "no episodes"


@pytest.mark.parametrize("n", [4, 8, 20])
def test_interquartile_mean_is_the_mean_of_the_middle_half(n):
    values = np.random.default_rng(n).normal(size=n)
    assert interquartile_mean(values) == pytest.approx(trim_mean(values, 0.25))


def test_interquartile_mean_weighs_the_scores_at_the_quartiles():
    assert interquartile_mean([1.0, 2.0, 6.0]) == pytest.approx((0.25 * 1 + 1 * 2 + 0.25 * 6) / 1.5)
    assert interquartile_mean([0.7]) == pytest.approx(0.7)


def test_bootstrap_is_repeatable_and_holds_the_mean():
    scores = np.random.default_rng(1).uniform(0.4, 0.9, size=(10, 3))
    mean, low, high = bootstrap_iqm(scores)
    assert low < mean < high and high - low < 0.4
    assert (mean, low, high) == bootstrap_iqm(scores)
    same = bootstrap_iqm([0.5, 0.5, 0.5])
    assert same == (0.5, 0.5, 0.5)


def test_bootstrap_percentiles_in_closed_form():
    """Two runs: the mean of a resample is 0, 1/2 or 1 with probability 1/4, 1/2 and 1/4."""
    for confidence, low, high in ((0.4, 0.5, 0.5), (0.6, 0.0, 1.0)):
        assert bootstrap_iqm([0.0, 1.0], confidence) == (0.5, low, high)


def test_bootstrap_of_one_run_and_of_none():
    assert bootstrap_iqm([0.7]) == pytest.approx((0.7, 0.7, 0.7))
    with pytest.raises(UserError, match="no mean of no scores"):
        bootstrap_iqm([])


def test_bootstraps_defaults():
    scores = np.random.default_rng(0).normal(size=(7, 2))
    assert bootstrap_iqm(scores) == bootstrap_iqm(scores, 0.95, 2000, 0)
    assert bootstrap_iqm(scores) != bootstrap_iqm(scores, 0.95, 2000, 1)


def test_pass_at_k_is_the_share_over_all_choices_of_k_attempts():
    outcomes = np.random.default_rng(0).random((7, 5)) < 0.3
    found = pass_at_k(outcomes.sum(axis=1).tolist(), 5)
    for k in range(1, 6):
        chosen = [list(c) for c in combinations(range(5), k)]
        expected = np.mean([outcomes[:, c].any(axis=1) for c in chosen])
        share, low, high = found[k - 1]
        assert share == pytest.approx(expected) and low <= share <= high
    # None or all solved: of four states nothing is known for sure.
    assert pass_at_k([0] * 4, 2) == [(0.0, *wilson(0, 4))] * 2
    assert pass_at_k([2] * 4, 2) == [(1.0, *wilson(4, 4))] * 2
    with pytest.raises(UserError, match="no initial states"):
        pass_at_k([], 3)
