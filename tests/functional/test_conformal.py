"""The conformal threshold: its rank, its refusal, and the rate that it promises."""

import numpy as np
import pytest

from embodyrl.errors import UserError
from embodyrl.functional.conformal import conformal_threshold, scores_needed


def test_the_rank_has_the_correction_for_a_finite_sample() -> None:
    scores = list(range(1, 20))  # 1 to 19
    assert scores_needed(0.05) == 19 and scores_needed(0.1) == 9 and scores_needed(0.5) == 1
    assert conformal_threshold(scores, 0.05) == 19  # ceil(20 * .95) = 19
    assert conformal_threshold(scores[::-1], 0.1) == 18
    assert conformal_threshold([*scores, 20], 0.05) == 20  # ceil(21 * .95) = 20
    assert conformal_threshold(list(range(1, 100)), 0.05) == 95


def test_too_few_scores_are_refused_with_the_number_that_it_takes() -> None:
    with pytest.raises(UserError, match=r"18 successful episodes cannot .* at least 19"):
        conformal_threshold([0.0] * 18, 0.05)
    for wrong in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(UserError, match="between 0 and 1"):
            conformal_threshold([0.0] * 18, wrong)


@pytest.mark.parametrize(("n", "alpha"), [(19, 0.05), (40, 0.1), (7, 0.2)])
def test_a_new_score_exceeds_it_as_seldom_as_promised(n: int, alpha: float) -> None:
    rng = np.random.default_rng(0)
    trials = 4000
    draws = rng.lognormal(size=(trials, n + 1))
    exceeded = sum(row[-1] > conformal_threshold(row[:-1], alpha) for row in draws)
    # For scores without ties the rate is exactly 1 - ceil((n + 1)(1 - alpha)) / (n + 1).
    exact = 1 - np.ceil((n + 1) * (1 - alpha) - 1e-9) / (n + 1)
    error = 3 * np.sqrt(exact * (1 - exact) / trials)
    assert exact <= alpha + 1e-9
    assert abs(exceeded / trials - exact) < error
