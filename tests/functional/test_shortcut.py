"""Shortcut targets against the exact flow map of Gaussian data."""

import pytest
import torch

from embodyrl.functional.shortcut import draw_shortcut_steps, shortcut_target

MEAN, STD = 0.5, 0.3
F64 = torch.float64


def spread(t: torch.Tensor) -> torch.Tensor:
    """Standard deviation of x_t for a ~ N(m, s^2): the root of S_t = (1-t)^2 s^2 + t^2."""
    return ((1 - t) ** 2 * STD**2 + t**2).sqrt()


def ends(x: torch.Tensor, t: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """x_{t-d} on the exact path through x at time t: x_t - (1-t) m grows as the root of S_t."""
    t, d = (y.view(-1, *[1] * (x.ndim - 1)) for y in (t, d))
    return (1 - t + d) * MEAN + spread(t - d) / spread(t) * (x - (1 - t) * MEAN)


def exact(x: torch.Tensor, t: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """The exact mean velocity, and at d = 0 the velocity itself (identity 22 of flow matching)."""
    wide_t = t.view(-1, *[1] * (x.ndim - 1))
    wide_d = d.view(-1, *[1] * (x.ndim - 1))
    pull = (wide_t - (1 - wide_t) * STD**2) / spread(wide_t) ** 2
    velocity = -MEAN + pull * (x - (1 - wide_t) * MEAN)
    mean = (x - ends(x, t, d)) / wide_d.clamp_min(1e-30)
    return torch.where(wide_d > 0, mean, velocity)


def steps(count: int = 200, most: int = 8) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    t, d = draw_shortcut_steps(count, most, generator)
    return torch.randn(count, 3, 2, generator=generator, dtype=F64), t.to(F64), d.to(F64)


def test_the_target_of_the_exact_flow_map_is_its_mean_velocity() -> None:
    x, t, d = steps()
    target = shortcut_target(exact, x, t, d, torch.zeros_like(d, dtype=torch.bool))
    torch.testing.assert_close(target, exact(x, t, d), atol=1e-12, rtol=1e-12)


def test_the_finest_steps_take_two_steps_of_euler() -> None:
    x, t, d = steps()
    every = torch.ones_like(d, dtype=torch.bool)
    target = shortcut_target(exact, x, t, d, every)
    zero = torch.zeros_like(d)
    wide = d.view(-1, 1, 1)
    first = exact(x, t, zero)
    middle = x - wide / 2 * first
    second = exact(middle, t - d / 2, zero)
    torch.testing.assert_close(target, (first + second) / 2)
    # Their error falls with the square of the step.
    errors = []
    for size in (1 / 8, 1 / 16, 1 / 32):
        d = torch.full_like(t, size)
        t = torch.full_like(t, 0.5)
        got = shortcut_target(exact, x, t, d, every)
        errors.append(float((got - exact(x, t, d)).abs().max()) * size)
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.3)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.3)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_one_step_of_the_exact_map_is_many(count: int) -> None:
    noise = torch.randn(64, 3, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
    x = noise
    for k in range(count):
        t = torch.full((64,), 1 - k / count, dtype=F64)
        d = torch.full((64,), 1 / count, dtype=F64)
        x = x - exact(x, t, d) / count
    torch.testing.assert_close(x, MEAN + STD * noise)


def test_steps_lie_where_sampling_takes_them() -> None:
    t, d = draw_shortcut_steps(4000, 8, torch.Generator().manual_seed(0))
    counts = 1 / d
    assert set(counts.tolist()) == {1.0, 2.0, 4.0, 8.0}
    for count in (1, 2, 4, 8):
        rows = counts == count
        assert 0.2 < float(rows.float().mean()) < 0.3
        starts = {1 - k / count for k in range(count)}
        assert set(t[rows].tolist()) == starts
        share = (t[rows] == 1.0).float().mean()
        assert float(share) == pytest.approx(1 / count, rel=0.25)


def test_rows_draw_from_their_own_generators() -> None:
    def seeds(*numbers: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(n) for n in numbers]

    t, d = draw_shortcut_steps(3, 8, seeds(1, 2, 3))
    alone = draw_shortcut_steps(1, 8, seeds(2))
    assert float(t[1]) == float(alone[0]) and float(d[1]) == float(alone[1])


def test_no_gradient_goes_into_the_target() -> None:
    scale = torch.tensor(1.0, dtype=F64, requires_grad=True)
    x, t, d = steps(4)
    whole = torch.zeros_like(d, dtype=torch.bool)
    target = shortcut_target(lambda x, t, d: scale * exact(x, t, d), x, t, d, whole)
    assert not target.requires_grad
