"""An env in the conventions of a public family: ``env.profile``.

A checkpoint that was trained on mirrored pictures, or on a gripper in 0 to 1, then sees and does in
this env what it learned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from embodyrl.env import VecEnv
from embodyrl.errors import UserError
from embodyrl.rollouts.env_around import EnvAround
from embodyrl.storage.profiles import profile_named
from embodyrl.storage.translation import translate
from embodyrl.types import Obs, Step


def presented(env: VecEnv, profile: str) -> VecEnv:
    """The env in the conventions of a profile; the env itself for an empty name.

    Raises:
        UserError: there is no such profile, or the env's state or kind of actions is another one.
    """
    return PresentedEnv(env, profile) if profile else env


class PresentedEnv(EnvAround):
    """A VecEnv around another one, whose pictures and actions it translates.

    Args:
        env: in its own conventions.
        profile: name of the family.

    Attributes:
        spec: the env's, with the conventions of the family where it knows them.

    Raises:
        UserError: see ``presented``.
    """

    def __init__(self, env: VecEnv, profile: str) -> None:
        theirs = profile_named(profile).conventions
        known = {f.name: value for f in fields(theirs) if (value := getattr(theirs, f.name))}
        # How pictures of another shape are changed is a matter of data; the env draws its own.
        known.pop("fit", None)
        # What the family does not know stays the env's.
        super().__init__(env)
        self._change = change = translate(theirs, env.spec, f"the profile {profile}")
        self.spec = replace(env.spec, conventions=replace(env.spec.conventions, **known))
        if change.lag or change.hand:
            raise UserError(
                f"The profile {profile} says that actions stand late or are absolute: data with "
                "such actions are translated, but no env is presented so."
            )

    def reset(
        self,
        env_ids: Tensor | Sequence[int] | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        init: Sequence[int] | None = None,
    ) -> Obs:
        """See ``VecEnv.reset``."""
        return self._seen(self.env.reset(env_ids, seed=seed, init=init))

    def step(self, actions: Tensor) -> Step:
        """See ``VecEnv.step``."""
        return self._shown(self.env.step(self._affine(actions, inverse=False)))

    def rollout(self, act: Callable[[], Tensor], horizon: int) -> tuple[Step, Tensor]:
        """See ``SteppedVecEnv.rollout``; experts act in the env's own conventions."""
        step, actions = self.env.rollout(act, horizon)  # pyright: ignore[reportAttributeAccessIssue]
        return self._shown(step), self._affine(actions, inverse=True)

    def make_expert(self, noise: float = 0.0, seed: int = 0) -> Any:
        """The env's own expert, whose rollouts are translated where it plays them itself."""
        expert = self.env.make_expert(noise=noise, seed=seed)  # pyright: ignore[reportAttributeAccessIssue]
        return _PresentedExpert(self, expert) if hasattr(expert, "rollout") else expert

    def _shown(self, step: Step) -> Step:
        taken = None if step.taken is None else self._affine(step.taken, inverse=True)
        return replace(step, obs=self._seen(step.obs), taken=taken)

    def _seen(self, obs: Obs) -> Obs:
        # Dims of (N, h, w, 3).
        flips = [d for d, flip in ((1, self._change.rows), (2, self._change.columns)) if flip]
        flips += [3] if self._change.channels else []
        if not flips:
            return obs
        return replace(obs, images={k: v.flip(flips) for k, v in obs.images.items()})

    def _affine(self, actions: Tensor, *, inverse: bool) -> Tensor:
        """Actions (..., A) of the family as the env takes them, or back."""
        if not self._change.factor or actions.shape[-1] != len(self._change.factor):
            return actions
        factor, offset = (
            torch.tensor(values, dtype=actions.dtype, device=actions.device)
            for values in (self._change.factor, self._change.offset)
        )
        return (actions - offset) / factor if inverse else actions * factor + offset


class _PresentedExpert:
    """The expert of a pool, which plays by itself."""

    def __init__(self, env: PresentedEnv, expert: Any) -> None:
        self._env = env
        self._expert = expert

    def reset(self, env_ids: Sequence[int]) -> None:
        self._expert.reset(env_ids)

    def rollout(self, horizon: int) -> tuple[Step, Tensor]:
        step, actions = self._expert.rollout(horizon)
        return self._env._shown(step), self._env._affine(actions, inverse=True)
