"""Defects seen in published code, each beside the place in embodyrl that does it right; ``test_defects.py`` runs both.

A check that a defect passes would prove nothing, so every check in ``test_defects.py`` must fail on
these.
"""

import torch

from embodyrl.functional.losses import ppo_policy_loss

# ReinFlow: the path is sampled on one grid of times and scored on another.


def reinflow_sampling_times(num_steps):
    """linspace(0, 1, K) from noise to data; right: ``flow.timesteps`` for both."""
    return 1.0 - torch.linspace(0.0, 1.0, num_steps)


def reinflow_scoring_times(num_steps):
    """linspace(0, 1 - 1/K, K) from noise to data."""
    return 1.0 - torch.linspace(0.0, 1.0 - 1.0 / num_steps, num_steps)


# ReinFlow: clamps that the density knows nothing of.


def reinflow_clamped_noise(noise):
    """Noise limited to 3 sigma and scored as a whole Gaussian; right: noise as it was drawn."""
    return noise.clamp(-3.0, 3.0)


def reinflow_clamped_log_prob(log_prob):
    """No gradient for what is unlikely, which is what must change most; right: the log-probability itself."""
    return log_prob.clamp(-5.0, 2.0)


# A widely used system: one stochastic step for the whole batch, and averages where sums belong.


def one_step_for_the_whole_batch(n, num_steps, mode, generator):
    """Right: ``flow.draw_stochastic_steps``, one for each env."""
    k = int(torch.randint(num_steps, (1,), generator=generator))
    return (torch.arange(num_steps) == k).repeat(n, 1)


def mean_over_k_plus_1_terms(initial, steps):
    """Of log N(x_init) (B,) and the steps' log-probabilities (B, K); right: their sum."""
    return torch.cat([initial[:, None], steps], dim=1).mean(1)


def mean_over_dims(log_ratio):
    """Of (B, K, H, A): a clip range of .2 then is one of 1.2^(K H A) - 1; right: the sum."""
    return log_ratio.mean((1, 2, 3))


def value_averaged_over_steps(policy, obs, trace):
    """The critic at rollout: the mean of its values at all K noisy chunks; right: a value of the observation."""
    return _value_at_step(policy, obs, trace).mean(1)


def value_at_the_trained_step(policy, obs, trace):
    """The same critic in training: its value at one noisy chunk."""
    return _value_at_step(policy, obs, trace)[:, 0]


def _value_at_step(policy, obs, trace):
    return policy.value(obs)[:, None] + trace.x[:, :-1].mean((2, 3))


def clip_fraction_after_clipping(value, old_value, clip):
    """How far the value moved after it was clipped: 0 for ever; right: ``losses.value_loss``."""
    clipped = old_value + (value - old_value).clamp(-clip, clip)
    return ((clipped - old_value).abs() > clip).float().mean()


def ppo_loss_that_ignores_dual_clip(logprob, old, advantage, mask, low, high, dual_clip):
    """A setting of over a hundred presets that nothing reads; right: ``losses.ppo_policy_loss``."""
    return ppo_policy_loss(logprob, old, advantage, mask, low, high)


def group_advantages_of_rounding(returns):
    """Equal rewards get what rounding left of their mean, over 1e-6; right: ``returns.group_advantages``."""
    centred = returns - returns.mean(1, keepdim=True)
    return centred / (returns.std(1, keepdim=True) + 1e-6)


def noise_of_seed_0(shape, generator):
    """Always the same noise; right: ``flow.randn`` from the generator."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
