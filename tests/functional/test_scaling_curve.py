"""Saturating curves: known ones are found again, and evaluations that show none are refused."""

import numpy as np
import pytest
from scipy.optimize import curve_fit

from embodyrl.functional.scaling_curve import extrapolate, fit_curves, rise

STEPS = np.linspace(0, 4e5, 9)


def truth(compute, start=0.2, asymptote=0.85, middle=8e4, slope=1.6):
    return start + (asymptote - start) * rise(compute, middle, slope)


def evaluations(rate, compute, runs=3, episodes=400, seed=0):
    """Compute, successes, episodes and run of binomial evaluations."""
    rng = np.random.default_rng(seed)
    compute = np.tile(compute, runs)
    n = np.full(len(compute), episodes)
    return compute, rng.binomial(n, rate(compute)), n, np.repeat(np.arange(runs), len(n) // runs)


def test_known_parameters_are_found_again():
    found = extrapolate(*evaluations(truth, STEPS, episodes=4000))
    assert found["refused"] == "" and found["last"] == 4e5
    assert found["start"][0] == pytest.approx(0.2, abs=0.02)
    assert found["asymptote"][0] == pytest.approx(0.85, abs=0.02)
    assert found["middle"][0] == pytest.approx(8e4, rel=0.12)
    assert found["slope"][0] == pytest.approx(1.6, rel=0.15)
    for multiple in (2, 4):
        assert found["ahead"][f"{multiple}"][0] == pytest.approx(truth(multiple * 4e5), abs=0.02)


def test_it_is_the_curve_that_scipy_fits():
    rates = truth(STEPS)[None] + np.array([0.01, -0.02, 0.02, 0, -0.01, 0.01, 0, -0.01, 0.01])
    found = fit_curves(STEPS, rates, np.full((1, len(STEPS)), 1e6))
    best, _ = curve_fit(truth, STEPS, rates[0], p0=(0.2, 0.8, 1e5, 1.0))
    np.testing.assert_allclose(found.at(STEPS)[0], truth(STEPS, *best), atol=4e-3)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    far = truth(np.array([8e5]))[0]
    held = []
    for seed in range(40):
        found = extrapolate(
            *evaluations(truth, STEPS, runs=2, episodes=200, seed=seed), samples=200
        )
        if not found["refused"]:
            _, low, high = found["ahead"]["2"]
            held.append(low <= far <= high)
    assert len(held) > 30 and np.mean(held) > 0.85


def test_rates_at_the_edges_stay_within_them():
    found = extrapolate(*evaluations(lambda c: np.minimum(1.0, c / 1e5), STEPS))
    assert found["asymptote"][2] <= 1 and found["start"][1] >= 0
    assert all(0 <= low <= high <= 1 for _, _, low, high in found["curve"])
    assert found["curve"][0][0] == 0 and found["curve"][-1][0] == 8e5


@pytest.mark.parametrize(
    ("rate", "compute", "why"),
    [
        (truth, STEPS[:3], "3 evaluations, and the curve takes 4"),
        (truth, STEPS[:1], "no evaluation after the start"),
        (lambda c: np.full(len(c), 0.4), STEPS, "does not rise"),
        (lambda c: 0.8 - 0.5 * c / 4e5, STEPS, "does not rise"),
        (lambda c: 0.1 + 0.6 * (c / 4e5) ** 3, STEPS, "no bend yet"),
    ],
)
def test_what_shows_no_curve_is_refused_in_words(rate, compute, why):
    found = extrapolate(*evaluations(rate, compute))
    assert why in found["refused"] and "asymptote" not in found


def test_no_evaluation_at_all_is_refused():
    none = np.zeros(0)
    assert extrapolate(none, none, none, none.astype(int))["refused"]
