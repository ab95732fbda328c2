"""Tests and intervals beside SciPy's, beside one another, and by how often they err."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from embodyrl.errors import UserError
from embodyrl.functional.comparison import (
    adastop,
    holm,
    mcnemar,
    paired_interval,
    pairs_needed,
    runs_interval,
    sign_flip,
)

PAIRS = [(0, 0), (0, 1), (1, 5), (3, 12), (40, 55), (7, 7), (0, 30)]


@pytest.mark.parametrize(("only_a", "only_b"), PAIRS)
def test_mcnemar_is_the_exact_binomial_test(only_a: int, only_b: int) -> None:
    n = only_a + only_b
    expected = stats.binomtest(only_a, n).pvalue if n else 1.0
    assert mcnemar(only_a, only_b) == pytest.approx(expected)


@pytest.mark.parametrize(("only_a", "only_b"), [p for p in PAIRS if p != (0, 0)])
def test_the_interval_is_the_score_test_turned_round(only_a: int, only_b: int) -> None:
    n = 100
    # At the confidence of the score test's own p-value one end of the interval is 0.
    z = (only_b - only_a) / np.sqrt(only_a + only_b)
    confidence = 1 - 2 * stats.norm.sf(abs(z))
    if confidence == 0:
        assert paired_interval(only_a, only_b, n)[0] == pytest.approx(
            -paired_interval(only_a, only_b, n)[1]
        )
        return
    low, high = paired_interval(only_a, only_b, n, float(confidence))
    assert min(abs(low), abs(high)) == pytest.approx(0, abs=1e-9)
    assert low <= (only_b - only_a) / n <= high
    # Exchanged, all of it points the other way.
    assert paired_interval(only_b, only_a, n, float(confidence)) == pytest.approx((-high, -low))


@pytest.mark.parametrize("apart", [0.0, 0.1, 0.4])
def test_the_interval_holds_the_truth_as_often_as_it_says(apart: float) -> None:
    rng = np.random.default_rng(0)
    n, runs = 60, 600
    # Neither, only A, only B, both.
    counts = rng.multinomial(n, [0.3 - apart / 2, 0.1, 0.1 + apart, 0.5 - apart / 2], size=runs)
    inside = [low <= apart <= high for low, high in (paired_interval(a, b, n) for _, a, b, _ in counts)]  # fmt: skip
    assert 0.93 < np.mean(inside) < 0.975


@pytest.mark.parametrize("n", [10, 100])
def test_where_all_pairs_agree_the_interval_is_on_both_sides_of_0(n: int) -> None:
    low, high = paired_interval(0, 0, n)
    assert -low == pytest.approx(high)
    # By hand: n d / (1 - d) = z^2.
    z = stats.norm.ppf(0.975)
    assert high == pytest.approx(z**2 / (n + z**2))


def test_no_pair_says_nothing() -> None:
    assert paired_interval(0, 0, 0) == (-1.0, 1.0)
    assert pairs_needed(3, 3, 20) == 0


def test_with_the_pairs_needed_the_difference_is_shown_four_times_of_five() -> None:
    needed = pairs_needed(10, 20, 100)
    rng = np.random.default_rng(0)
    counts = rng.multinomial(needed, [0.7, 0.1, 0.2], size=800)
    shown = [abs(b - a) / np.sqrt(a + b) > stats.norm.ppf(0.975) for _, a, b in counts]
    assert 0.76 < np.mean(shown) < 0.84


def test_holm_is_that_of_the_textbook() -> None:
    # By hand: .01 * 4, .02 * 3, .03 * 2 -> raised to .06, .9.
    assert holm([0.03, 0.01, 0.9, 0.02]) == pytest.approx([0.06, 0.04, 0.9, 0.06])
    assert holm([]) == [] and holm([0.6, 0.7]) == [1.0, 1.0]


@pytest.mark.parametrize("n", [6, 40])
def test_sign_flips_are_scipys_permutation_test(n: int) -> None:
    d = np.random.default_rng(n).normal(0.4, 1, size=n)
    found = stats.permutation_test(
        (d,), lambda x, axis: x.sum(axis=axis), permutation_type="samples", n_resamples=20_000
    )
    assert sign_flip(d.tolist()) == pytest.approx(found.pvalue, abs=0.01 if n > 14 else 1e-12)
    assert sign_flip([0.0, 0.0]) == 1.0


def test_intervals_of_runs_are_those_of_t_tests() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, 1, 5), rng.normal(1, 3, 5)
    found = runs_interval(a.tolist(), b.tolist(), paired=True)
    expected = stats.ttest_rel(b, a).confidence_interval()
    assert found[1:] == pytest.approx((expected.low, expected.high), abs=1e-6)
    # Degrees of freedom are rounded down, so this one is a little wider than Welch's.
    found = runs_interval(a.tolist(), b.tolist(), paired=False)
    expected = stats.ttest_ind(b, a, equal_var=False).confidence_interval()
    assert found[1] <= expected.low <= expected.high <= found[2]
    assert found[2] - found[1] < 1.1 * (expected.high - expected.low)
    assert runs_interval([0.5], [0.7], paired=False)[1:] == (-np.inf, np.inf)
    assert runs_interval([0.5, 0.5], [0.7, 0.7], paired=False) == pytest.approx((0.2, 0.2, 0.2))


def test_one_look_of_adastop_is_the_permutation_test() -> None:
    rng = np.random.default_rng(0)
    decided = []
    for _ in range(40):
        a, b = rng.normal(0, 1, 5), rng.normal(1.4, 1, 5)
        both = np.r_[a, b]
        # The sum of B less that of A, for every choice of five as B.
        chosen = [list(c) for c in itertools.combinations(range(10), 5)]
        sums = np.abs([2 * both[c].sum() - both.sum() for c in chosen])
        p = (sums >= abs(b.sum() - a.sum()) - 1e-9).mean()
        assert adastop(a.tolist(), b.tolist(), 1) == (1, p <= 0.05, True)
        decided.append(p <= 0.05)
    assert 0 < sum(decided) < 40


@pytest.mark.parametrize("groups", [1, 3])
def test_adastop_errs_no_more_often_than_it_may_and_stops_early(groups: int) -> None:
    rng = np.random.default_rng(1)
    same = [adastop(*rng.normal(size=(2, 6)), groups) for _ in range(300)]
    assert np.mean([shown for _, shown, _ in same]) < 0.075
    apart = [adastop(rng.normal(size=12), rng.normal(4, 1, 12), groups) for _ in range(20)]
    assert all(shown for _, shown, _ in apart)
    assert np.mean([after for after, _, _ in apart]) < groups or groups == 1


def test_adastop_says_what_so_few_runs_cannot_show() -> None:
    assert adastop([0.1, 0.2, 0.3], [0.9, 0.9, 0.9], 3) == (3, False, False)
    assert adastop([0.1, 0.2, 0.3, 0.1], [0.9, 0.9, 0.9, 0.8], 1) == (1, True, True)
    for a, b, groups in (
        ([0.1], [0.1, 0.2], 1),
        ([0.1, 0.2, 0.3], [0.1, 0.2, 0.3], 2),
        ([], [], 1),
    ):
        with pytest.raises(UserError, match="do not make"):
            adastop(a, b, groups)
