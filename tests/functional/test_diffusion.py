"""Denoising steps of a diffusion model: equal to diffusers' schedulers, and Gaussians of that mean and std."""

import math

import pytest
import torch

from embodyrl.errors import UserError
from embodyrl.functional.diffusion import DiffusionTransition

schedulers = pytest.importorskip("diffusers.schedulers")
SETTINGS = {
    "num_train_timesteps": 100,
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "beta_schedule": "squaredcos_cap_v2",
}


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def transition(steps, **settings):
    scheduler = schedulers.DDIMScheduler(**SETTINGS)
    scheduler.set_timesteps(steps)
    alphas = scheduler.alphas_cumprod.tolist()
    before_after = (*(alphas[t] for t in scheduler.timesteps.tolist()), 1.0)
    return DiffusionTransition(num_steps=steps, alphas=before_after, **settings)


def chains(cls, steps, clip, predicts, ours):
    """The same chain by diffusers and by us, with a made-up network."""
    scheduler = cls(
        **SETTINGS, clip_sample=clip < math.inf, clip_sample_range=1.0, prediction_type=predicts
    )
    scheduler.set_timesteps(steps)
    weight = torch.randn(3, 3, generator=gen(1))
    x = y = torch.randn(2, 4, 3, generator=gen())
    theirs_draw, our_draw = gen(2), gen(2)
    for k, t in enumerate(scheduler.timesteps):
        x = scheduler.step((x @ weight).tanh(), t, x, generator=theirs_draw).prev_sample
        y = ours(y, (y @ weight).tanh(), k, our_draw)
        yield x, y


@pytest.mark.parametrize("steps", [1, 5, 20])
@pytest.mark.parametrize("clip", [1.0, math.inf])
@pytest.mark.parametrize("predicts", ["epsilon", "sample"])
def test_without_noise_it_is_diffusers_ddim(steps, clip, predicts):
    ours = transition(steps, clip=clip, predicts=predicts)
    step = lambda y, out, k, _: ours.ode_step(y, out, k)  # noqa: E731
    for x, y in chains(schedulers.DDIMScheduler, steps, clip, predicts, step):
        torch.testing.assert_close(y, x, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("steps", [1, 5, 20, 100])
@pytest.mark.parametrize("clip", [1.0, math.inf])
@pytest.mark.parametrize("predicts", ["epsilon", "sample"])
def test_with_eta_1_it_is_diffusers_ddpm(steps, clip, predicts):
    ours = transition(steps, clip=clip, predicts=predicts, noise_min=0.0)

    def step(y, out, k, generator):
        mean, std = ours.mean_std(y, out, k)
        last = k == steps - 1
        return mean if last else mean + std * torch.randn(y.shape, generator=generator)

    for x, y in chains(schedulers.DDPMScheduler, steps, clip, predicts, step):
        torch.testing.assert_close(y, x, atol=2e-5, rtol=1e-3)


def test_a_step_has_the_density_of_its_mean_and_std():
    ours = transition(5, eta=0.7, noise_min=0.05)
    x, out, end = (torch.randn(3, 5, 4, 2, generator=gen(s)) for s in range(3))
    k = torch.arange(5)
    scored = ours.log_prob(x, end, out, k)
    for step in range(5):
        mean, std = ours.mean_std(x[:, step], out[:, step], step)
        assert std.min() >= 0.05
        normal = torch.distributions.Normal(mean, std.expand_as(mean))
        expected = normal.log_prob(end[:, step]).sum((1, 2))
        torch.testing.assert_close(scored[:, step], expected, rtol=1e-4, atol=1e-4)
        entropy = ours.entropy(x[:, step], out[:, step], step)
        torch.testing.assert_close(entropy, normal.entropy().sum((1, 2)))


def test_which_steps_draw_noise():
    assert transition(5).num_noisy == 5
    assert transition(5, noise_min=0.0).num_noisy == 4
    assert transition(5, eta=0.0).num_noisy == 0
    x = torch.randn(2, 4, 3, generator=gen())
    never = torch.zeros(2, dtype=torch.bool)
    ours = transition(5)
    assert torch.equal(ours.step(x, x, 1, x, never), ours.ode_step(x, x, 1))


def test_what_it_cannot_take_is_refused_in_words():
    with pytest.raises(UserError, match="predicts 'v_prediction' is not supported"):
        transition(5, predicts="v_prediction")
    with pytest.raises(ValueError, match="5 steps need 6 alphas"):
        DiffusionTransition(num_steps=5)
