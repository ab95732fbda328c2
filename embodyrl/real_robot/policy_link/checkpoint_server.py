"""A checkpoint as what ``PolicyServer`` serves; the one module here that needs torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.build import load_config, make_policy, pick_device
from embodyrl.errors import UserError
from embodyrl.policies.flow_base import pad
from embodyrl.policies.noise_policy import initial_noise
from embodyrl.policies.sample_path import integrate_after
from embodyrl.storage import checkpoint
from embodyrl.types import Obs

Monitor = Callable[[dict[str, Any], NDArray[np.float32]], str]
"""Observation and the chunk (H, A) that answers it -> why a person is needed; empty while none is."""


class CheckpointPolicy:
    """Noise-free action chunks of a checkpoint's policy.

    Args:
        path: a checkpoint, or a run's folder (its newest).
        device: ``"auto"`` takes the GPU where there is one.
        seed: of the noise that flow policies start from.
        monitor: looks at every chunk, and may ask for a person: it then says why in the answer, as
            ``ask``.
    """

    def __init__(
        self, path: str, device: str = "auto", seed: int = 0, monitor: Monitor | None = None
    ) -> None:
        self.monitor = monitor
        self.config = load_config(path)
        _, meta = checkpoint.load(checkpoint.find(path))
        self.spec = checkpoint.spec_from_json(meta["spec"])
        self.device = pick_device(device)
        self.policy: Any = make_policy(self.config.policy, self.spec, 0, self.device)
        self.policy.eval()
        checkpoint.load_policy(path, self.policy, self.spec)
        self._generator = torch.Generator().manual_seed(seed)
        self.metadata: dict[str, Any] = {
            "env": self.spec.name,
            "action_dim": self.spec.action_dim,
            "proprio_dim": self.spec.proprio_dim,
            "control_mode": self.spec.control_mode,
            "control_hz": self.spec.control_hz,
            "max_episode_steps": self.spec.max_episode_steps,
            "horizon": self.policy.config.horizon,
            "cameras": {name: list(size) for name, size in self.spec.cameras.items()},
        }

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        """``{"actions": (H, A) float32}`` for an observation that ``server.check_observation`` let through."""
        obs = Obs(
            images={
                name: torch.tensor(image)[None]
                for name, image in observation.get("images", {}).items()
            },
            proprio=torch.tensor(observation["proprio"])[None],
            instruction=[observation.get("prompt", "")],
        ).to(self.device)
        if "previous" in observation:
            previous = torch.tensor(observation["previous"])[None].to(self.device)
            weights = rtc_weights(previous.shape[1], observation["delay"], observation["execute"])
            if 0 < observation["delay"] <= getattr(self.policy.config, "max_prefix", 0):
                actions = sample_after(
                    self.policy, obs, previous, observation["delay"], self._generator
                )
            else:
                actions = sample_guided(
                    self.policy, obs, previous, weights.to(self.device), self._generator
                )
        else:
            actions = self.policy.sample(obs, generator=self._generator, mode="eval").actions
        chunk = actions[0].float().cpu().numpy().astype(np.float32)
        why = self.monitor(observation, chunk) if self.monitor is not None else ""
        return {"actions": chunk, "ask": why} if why else {"actions": chunk}


def load_monitor(name: str) -> Monitor | None:
    """The function that ``module:function`` names, which takes no arguments and returns a ``Monitor``; None for "".

    Raises:
        UserError: there is none.
    """
    if not name:
        return None
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"There is no monitor {name!r} ({error}). Name a function as MODULE:FUNCTION."
        ) from error


def rtc_weights(horizon: int, delay: int, execute: int) -> Tensor:
    """(H,) how much each action of the new chunk is held to the previous one (arXiv:2506.07339, eq. 5).

    Args:
        horizon: H.
        delay: actions that will have been taken when the chunk arrives: weight 1.
        execute: actions at the end that the previous chunk does not reach: weight 0.
    """
    i = torch.arange(horizon, dtype=torch.float32)
    end = horizon - execute
    c = (end - i) / max(end - delay + 1, 1)
    soft = c * torch.expm1(c) / (np.e - 1.0)
    return torch.where(i < delay, 1.0, torch.where(i < end, soft, 0.0))


@torch.no_grad()
def sample_after(
    policy: Any, obs: Obs, previous: Tensor, delay: int, generator: torch.Generator
) -> Tensor:
    """An action chunk (N, H, A) that begins with ``delay`` actions of ``previous``.

    For a policy trained to go on from them (``policy.max_prefix``, arXiv:2512.05964): no guidance,
    and no gradient.
    """
    context = policy.encode(obs)
    shape = policy.flow_shape
    noise = initial_noise(
        policy.steer, policy.features(context), (len(obs), *shape), generator, "eval"
    )
    start = pad(noise, shape)
    goal = pad(policy.normalize_action(previous), shape)
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
    max_guidance: float = 5.0,
) -> Tensor:
    """An action chunk that continues the previous one, by guided inpainting (arXiv:2506.07339, eqs. 2 to 4).

    With this project's time (t = 1 noise) the predicted data is x - t v, and the velocity is
    corrected by min(beta, t / ((1 - t) r^2)) times the gradient of the weighted distance, r^2 = t^2
    / ((1 - t)^2 + t^2).

    Args:
        policy: a flow policy like ``FlowVLA``.
        obs: N observations.
        previous: (N, H, A) what is left of the previous chunk, in the env's units, padded.
        weights: (H,) of ``rtc_weights``.
        generator: of the initial noise.
        max_guidance: beta.

    Returns:
        (N, H, A) in [-1, 1].
    """
    if not all(hasattr(policy, name) for name in ("encode", "velocity", "normalize_action")):
        raise UserError(
            f"{type(policy).__name__} is no flow policy that rtc can guide. Use --mode naive or "
            "sync."
        )
    steps = policy.config.num_denoise_steps
    with torch.no_grad():
        context = policy.encode(obs)
        x = initial_noise(
            policy.steer, policy.features(context), tuple(previous.shape), generator, "eval"
        )
        goal = policy.normalize_action(previous)
    for k in range(steps):
        t = 1.0 - k / steps
        strength = (
            max_guidance if k == 0 else min(max_guidance, ((1.0 - t) ** 2 + t**2) / (t * (1.0 - t)))
        )
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            v = policy.velocity(context, x[:, None], torch.full((len(x), 1), t, device=x.device))[
                :, 0
            ]
            data = x - t * v
            (pull,) = torch.autograd.grad(data, x, ((goal - data) * weights[:, None]).detach())
        x = (x - (v - strength * pull) / steps).detach()
    return policy.normalize_action.inverse(x).clamp(-1.0, 1.0)
