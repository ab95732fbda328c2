"""Optimal transport and mean discrepancy against closed forms and exact solutions."""

import math

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from embodyrl.functional.transport import (
    mean_discrepancy,
    mean_distances,
    sinkhorn_plan,
    transport_cost,
)


def sizes(*counts: int) -> torch.Tensor:
    return torch.tensor(counts)


def squared(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cdist(x, y).square()


def test_two_points_each_have_the_cost_of_their_distance() -> None:
    # One point to one point, and one point to two: the mean of the costs.
    cost = torch.tensor([[[0.7, 9.0]], [[0.4, 1.0]]])
    found = transport_cost(cost, sizes(1, 1), sizes(1, 2))
    assert torch.allclose(found, torch.tensor([0.7, 0.7]), atol=1e-6)


def test_identical_clouds_cost_nothing_and_a_shift_costs_its_square() -> None:
    x = torch.randn(1, 9, 3, generator=torch.Generator().manual_seed(0)) * 3
    n = sizes(9)
    assert float(transport_cost(squared(x, x), n, n, blur=0.05)) < 1e-3
    shift = torch.tensor([0.3, -0.4, 0.0])
    # The optimal plan for squared distances moves every point by the shift.
    found = transport_cost(squared(x, x + shift), n, n, blur=0.02, iterations=2000)
    assert math.isclose(float(found), 0.25, abs_tol=0.01)


def test_it_is_symmetric_and_its_marginals_are_the_masses() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 6, 2, generator=generator)
    y = torch.randn(2, 5, 2, generator=generator)
    rows, columns = sizes(6, 3), sizes(2, 5)
    plan = sinkhorn_plan(squared(x, y), rows, columns, blur=1.0, iterations=500)
    # Padding beyond the counts gets no mass.
    for b in range(2):
        a = torch.zeros(6)
        a[: rows[b]] = 1 / rows[b]
        c = torch.zeros(5)
        c[: columns[b]] = 1 / columns[b]
        assert torch.allclose(plan[b].sum(1), a, atol=1e-4)
        assert torch.allclose(plan[b].sum(0), c, atol=1e-5)
    there = transport_cost(squared(x, y), rows, columns, blur=1.0, iterations=500)
    back = transport_cost(squared(y, x), columns, rows, blur=1.0, iterations=500)
    assert torch.allclose(there, back, atol=1e-4)
    # What stands in the padding has no effect.
    x[1, 3:] += 7.0
    again = transport_cost(squared(x, y), rows, columns, blur=1.0, iterations=500)
    assert torch.allclose(again, there)


def test_it_finds_the_cost_of_the_exact_assignment() -> None:
    rng = np.random.default_rng(2)
    for size in (2, 4, 7):
        x = torch.tensor(rng.normal(size=(1, size, 3)))
        y = torch.tensor(rng.normal(size=(1, size, 3)))
        cost = squared(x, y)
        row, column = linear_sum_assignment(cost[0].numpy())
        exact = cost[0].numpy()[row, column].mean()
        n = sizes(size)
        found = float(transport_cost(cost, n, n, blur=0.03, iterations=1500))
        assert abs(found - exact) < 0.03


def test_mean_distances_do_not_grow_with_the_number_of_dims() -> None:
    x = torch.zeros(1, 2)
    y = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    assert torch.allclose(mean_distances(x, y), torch.tensor([[0.0, (25 / 2) ** 0.5]]))
    wide = mean_distances(x.repeat(1, 50), y.repeat(1, 50))
    assert torch.allclose(wide, mean_distances(x, y), atol=1e-5)


def test_mean_discrepancy_of_points_has_a_closed_form() -> None:
    # Of two single points: 2 (1 - k(x, y)).
    x = torch.zeros(1, 2)
    y = torch.tensor([[3.0, 4.0]])
    expected = 2 * (1 - math.exp(-25 / (2 * 2.5**2)))
    assert math.isclose(float(mean_discrepancy(x, y, 2.5)), expected, rel_tol=1e-5)
    sample = torch.randn(20, 3, generator=torch.Generator().manual_seed(3))
    assert float(mean_discrepancy(sample, sample.flip(0), 1.0)) < 1e-6
    near = mean_discrepancy(sample, sample + 0.1, 1.0)
    far = mean_discrepancy(sample, sample + 1.0, 1.0)
    assert 0 < float(near) < float(far) <= 2
