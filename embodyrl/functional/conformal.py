"""Split conformal prediction: a threshold that a new score exceeds with at most a chosen probability.

If the scores of n successful episodes and of the next one are exchangeable, the next one exceeds the
k-th smallest of the n with a probability of at most alpha, for

    k = ceil((n + 1) (1 - alpha))        (Vovk et al. 2005; arXiv:2107.07511, section 1)

With the largest deviation of an episode from a curve as its score, the same holds for the whole
episode (functional conformal prediction, arXiv:2106.01792).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from embodyrl.errors import UserError


def scores_needed(alpha: float) -> int:
    """The least number of scores from which ``conformal_threshold`` can be taken.

    Raises:
        UserError: ``alpha`` is not between 0 and 1.
    """
    if not 0.0 < alpha < 1.0:
        raise UserError(f"The rate of false alarms is {alpha:g}; it must lie between 0 and 1.")
    return math.ceil(1.0 / alpha - 1.0 - 1e-9)


def conformal_threshold(scores: Sequence[float], alpha: float) -> float:
    """The threshold that the next score exceeds with a probability of at most ``alpha``.

    Args:
        scores: of n episodes that nothing was fitted to.
        alpha: the rate.

    Raises:
        UserError: a rate outside (0, 1), or too few scores for it.
    """
    needed = scores_needed(alpha)
    n = len(scores)
    if n < needed:
        raise UserError(
            f"{n} successful episodes cannot calibrate a rate of {alpha:.3g} false alarms; that "
            f"takes at least {needed}."
        )
    # Rounding must not lift the rank by one.
    rank = math.ceil((n + 1) * (1.0 - alpha) - 1e-9)
    return float(np.sort(np.asarray(scores, dtype=np.float64))[rank - 1])
