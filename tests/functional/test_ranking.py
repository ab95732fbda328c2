"""Correlations against scipy, and the cost of a wrong order counted by hand."""

import math

import pytest
import torch

from embodyrl.functional.ranking import kendall, mmrv, pearson, ranking_errors, regret, spearman


def test_correlations_agree_with_scipy() -> None:
    from scipy import stats

    generator = torch.Generator().manual_seed(0)
    a = torch.rand(20, generator=generator)
    b = (5 * a + torch.randn(20, generator=generator)).round()  # with ties
    assert pearson(a, b) == pytest.approx(stats.pearsonr(a.numpy(), b.numpy()).statistic)
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a.numpy(), b.numpy()).statistic)
    assert kendall(a, b) == pytest.approx(stats.kendalltau(a.numpy(), b.numpy()).statistic)
    assert math.isnan(pearson(a, torch.ones(20)))
    assert math.isnan(kendall(torch.ones(20), a))


def test_mmrv_charges_a_wrong_order_with_what_it_costs() -> None:
    real = torch.tensor([0.1, 0.5, 0.9])
    assert mmrv(torch.tensor([0.2, 0.3, 0.4]), real) == 0.0
    # The first two change places: each of them is wrong by .4, the third by nothing.
    assert mmrv(torch.tensor([0.3, 0.2, 0.4]), real) == pytest.approx((0.4 + 0.4 + 0.0) / 3)


def test_kendall_counts_pairs() -> None:
    real = torch.tensor([0.1, 0.2, 0.3, 0.4])
    # One of six pairs is in the wrong order.
    assert kendall(torch.tensor([1.0, 2.0, 4.0, 3.0]), real) == pytest.approx((5 - 1) / 6)
    assert kendall(-real, real) == pytest.approx(-1.0)
    # One pair is tied in one of them: 5 of sqrt(5 x 6).
    assert kendall(torch.tensor([1.0, 2.0, 3.0, 3.0]), real) == pytest.approx(5 / 30**0.5)


def test_regret_is_what_the_choice_gives_away() -> None:
    real = torch.tensor([0.9, 0.5, 0.2])
    assert regret(torch.tensor([3.0, 2.0, 1.0]), real) == 0.0
    assert regret(torch.tensor([1.0, 2.0, 0.0]), real) == pytest.approx(0.4)
    # Two that are estimated alike: one of them at random.
    assert regret(torch.tensor([2.0, 2.0, 0.0]), real) == pytest.approx(0.2)
    assert regret(torch.zeros(3), real) == pytest.approx(0.9 - 1.6 / 3)


def test_all_of_them_of_an_order_and_of_its_reverse() -> None:
    real = torch.tensor([0.0, 0.5, 1.0])
    best = {"spearman": 1.0, "kendall": 1.0, "mmrv": 0.0, "regret": 0.0}
    assert ranking_errors(real / 10 - 4, real) == pytest.approx(best)
    worst = {"spearman": -1.0, "kendall": -1.0, "mmrv": (1 + 0.5 + 1) / 3, "regret": 1.0}
    assert ranking_errors(-real, real) == pytest.approx(worst)
