"""The design of runs over mixtures of data sets, and the surrogate that is fitted to them."""

import numpy as np
import pytest

from embodyrl.functional.mixture_design import (
    best_mixture,
    fit_surrogate,
    lattice,
    simplex_grid,
    terms,
)


def test_the_design_has_each_alone_each_pair_and_all():
    assert lattice(2).tolist() == [[1, 0], [0, 1], [0.5, 0.5]]
    design = lattice(4)
    assert len(design) == 4 * 5 // 2 + 1 and np.allclose(design.sum(1), 1)
    assert np.allclose(design[-1], 0.25)
    # As many runs as coefficients, and one more: each coefficient is determined.
    assert np.linalg.matrix_rank(terms(design)) == terms(design).shape[1] == 10


def test_terms_are_weights_and_their_products():
    assert terms(np.array([[0.2, 0.3, 0.5]])).tolist() == [
        [0.2, 0.3, 0.5, pytest.approx(0.06), pytest.approx(0.1), pytest.approx(0.15)]
    ]


def test_with_many_episodes_the_fit_is_the_polynomial_that_made_them():
    true = np.array([-1.0, 0.5, -2.0, 2.0, 0.0, 3.0])
    weights = lattice(3)
    rates = 1 / (1 + np.exp(-terms(weights) @ true))
    episodes = np.full(len(weights), 1e7)
    found = fit_surrogate(weights, rates * episodes, episodes)
    assert found.mean == pytest.approx(true, abs=1e-3) and found.spread == 1


def test_the_mode_has_no_gradient():
    """Of log-likelihood and log-prior, by finite differences."""
    weights = lattice(2)
    solved, episodes = np.array([3.0, 9.0, 14.0]), np.array([16.0, 16.0, 16.0])
    found = fit_surrogate(weights, solved, episodes)

    def log_posterior(b):
        p = 1 / (1 + np.exp(-terms(weights) @ b))
        likelihood = (solved * np.log(p) + (episodes - solved) * np.log(1 - p)).sum()
        return likelihood - (b[:2] ** 2).sum() / 18 - b[2] ** 2 / 32

    h = 1e-4
    steps = h * np.eye(3)
    slope = [
        (log_posterior(found.mean + d) - log_posterior(found.mean - d)) / (2 * h) for d in steps
    ]
    assert slope == pytest.approx([0, 0, 0], abs=1e-5)
    curve = [
        [
            (
                log_posterior(found.mean + a + b)
                - log_posterior(found.mean + a - b)
                - log_posterior(found.mean - a + b)
                + log_posterior(found.mean - a - b)
            )
            / (4 * h * h)
            for a in steps
        ]
        for b in steps
    ]
    assert found.covariance == pytest.approx(np.linalg.inv(-np.array(curve)), rel=1e-3)


def test_seeds_that_differ_by_more_than_chance_make_it_less_certain():
    weights = np.repeat(lattice(2), 2, axis=0)
    episodes = np.full(6, 100.0)
    alike = fit_surrogate(weights, np.array([40.0, 40, 60, 60, 80, 80]), episodes)
    apart = fit_surrogate(weights, np.array([20.0, 60, 40, 80, 60, 100]), episodes)
    assert alike.spread == 1
    # Pearson's by hand: the pairs have means .4, .6, .8, and differ from them by 20 of 100.
    by_hand = sum(2 * 20**2 / (100 * p * (1 - p)) for p in (0.4, 0.6, 0.8)) / 3
    assert apart.spread == pytest.approx(by_hand)
    assert (np.diag(apart.covariance) > 3 * np.diag(alike.covariance)).all()


@pytest.mark.parametrize("parts", [2, 3, 6, 12])
def test_candidates_cover_the_simplex(parts):
    grid = simplex_grid(parts)
    assert len(grid) <= 20_000 and np.allclose(grid.sum(1), 1) and (grid >= 0).all()
    assert len(np.unique(grid, axis=0)) == len(grid)
    for corner in np.eye(parts):
        assert (np.abs(grid - corner).max(1) < 1e-9).any()


def test_the_best_mixture_is_that_of_the_highest_rate():
    """logit p = w1 + 4 w1 w2 with w2 = 1 - w1 is highest at w1 = 5/8."""
    weights = lattice(2)
    rates = 1 / (1 + np.exp(-terms(weights) @ np.array([1.0, 0.0, 4.0])))
    episodes = np.full(3, 1e6)
    found = best_mixture(fit_surrogate(weights, rates * episodes, episodes), np.array([0.0, 1.0]))
    assert found["weights"] == pytest.approx([0.625, 0.375], abs=0.026)
    assert found["better"] == 1.0 and found["default"][0] == pytest.approx(0.5, abs=1e-3)
    # Where nothing was learned, nothing is surely better.
    few = best_mixture(fit_surrogate(weights, np.ones(3), np.full(3, 2.0)), np.array([0.5, 0.5]))
    assert few["predicted"][1] < 0.3 and few["predicted"][2] > 0.7 and few["better"] < 0.9
