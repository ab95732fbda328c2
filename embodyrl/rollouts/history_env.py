"""An env that also shows what was seen before: ``env.history``.

LeRobot's Diffusion Policy sees the observations of the last two control steps. An env gives one at
the end of a chunk, so the last actions of a chunk are executed one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from embodyrl.env import VecEnv, env_index, replace_rows
from embodyrl.rollouts.env_around import EnvAround
from embodyrl.types import Obs, Step


def remembering(env: VecEnv, history: int) -> VecEnv:
    """The env with the last ``history`` observations in each; the env itself for one."""
    return HistoryEnv(env, history) if history > 1 else env


class HistoryEnv(EnvAround):
    """A VecEnv around another one, whose observations hold those before them.

    At the start of an episode its first observation stands for them. Where an episode ends before
    the last actions of a chunk, some lie further back than one control step.

    Args:
        env: shows one observation.
        history: how many are shown.

    Attributes:
        spec: the env's, with ``history``.
    """

    def __init__(self, env: VecEnv, history: int) -> None:
        super().__init__(env)
        self.history = history
        self.spec = replace(env.spec, history=history)
        self._frames: list[Obs] = []  # the last observations, the oldest first

    def reset(
        self,
        env_ids: Tensor | Sequence[int] | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        init: Sequence[int] | None = None,
    ) -> Obs:
        """See ``VecEnv.reset``."""
        obs = self.env.reset(env_ids, seed=seed, init=init)
        fresh = torch.zeros(self.spec.num_envs, dtype=torch.bool)
        fresh[env_index(env_ids, self.spec.num_envs)] = True
        # Before the first reset nothing was seen.
        earlier = self._frames[:-1] or [obs] * (self.history - 1)
        fresh = fresh.to(obs.proprio.device)
        self._frames = [*(replace_rows(frame, obs, fresh) for frame in earlier), obs]
        return self._shown(obs)

    def step(self, actions: Tensor) -> Step:
        """See ``VecEnv.step``."""
        at_start = self._frames
        first = max(actions.shape[1] - self.history + 1, 1)
        steps = []
        for piece in (actions[:, :first], *actions[:, first:].split(1, dim=1)):
            step = self.env.step(piece)
            # Envs that executed nothing see what they saw.
            idle = ~step.valid.any(1)
            shifted = [*self._frames[1:], step.obs]
            self._frames = [
                replace_rows(new, old, idle) for new, old in zip(shifted, self._frames, strict=True)
            ]
            steps.append(step)
        whole = joined_steps(steps)
        # A chunk in which the simulation broke never was.
        self._frames = [
            replace_rows(new, old, whole.fault)
            for new, old in zip(self._frames, at_start, strict=True)
        ]
        return replace(whole, obs=self._shown(self._frames[-1]))

    def _shown(self, obs: Obs) -> Obs:
        """``obs`` with those before it, which need no privileged state."""
        seen = None
        for frame in self._frames[:-1]:
            seen = replace(frame, instruction=obs.instruction, privileged=None, previous=seen)
        return replace(obs, previous=seen)


def joined_steps(steps: Sequence[Step]) -> Step:
    """Chunks one after the other, without a reset between them, as one chunk.

    Where the simulation broke in one of them, nothing of all of them counts.
    """
    last = steps[-1]
    fault = torch.stack([step.fault for step in steps]).any(0)
    valid = torch.cat([step.valid for step in steps], dim=1) & ~fault[:, None]
    reward = torch.cat([step.reward for step in steps], dim=1)
    terminated = torch.stack([step.terminated for step in steps]).any(0) & ~fault
    truncated = torch.stack([step.truncated for step in steps]).any(0) & ~terminated
    once = torch.stack([step.ever_solved for step in steps]).any(0) & ~fault
    # What holds at the end of the last chunk in which an action was executed.
    success, log = steps[0].success, steps[0].log
    for step in steps[1:]:
        ran = step.valid.any(1)
        success = torch.where(ran, step.success, success)
        log = {key: torch.where(ran, value, log[key]) for key, value in step.log.items()}
    if "steps" in log:
        log = {**log, "steps": valid.sum(1)}
    human, taken = _persons(steps)
    return Step(
        last.obs,
        torch.where(valid, reward, 0.0),
        terminated,
        truncated | fault,
        valid,
        success & ~fault,
        fault,
        log,
        human,
        taken,
        once,
    )


def _persons(steps: Sequence[Step]) -> tuple[Tensor | None, Tensor | None]:
    """``Step.human`` and ``Step.taken`` of the whole; where nothing ran, no person acted."""
    known = [step.taken for step in steps if step.taken is not None]
    if not known:
        return None, None
    dims = known[0].shape[-1]
    human = [torch.zeros_like(s.valid) if s.human is None else s.human for s in steps]
    taken = [
        known[0].new_zeros(*s.valid.shape, dims) if s.taken is None else s.taken for s in steps
    ]
    return torch.cat(human, dim=1), torch.cat(taken, dim=1)
