"""``PolicyActor``: records what a policy does, in place of an expert."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from embodyrl.build import load_config, load_policy
from embodyrl.devices import use_device
from embodyrl.policy import Mode, Policy
from embodyrl.types import EnvSpec, Obs

PERSISTENCE = 0.8
"""How much of its last motion a derailed hand keeps."""
JITTER = 0.5
"""Standard deviation of the noise on a derailed hand's motion."""
FLIP = 0.08
"""Probability in each step that a derailed hand opens or closes."""


class PolicyActor:
    """Samples a policy with its exploration noise and hands out its chunks one action at a time.

    A world model that has seen no failures cannot imagine any, and it learns most from
    near-successes. So a share of the episodes derails: from a random step on, the hand wanders and
    the gripper opens and closes at random.
    """

    def __init__(
        self,
        spec: EnvSpec,
        policy: Policy,
        *,
        derail: float = 0.0,
        noise_free: bool = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """Prepares to act in an env.

        Args:
            spec: of the env.
            policy: sampled with its exploration noise.
            derail: share of the episodes that derail.
            noise_free: sample it without, as in evaluation and on a robot.
            seed: of all noise.
            device: of the policy.
        """
        n = spec.num_envs
        a = spec.action_dim
        self._spec = spec
        self._policy = policy
        self._derail = derail
        # A policy that chooses among proposals draws each of them anew. Others explore.
        noise_free = noise_free or getattr(policy, "chooses", False)
        self._mode: Mode = "eval" if noise_free else "train"
        self._device = device
        self._generator = torch.Generator().manual_seed(seed)
        self._rng = np.random.default_rng(seed)
        self._chunks: list[Tensor] = [torch.empty(0, a)] * n
        self._elapsed = np.zeros(n, dtype=np.int64)
        self._derails_at = np.full(n, np.inf)
        self._drift = np.zeros((n, a - 1))
        self._grip = np.ones(n)

    def reset(self, env_ids: Sequence[int]) -> None:
        """Starts new episodes in the envs named."""
        for k in env_ids:
            self._chunks[k] = self._chunks[k][:0]
            derails = self._rng.random() < self._derail
            self._derails_at[k] = (
                self._rng.uniform(0.1, 0.9) * self._spec.max_episode_steps if derails else np.inf
            )
        self._elapsed[env_ids] = 0
        self._drift[env_ids] = 0.0
        self._grip[env_ids] = 1.0

    def act_on(self, obs: Obs) -> Tensor:
        """The next action of every env, (N, A) in [-1, 1], for the current observations."""
        # Ask the policy where a chunk is used up.
        if empty := [k for k, chunk in enumerate(self._chunks) if len(chunk) == 0]:
            sample = self._policy.sample(
                obs[torch.tensor(empty)].to(self._device),
                generator=self._generator,
                mode=self._mode,
            )
            for k, chunk in zip(empty, sample.actions.cpu(), strict=True):
                self._chunks[k] = chunk
        action = torch.stack([chunk[0] for chunk in self._chunks])
        self._chunks = [chunk[1:] for chunk in self._chunks]
        # Derailed hands wander.
        self._drift = PERSISTENCE * self._drift + JITTER * self._rng.standard_normal(
            self._drift.shape
        )
        self._grip = np.where(self._rng.random(len(self._grip)) < FLIP, -self._grip, self._grip)
        derailed = torch.from_numpy(self._elapsed >= self._derails_at)
        wandering = np.concatenate([self._drift, self._grip[:, None]], axis=1)
        self._elapsed += 1
        chosen = torch.where(
            derailed[:, None], torch.from_numpy(wandering).to(action.dtype), action
        )
        return chosen.clamp(-1.0, 1.0)


def load_actor(
    spec: EnvSpec, path: str, derail: float, seed: int, noise_free: bool = False
) -> PolicyActor:
    """The policy of a checkpoint or run, to act in an env.

    Raises:
        UserError: it does not fit the env.
    """
    config = load_config(path)
    device = use_device(config.run.device)
    policy = load_policy(path, config.policy, spec, seed, device)
    return PolicyActor(spec, policy, derail=derail, noise_free=noise_free, seed=seed, device=device)
