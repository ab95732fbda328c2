"""The env API: what a simulator, a world model and a robot all look like to a policy.

Actions come and observations go once per chunk of H actions. ``SteppedVecEnv`` is the only place
that knows how to turn single simulator steps into a chunk; a simulator file only resets, steps and
observes. An env that ended waits, masked, until its owner resets it, so training, evaluation on a
fixed list and groups from one initial state use the same calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.types import EnvSpec, Obs, Step


class InvalidActionError(UserError, ValueError):
    """The actions have the wrong shape, leave [-1, 1] by far, or are not finite."""


@dataclass(frozen=True)
class EnvConfig:
    """What every env's config has; each simulator's own dataclass adds to it.

    Attributes:
        name: registry name of the simulator.
        num_envs: N, episodes that run in parallel.
        split: which initial states and appearances are drawn; ``"train"`` and ``"eval"`` never
            share any.
        seed: env k draws its initial states from seed + k.
        terminate_on_success: whether an episode ends when it succeeds; one that goes on lets the
            cameras see it solved.
        device: where the tensors of Obs and Step live.
    """

    name: str = ""
    num_envs: int = 8
    split: str = "train"
    seed: int = 0
    terminate_on_success: bool = True
    device: str = "cpu"

    def for_evaluation(self, split: str) -> EnvConfig:
        """The env that a policy is scored in; a world model names the real one here."""
        return replace(self, split=split)

    def lasting(self, steps: int) -> EnvConfig:
        """The same env with this time limit, where it has a setting for that."""
        has_one = any(field.name == "max_episode_steps" for field in fields(self))
        return replace(self, max_episode_steps=steps) if has_one else self  # pyright: ignore[reportCallIssue]


@runtime_checkable
class VecEnv(Protocol):
    """N episodes that run in parallel."""

    spec: EnvSpec

    def reset(
        self,
        env_ids: Tensor | Sequence[int] | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        init: Sequence[int] | None = None,
    ) -> Obs:
        """Starts new episodes in the envs named, and touches no other.

        Args:
            env_ids: indices or a (N,) bool mask; None means all.
            seed: reseeds those envs: an int s gives the k-th of all envs s + k, a sequence gives
                one to each.
            init: the initial state of each (see ``EnvSpec.tasks``); None lets each env draw from
                its own stream.

        Returns:
            The observation of all N envs.
        """
        ...

    def step(self, actions: Tensor) -> Step:
        """Executes a chunk.

        Args:
            actions: (N, H, A) in [-1, 1]; slightly outside is clipped.

        Raises:
            InvalidActionError: wrong shape, or NaN or infinity in a running env.
        """
        ...

    def close(self) -> None:
        """Frees processes, windows and memory; may be called twice."""
        ...


@dataclass
class Tick:
    """What one control step did, each (N,): reward float32 and three bools; ``fault`` marks a broken simulation.

    Where a person may take over, ``human`` (N,) says whether they did, and ``taken`` (N, A) what
    was executed.
    """

    reward: Tensor
    terminated: Tensor
    success: Tensor
    fault: Tensor
    human: Tensor | None = None
    taken: Tensor | None = None


class SteppedVecEnv(ABC):
    """Chunks out of single steps: masks, time limits, seeds and faults, for every simulator alike.

    A simulator implements ``_reset``, ``_step`` and ``_observe`` and sets ``spec`` before calling
    ``super().__init__``.
    """

    spec: EnvSpec

    def __init__(self, spec: EnvSpec, config: EnvConfig) -> None:
        self.spec = spec
        self.device = torch.device(config.device)
        self._rngs = [np.random.default_rng(config.seed + k) for k in range(spec.num_envs)]
        self._elapsed = torch.zeros(spec.num_envs, dtype=torch.long, device=self.device)
        self._running = torch.zeros(spec.num_envs, dtype=torch.bool, device=self.device)
        self._last_obs: Obs | None = None
        self._goes_on = not config.terminate_on_success
        self.init = np.zeros(spec.num_envs, dtype=np.int64)

    @abstractmethod
    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        """Puts each env into its initial state; the same number always gives the same state."""

    @abstractmethod
    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        """One control step: actions (N, A) in [-1, 1]; envs that are not ``active`` (N,) must not change."""

    @abstractmethod
    def _observe(self, env_ids: list[int] | None) -> Obs:
        """The observation of all N envs; only the rows in ``env_ids`` (None: all) need be new."""

    def close(self) -> None:  # noqa: B027 - a simulator that holds nothing need not implement it
        """Frees what the simulator holds."""

    def reset(
        self,
        env_ids: Tensor | Sequence[int] | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        init: Sequence[int] | None = None,
    ) -> Obs:
        """See ``VecEnv.reset``."""
        ids, inits = plan_reset(self.spec, self._rngs, env_ids, seed, init)
        if ids:
            self.init[ids] = inits
            self._reset(ids, inits)
            self._elapsed[ids] = 0
            self._running[ids] = True
        self._last_obs = self._observe(None if len(ids) == self.spec.num_envs else ids)
        return self._last_obs

    def step(self, actions: Tensor) -> Step:
        """See ``VecEnv.step``."""
        actions = check_actions(actions.to(self.device), self.spec, self._running)
        return self._chunk(actions.shape[1], lambda h: actions[:, h])

    def rollout(self, act: Callable[[], Tensor], horizon: int) -> tuple[Step, Tensor]:
        """A chunk whose actions are chosen one control step at a time, by an expert that reads the simulator's state.

        Args:
            act: gives the next actions (N, A) for the state as it is now.
            horizon: H, control steps.

        Returns:
            The step, and the actions (N, H, A) that were taken.
        """
        taken = torch.zeros(self.spec.num_envs, horizon, self.spec.action_dim, device=self.device)

        def next_actions(h: int) -> Tensor:
            taken[:, h] = check_actions(act().to(self.device)[:, None], self.spec, self._running)[
                :, 0
            ]
            return taken[:, h]

        return self._chunk(horizon, next_actions), taken

    def _chunk(self, horizon: int, next_actions: Callable[[int], Tensor]) -> Step:
        if self._last_obs is None:
            raise RuntimeError("step was called before the first reset.")
        num_envs = self.spec.num_envs
        started = self._running.clone()
        reward = torch.zeros(num_envs, horizon, device=self.device)
        valid = torch.zeros(num_envs, horizon, dtype=torch.bool, device=self.device)
        terminated, truncated, success, fault = (torch.zeros_like(started) for _ in range(4))
        human = taken = None
        for h in range(horizon):
            active = self._running.clone()
            if not active.any():
                break
            tick = self._step(next_actions(h), active)
            fault |= tick.fault & active
            if tick.human is not None and tick.taken is not None:
                human = torch.zeros_like(valid) if human is None else human
                taken = (
                    torch.zeros(num_envs, horizon, self.spec.action_dim) if taken is None else taken
                )
                human[:, h] = tick.human & active
                taken[:, h] = tick.taken
            valid[:, h] = active
            reward[:, h] = torch.where(active, tick.reward, 0.0)
            success = torch.where(active, tick.success, success)
            terminated |= tick.terminated & active & ~(tick.success & self._goes_on)
            self._elapsed += active
            truncated |= active & (self._elapsed >= self.spec.max_episode_steps)
            truncated &= ~terminated
            self._running &= ~(terminated | truncated | fault)
        previous = self._last_obs
        self._last_obs = obs = self._observe(None)
        if fault.any():
            # A broken simulation has no state worth learning from: the whole chunk is masked, and
            # the observation is the last good one, so that the advantage of a masked chunk is zero
            # and the one before it bootstraps.
            valid[fault] = False
            reward[fault] = 0.0
            terminated &= ~fault
            truncated |= fault
            success &= ~fault
            self._last_obs = obs = _replace_rows(obs, previous, fault)
        log = {"steps": valid.sum(1)}
        return Step(obs, reward, terminated, truncated, valid, success, fault, log, human, taken)


def plan_reset(
    spec: EnvSpec,
    rngs: list[np.random.Generator],
    env_ids: Tensor | Sequence[int] | None,
    seed: int | Sequence[int] | None,
    init: Sequence[int] | None,
) -> tuple[list[int], list[int]]:
    """The envs that a ``VecEnv.reset`` names and their initial states, given or drawn from each env's own stream.

    Args:
        spec: of the env.
        rngs: of the N envs; those named are reseeded where a seed is given.
        env_ids: see ``VecEnv.reset``.
        seed: see there.
        init: see there.

    Raises:
        UserError: an env or an initial state that does not exist, or lists of other lengths.
    """
    ids = env_index(env_ids, spec.num_envs)
    if seed is not None:
        seeds = [seed + k for k in ids] if isinstance(seed, int) else list(seed)
        _same_length("seed", seeds, ids)
        for k, s in zip(ids, seeds, strict=True):
            rngs[k] = np.random.default_rng(s)
    limit = spec.num_init_states
    if init is None:
        return ids, [int(rngs[k].integers(limit or 2**31)) for k in ids]
    inits = [int(i) for i in init]
    _same_length("init", inits, ids)
    if wrong := [i for i in inits if i < 0 or (limit is not None and i >= limit)]:
        span = f"0 to {limit - 1}" if limit is not None else "non-negative"
        raise UserError(f"{spec.name} has no initial state {wrong[0]}; they are {span}.")
    return ids, inits


def env_index(env_ids: Tensor | Sequence[int] | None, num_envs: int) -> list[int]:
    """The env numbers that ``env_ids`` (indices, bool mask or None for all) names, as a list."""
    if env_ids is None:
        return list(range(num_envs))
    ids = torch.as_tensor(env_ids)
    if ids.dtype == torch.bool:
        _same_length("env_ids (mask)", ids, range(num_envs))
        ids = ids.nonzero().flatten()
    out = [int(i) for i in ids.flatten().tolist()]
    if wrong := [i for i in out if not 0 <= i < num_envs]:
        raise UserError(f"There is no env {wrong[0]}: this env runs {num_envs}, numbered from 0.")
    return out


def check_actions(actions: Tensor, spec: EnvSpec, running: Tensor) -> Tensor:
    """The actions clipped to [-1, 1], or a sentence about what is wrong with them."""
    if (
        actions.ndim != 3
        or actions.shape[0] != spec.num_envs
        or actions.shape[2] != spec.action_dim
    ):
        raise InvalidActionError(
            f"{spec.name} takes actions of shape (num_envs={spec.num_envs}, H, "
            f"action_dim={spec.action_dim}), not {tuple(actions.shape)}."
        )
    bad = ~torch.isfinite(actions).all(dim=-1).all(dim=-1) & running
    if bad.any():
        raise InvalidActionError(
            f"The actions of env {bad.nonzero().flatten().tolist()} hold NaN or infinity, so no "
            "env was stepped. The policy has most likely diverged: lower the learning rate or go "
            "back to an earlier checkpoint."
        )
    return torch.nan_to_num(actions.float()).clamp(-1.0, 1.0)


def _same_length(what: str, given: Sequence[int] | Tensor, wanted: Sequence[int] | range) -> None:
    if len(given) != len(wanted):
        raise UserError(f"{what} has {len(given)} entries, but {len(wanted)} envs are addressed.")


def _replace_rows(obs: Obs, source: Obs, rows: Tensor) -> Obs:
    def pick(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(rows.view(-1, *[1] * (new.ndim - 1)), old, new)

    both_privileged = obs.privileged is not None and source.privileged is not None
    return Obs(
        images={name: pick(image, source.images[name]) for name, image in obs.images.items()},
        proprio=pick(obs.proprio, source.proprio),
        instruction=obs.instruction,
        privileged=pick(obs.privileged, source.privileged) if both_privileged else obs.privileged,  # type: ignore[arg-type]
    )
