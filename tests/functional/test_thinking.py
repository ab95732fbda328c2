"""The probability of thoughts, against sums by hand, samples and finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from embodyrl.functional.thinking import (
    log_stop_distribution,
    thinking_cost,
    thinking_log_prob,
)


def made(n: int = 4, k: int = 3, w: int = 2, seed: int = 0) -> list[torch.Tensor]:
    """Latents, means, log-stds (N, K, W) and logits (N, K)."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(n, k, w, generator=generator, dtype=torch.float64) for _ in range(3)]
    return [*parts, torch.randn(n, k, generator=generator, dtype=torch.float64)]


def test_the_stopping_distribution_sums_to_one_and_is_the_product_by_hand() -> None:
    *_, logits = made(n=50, k=4)
    chance = log_stop_distribution(logits).exp()
    assert chance.shape == (50, 5)
    torch.testing.assert_close(chance.sum(1), torch.ones(50, dtype=torch.float64))
    stop = torch.sigmoid(logits)
    going = torch.ones(50, dtype=torch.float64)
    for j in range(4):
        torch.testing.assert_close(chance[:, j], going * stop[:, j])
        going = going * (1 - stop[:, j])
    torch.testing.assert_close(chance[:, 4], going)
    # Logits so large that a product of probabilities would be 0 have finite logarithms.
    assert torch.isfinite(log_stop_distribution(torch.tensor([[200.0, -200.0]]))).all()


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_the_log_probability_is_the_sum_by_hand(count: int) -> None:
    latents, mean, log_std, logits = made()
    counts = torch.full((4,), count)
    found = thinking_log_prob(latents, counts, mean, log_std, logits)
    assert found.shape == (4, 3)
    for n in range(4):
        total = 0.0
        for j in range(count):
            total += math.log(1 - float(torch.sigmoid(logits[n, j])))
            for w in range(2):
                std = math.exp(float(log_std[n, j, w]))
                z = (float(latents[n, j, w]) - float(mean[n, j, w])) / std
                total += -0.5 * z**2 - math.log(std) - 0.5 * math.log(2 * math.pi)
        if count < 3:
            total += math.log(float(torch.sigmoid(logits[n, count])))
        assert float(found[n].sum()) == pytest.approx(total)
        assert not found[n, count + 1 :].any()


def test_probabilities_of_all_outcomes_integrate_to_one() -> None:
    """One number in a thought, at most one thought: the integral over a grid, and stopping."""
    _, mean, log_std, logits = made(n=1, k=1, w=1)
    grid = torch.linspace(-40, 40, 80_001, dtype=torch.float64)
    n = len(grid)
    every = (x.expand(n, *x.shape[1:]) for x in (mean, log_std, logits))
    thought = thinking_log_prob(grid[:, None, None], torch.ones(n).long(), *every)
    none = thinking_log_prob(mean, torch.zeros(1).long(), mean, log_std, logits)
    total = torch.trapezoid(thought[:, 0].exp(), grid) + none[0, 0].exp()
    assert float(total) == pytest.approx(1.0, abs=1e-6)


def test_gradients_are_those_of_finite_differences() -> None:
    latents, mean, log_std, logits = (x.requires_grad_() for x in made())
    counts = torch.tensor([0, 1, 2, 3])

    def log_prob(*parts: torch.Tensor) -> torch.Tensor:
        return thinking_log_prob(parts[0], counts, *parts[1:])

    assert torch.autograd.gradcheck(log_prob, (latents, mean, log_std, logits))
    assert torch.autograd.gradcheck(thinking_cost, (latents, mean, log_std, logits))
    assert torch.autograd.gradcheck(log_stop_distribution, (logits,))
    # A thought above its mean draws the mean up; a thought that was had makes stopping rarer.
    thinking_log_prob(latents, counts, mean, log_std, logits)[3].sum().backward()
    assert mean.grad is not None and logits.grad is not None
    assert torch.equal(mean.grad[3].sign(), (latents - mean)[3].sign())
    assert (logits.grad[3] < 0).all()


def test_the_cost_is_that_of_each_thought_times_its_chance() -> None:
    states, mean, log_std, logits = made()
    chance = log_stop_distribution(logits).exp()
    prior = Normal(states, torch.ones_like(states))
    said = kl_divergence(Normal(mean, log_std.exp()), prior).sum(-1)
    # The mean over the number of thoughts of the sum over those that are had.
    expected = sum(chance[:, t] * (t + said[:, :t].sum(1)) for t in range(4))
    torch.testing.assert_close(thinking_cost(states, mean, log_std, logits), expected)
    # Nothing that could say something: a cost of one for each thought.
    plain = thinking_cost(states, states, torch.zeros_like(states), logits)
    torch.testing.assert_close(plain, (chance * torch.arange(4)).sum(1))
