"""Importance weights and the effective sample size in closed forms."""

import math

import pytest
import torch

from embodyrl.functional.importance import behaviour_weights, effective_share

LOG_RATIO = torch.tensor([0.2, 0.5, 1.0, 2.0, 5.0, 9.0]).log()


def test_truncated_weights_end_at_the_cap_and_masked_ones_at_both_ends():
    cut = behaviour_weights(LOG_RATIO, 5.0)
    torch.testing.assert_close(cut, torch.tensor([0.2, 0.5, 1.0, 2.0, 5.0, 5.0]))
    masked = behaviour_weights(LOG_RATIO, 6.0, 0.4)
    torch.testing.assert_close(masked, torch.tensor([0.0, 0.5, 1.0, 2.0, 5.0, 0.0]))


def test_a_ratio_that_overflows_is_masked_too():
    masked = behaviour_weights(torch.tensor([0.0, 1000.0, -1000.0]), 2.0, 0.5)
    assert masked[0] == 1 and not masked[2]
    assert not masked[1]


@pytest.mark.parametrize("kept", [1, 3, 7])
def test_of_equal_weights_as_many_are_left_as_are_not_masked(kept):
    weight = torch.zeros(7)
    weight[:kept] = 3.0
    assert float(effective_share(weight)) == pytest.approx(kept / 7)


def test_the_share_of_a_tilted_gaussian_is_known():
    """Weights exp(d x - d^2/2), x ~ N(0, 1): E[w]^2 / E[w^2] = exp(-d^2)."""
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    share = effective_share(torch.exp(0.7 * x - 0.245))
    assert float(share) == pytest.approx(math.exp(-0.49), abs=0.01)


def test_nothing_is_worth_nothing():
    assert float(effective_share(torch.zeros(4))) == 0
    assert float(effective_share(torch.zeros(0))) == 0
