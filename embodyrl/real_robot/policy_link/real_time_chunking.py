"""Real-time chunking: samples an action chunk that continues the previous one.

``sample_guided`` works for every flow policy (arXiv:2506.07339). ``sample_after`` is for policies
that were trained to continue a prefix of actions (arXiv:2512.05964). Both draw several chunks,
because where a task has two ways to go on, noise decides between them. ``nearest`` keeps the one
that goes on as was planned (the backward coherence of arXiv:2408.17355).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.policies.flow_base import pad
from embodyrl.policies.noise_policy import initial_noise
from embodyrl.policies.sample_path import integrate_after
from embodyrl.types import Obs

CANDIDATES = 8
"""Chunks that are drawn for one that shall go on as was planned."""
GUIDED_STEPS = 10
"""Least number of steps of a guided flow: each step goes some of the way to the plan."""
PRIOR_STD = 0.2
"""How far, in normalised actions, an action spreads once the observation is known.

arXiv:2506.07339 takes 1, as if nothing were known. Then guidance is weak in the middle of the flow
(A. Soare, Smooth-As-Butter Robot Policies, 2025).
"""


def rtc_weights(horizon: int, delay: int, execute: int) -> Tensor:
    """How much each action of the new chunk is held to the previous one (arXiv:2506.07339, eq. 5).

    Args:
        horizon: H.
        delay: number of actions that will have been taken when the chunk arrives; weight 1.
        execute: number of actions at the end that the previous chunk does not reach; weight 0.

    Returns:
        Weights (H,) in [0, 1]; they decay in between.
    """
    i = torch.arange(horizon, dtype=torch.float32)
    end = horizon - execute
    c = (end - i) / max(end - delay + 1, 1)
    decaying = c * torch.expm1(c) / (np.e - 1.0)
    return torch.where(i < delay, 1.0, torch.where(i < end, decaying, 0.0))


@torch.no_grad()
def sample_after(
    policy: Any, obs: Obs, previous: Tensor, delay: int, generator: torch.Generator, count: int = 1
) -> Tensor:
    """Action chunks that begin with the first actions of the previous one.

    For a policy that was trained to continue them (``policy.max_prefix``, arXiv:2512.05964). It
    needs no guidance and no gradient.

    Args:
        policy: a flow policy with ``max_prefix`` of at least ``delay``.
        obs: N observations.
        previous: (N, H, A) the rest of the previous chunk, in the env's units, padded.
        delay: number of actions that are kept from it.
        generator: of the initial noise.
        count: P, chunks for each observation.

    Returns:
        (N, P, H, A) in [-1, 1].
    """
    context = policy.encode(obs)
    # Integrate the flow from noise to data, with the first ``delay`` actions given.
    start = _initial_noises(policy, context, generator, count)
    goal = pad(policy.normalize_action(previous), policy.flow_shape)[:, None]
    end = integrate_after(
        partial(policy.velocity, context), policy.config.num_denoise_steps, start, goal, delay
    )
    return policy.normalize_action.inverse(policy.executed(end)).clamp(-1.0, 1.0)


def sample_guided(
    policy: Any,
    obs: Obs,
    previous: Tensor,
    weights: Tensor,
    generator: torch.Generator,
    count: int = 1,
) -> Tensor:
    """Action chunks that continue the previous one, by guided inpainting.

    It follows arXiv:2506.07339, eqs. 2 to 4. In this project t = 1 is noise, so the predicted data
    are x - t v. Each step corrects the velocity by a strength times the gradient of the weighted
    squared distance between the predicted and the previous chunk. The strength is
    min(K, t / ((1 - t) r^2)), with r^2 = s^2 t^2 / (s^2 (1 - t)^2 + t^2) and s = ``PRIOR_STD``. One
    of K steps at strength K moves x by the whole distance, so more would overshoot.

    Args:
        policy: a flow policy such as ``FlowVLA``.
        obs: N observations.
        previous: (N, H, A) the rest of the previous chunk, in the env's units, padded.
        weights: (H,) of ``rtc_weights``.
        generator: of the initial noise.
        count: P, chunks for each observation.

    Returns:
        (N, P, H, A) in [-1, 1].
    """
    if not all(hasattr(policy, name) for name in ("encode", "velocity", "executed")):
        raise UserError(
            f"{type(policy).__name__} is not a flow policy, so rtc cannot guide it. Use --mode "
            "naive or sync."
        )
    steps = max(policy.config.num_denoise_steps, GUIDED_STEPS)
    with torch.no_grad():
        context = policy.encode(obs)
        x = _initial_noises(policy, context, generator, count)
        goal = policy.normalize_action(previous)[:, None]
    for k in range(steps):
        t = 1.0 - k / steps
        # t / ((1 - t) r^2), which is infinite at t = 1.
        spread = PRIOR_STD**2 * t * (1.0 - t)
        unbounded = (PRIOR_STD**2 * (1.0 - t) ** 2 + t**2) / spread if k else float("inf")
        strength = min(steps, unbounded)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            v = policy.velocity(context, x, torch.full(x.shape[:2], t, device=x.device))
            data = policy.executed(x - t * v)
            # The vector-Jacobian product of the weighted error with d data / d x.
            error = (goal - data) * weights[:, None]
            (gradient,) = torch.autograd.grad(data, x, error.detach())
        # An Euler step with the corrected velocity.
        x = (x - (v - strength * gradient) / steps).detach()
    return policy.normalize_action.inverse(policy.executed(x)).clamp(-1.0, 1.0)


def nearest(chunks: Tensor, previous: Tensor, weights: Tensor) -> Tensor:
    """Of several chunks, the one that is nearest to what was planned (arXiv:2408.17355).

    Args:
        chunks: (N, P, H, A).
        previous: (N, H, A) the rest of the previous chunk.
        weights: (H,) of ``rtc_weights``.

    Returns:
        (N, H, A); the first where all are equally near.
    """
    far = ((chunks - previous[:, None]).square().sum(-1) * weights).sum(-1)
    return chunks[torch.arange(len(far), device=far.device), far.argmin(1)]


def _initial_noises(policy: Any, context: Any, generator: torch.Generator, count: int) -> Tensor:
    """(N, P, C, D) initial noise, as in evaluation."""
    features = policy.features(context)
    draws = [initial_noise(policy, features, generator, "eval") for _ in range(count)]
    return torch.stack(draws, dim=1)
