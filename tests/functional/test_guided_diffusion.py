"""Guided sampling against Gaussians, whose guided distribution is known."""

import pytest
import torch

from embodyrl.functional.guided_diffusion import sample_pulled

# One step of a line: s given, a = K s + noise, s' = A s + B a + noise.
STATE, K, SPREAD, A, B, NOISE = 0.5, -0.5, 0.6, 0.9, 0.5, 0.1
POLICY = 0.65, 0.4
"""Mean and std of the action that the policy takes in STATE."""
MEAN = torch.tensor([K * STATE, (A + B * K) * STATE], dtype=torch.float64)
MIX = torch.tensor([[SPREAD, 0.0], [B * SPREAD, NOISE]], dtype=torch.float64)
COV = MIX @ MIX.T


def estimate(x, t):
    """E[x | x_t] of N(MEAN, COV)."""
    gain = (1 - t) * COV @ torch.linalg.inv((1 - t) ** 2 * COV + t**2 * torch.eye(2).double())
    return MEAN + (x - (1 - t) * MEAN) @ gain.T


def doubt(t):
    """The variance of a given x_t."""
    gain = (1 - t) * COV @ torch.linalg.inv((1 - t) ** 2 * COV + t**2 * torch.eye(2).double())
    return (COV - (1 - t) * gain @ COV).diagonal()[:1]


def pull(data):
    return torch.full_like(data[..., :1], POLICY[0]), torch.full_like(data[..., :1], POLICY[1])


def samples(weight, steps=64):
    noise = torch.randn(20_000, 2, generator=torch.Generator().manual_seed(0)).double()
    return sample_pulled(
        estimate, noise, steps, pull=pull, weight=weight, part=slice(0, 1), doubt=doubt
    )


@pytest.mark.parametrize("weight", [0.3, 1.0, 3.0])
def test_guided_samples_have_the_mean_and_std_of_the_product_of_gaussians(weight):
    x = samples(weight)
    # N(a; m, V) N(a; p, s^2)^w is a Gaussian with these.
    precision = 1 / SPREAD**2 + weight / POLICY[1] ** 2
    mean = (MEAN[0] / SPREAD**2 + weight * POLICY[0] / POLICY[1] ** 2) / precision
    assert abs(x[:, 0].mean() - mean) < 0.02
    assert abs(x[:, 0].std() - precision**-0.5) < 0.03
    # The next state follows the action as the dynamics say.
    after = A * STATE + B * x[:, 0]
    assert abs((x[:, 1] - after).mean()) < 0.02
    assert (x[:, 1] - after).std() < 2 * NOISE


def test_guidance_0_gives_the_distribution_of_the_data():
    x = samples(0.0)
    assert (x.mean(0) - MEAN).abs().max() < 0.02
    assert (torch.cov(x.T) - COV).abs().max() < 0.02
    noise = torch.randn(20_000, 2, generator=torch.Generator().manual_seed(0)).double()
    assert torch.equal(x, sample_pulled(estimate, noise, 64))


def test_the_bound_holds_for_what_is_sampled():
    noise = torch.randn(500, 2, generator=torch.Generator().manual_seed(0)).double()
    x = sample_pulled(estimate, noise, 16, bound=lambda x: x.clamp(-0.3, 0.3))
    assert float(x.abs().max()) <= 0.3 + 1e-6
