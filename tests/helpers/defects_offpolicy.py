"""Mistakes of published SAC-Flow code, each beside what it breaks; the tests must tell them from the right version."""

import torch

from embodyrl.functional.flow import LOG_2PI, randn, timesteps
from embodyrl.policies.sample_path import SampledPath, sample_path


def noise_density(step_inputs, transition, start, generator):
    """Sums log N(e; 0, I) of the noise and leaves out -log(std) (the authors' Flow-T and one port of it)."""
    x, path, logprobs = start, [start], []
    for k, t in enumerate(timesteps(transition.num_steps)):
        velocity, log_std = step_inputs(x[:, None], t.expand(len(x), 1))
        mean, std = transition.mean_std(x, velocity[:, 0], k, log_std[:, 0])
        noise = randn(x.shape, generator)
        x = mean + std * noise
        logprobs.append((-0.5 * noise**2 - 0.5 * LOG_2PI).sum((-2, -1)))
        path.append(x)
    return SampledPath(torch.stack(path, 1), torch.stack(logprobs, 1))


def detached(step_inputs, transition, start, generator):
    """Detaches the log-probability, so that the actor gets no gradient of the entropy."""
    path = sample_path(step_inputs, transition, start, generator)
    return SampledPath(path.x, path.logprob.detach())


def one_noise_for_all(step_inputs, transition, start, generator):
    """Draws one number per step for the whole batch."""
    x, path, logprobs = start, [start], []
    for k, t in enumerate(timesteps(transition.num_steps)):
        velocity, log_std = step_inputs(x[:, None], t.expand(len(x), 1))
        mean, std = transition.mean_std(x, velocity[:, 0], k, log_std[:, 0])
        x = mean + std * randn((1,), generator)
        logprobs.append(transition.log_prob(path[-1], x, velocity[:, 0], k, log_std[:, 0]))
        path.append(x)
    return SampledPath(torch.stack(path, 1), torch.stack(logprobs, 1))


DEFECTS = {"density": noise_density, "entropy_gradient": detached, "noise": one_noise_for_all}
"""The check of ``tests/algorithms/test_sac_flow.py`` that must fail -> the defect."""
