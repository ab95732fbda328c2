"""The env contract: the interface of simulators, world models and robots.

A policy sends a chunk of H actions and then gets an observation. ``VecEnv`` is this interface.
``SteppedVecEnv`` implements it for whatever executes one action at a time: it turns single control
steps into a chunk, so that a simulator's class only resets, steps and observes.

There is no automatic reset. When an episode ends, its env waits, masked, until ``reset`` is called
for it. So training, evaluation on a fixed list of initial states and groups from one initial state
use the same calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from embodyrl.devices import env_device
from embodyrl.errors import UserError, did_you_mean
from embodyrl.ranges import Count, Device, Range, Seed
from embodyrl.storage.paths import machine_setting, path_setting
from embodyrl.types import EnvSpec, Obs, Step


class InvalidActionError(UserError, ValueError):
    """The actions have the wrong shape, or are not finite."""


@dataclass(frozen=True)
class EnvConfig:
    """The settings that every env has; the dataclass of each simulator adds its own.

    Attributes:
        name: registry name of the simulator.
        num_envs: N, episodes that run in parallel.
        split: the set of initial states and appearances; ``"train"`` and ``"eval"`` have none in
            common.
        seed: env k draws its initial states with seed + k.
        terminate_on_success: whether an episode ends when the task is solved. An episode that goes
            on shows the solved task to the cameras.
        profile: show pictures and take actions as a public family does (``storage.profiles``), for
            its checkpoints, e.g. ``libero_lerobot``; empty means the env's own conventions.
        device: of the simulator, its renderer and the tensors of Obs and Step: ``"auto"`` is the
            run's device where any of them can use a GPU, otherwise the CPU (``devices``).
        history: observations, one control step apart, that a policy sees at once; LeRobot's
            Diffusion Policy sees 2.
        reflector: folder of a reflector (``embodyrl world reflect``) that gives the reward and ends
            the episode in place of the simulator; empty means the env's own reward. A policy is
            still evaluated by the simulator's success.
        progress_coef: also rewards what the reflector's probability gains from chunk to chunk,
            times this. Gains and losses cancel, so an episode earns at most this much by them.
    """

    name: str = ""
    num_envs: Count = machine_setting(8)
    split: str = "train"
    seed: Seed = 0
    terminate_on_success: bool = True
    profile: str = ""
    device: Device = machine_setting("auto")
    history: Annotated[int, Range(1, 16)] = 1
    reflector: str = path_setting()
    progress_coef: Annotated[float, Range(0, 100)] = 0.0

    @property
    def judges_itself(self) -> bool:
        """Whether the env asks ``reflector`` itself, as dreams and robots do."""
        return False

    @property
    def only_recorded(self) -> bool:
        """Whether nothing can play in it: a run learns from data, which say what it is like."""
        return False

    @property
    def uses_gpu(self) -> bool:
        """Whether any part of the simulator can run on a GPU; ``device="auto"`` asks."""
        return False

    def place(self, run_device: str = "auto") -> torch.device:
        """The device that ``device`` means in a run on ``run_device``.

        Raises:
            UserError: there is no such device here.
        """
        return env_device(self.device, self.uses_gpu, run_device)

    def for_evaluation(self, split: str) -> EnvConfig:
        """The env in which a policy is evaluated, by its own success; a dream's is the real env."""
        return replace(self, split=split, reflector="", progress_coef=0.0)

    def ood_splits(self) -> dict[str, str]:
        """Splits out of the training distribution, and in words how each differs; none by default."""
        return {}

    def for_demonstrations(self) -> EnvConfig | None:
        """The env in which ``embodyrl collect`` demonstrates this one's task; None if in none."""
        return replace(self, reflector="", progress_coef=0.0)

    def smallest(self) -> EnvConfig | None:
        """The same with one env, to look at its spec; None where that would touch the world."""
        return replace(self, num_envs=1)

    def beside_a_run(self, count: int) -> EnvConfig | None:
        """``count`` envs beside those of a run, to compare data with; None where that cannot be."""
        if self.smallest() is None:
            return None
        return replace(self.for_evaluation(self.split), num_envs=count)

    def without_pictures(self) -> EnvConfig:
        """The same without cameras, where that leaves proprio as it is or longer; to play fast."""
        return self

    def with_time_limit(self, steps: int) -> EnvConfig:
        """The same env with this time limit, if it has a setting for it."""
        if not any(field.name == "max_episode_steps" for field in fields(self)):
            return self
        return replace(self, max_episode_steps=steps)  # pyright: ignore[reportCallIssue]


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
        """Starts new episodes in some envs, and leaves the others as they are.

        Args:
            env_ids: indices or a (N,) bool mask; None means all.
            seed: new seeds of these envs: an int s gives env k the seed s + k, a sequence gives one
                to each.
            init: the number of the initial state of each (see ``EnvSpec.tasks``); None lets each
                env draw one with its own generator.

        Returns:
            The observation of all N envs.
        """
        ...

    def step(self, actions: Tensor) -> Step:
        """Executes a chunk.

        Args:
            actions: (N, H, A) in [-1, 1]; values outside are clipped.

        Raises:
            InvalidActionError: wrong shape, or NaN or infinity in a running env.
        """
        ...

    def close(self) -> None:
        """Releases processes, windows and memory; may be called twice."""
        ...


@dataclass
class Tick:
    """The result of one control step.

    Attributes:
        reward: (N,) float32.
        terminated: (N,) bool, the task itself ended.
        success: (N,) bool, the task is solved.
        fault: (N,) bool, the simulation broke.
        truncated: (N,) bool, the episode is cut short although neither the task nor its time limit
            ended it; None where that never happens.
        human: (N,) bool, a person chose the action; None where nobody can take over.
        taken: (N, A) the actions that were executed; None with ``human``.
    """

    reward: Tensor
    terminated: Tensor
    success: Tensor
    fault: Tensor
    truncated: Tensor | None = None
    human: Tensor | None = None
    taken: Tensor | None = None


class SteppedVecEnv(ABC):
    """Makes chunks of single control steps, with masks, time limits, seeds and faults.

    A simulator implements ``_reset``, ``_step`` and ``_observe``, and passes its ``EnvSpec`` to
    ``super().__init__``. One that steps its envs one after the other does so with ``errors.try_each``, so
    that an error in one of them costs no other one its episode.

    Attributes:
        fault_texts: env number -> why it broke, where ``_step`` noted it; until its next reset.
    """

    spec: EnvSpec

    def __init__(self, spec: EnvSpec, config: EnvConfig) -> None:
        self.spec = spec
        self.config = config
        self.device = config.place()
        self._rngs = [np.random.default_rng(config.seed + k) for k in range(spec.num_envs)]
        self._elapsed = torch.zeros(spec.num_envs, dtype=torch.long, device=self.device)
        self._limit = torch.full_like(self._elapsed, spec.max_episode_steps)
        self._running = torch.zeros(spec.num_envs, dtype=torch.bool, device=self.device)
        self._last_obs: Obs | None = None
        self._ignore_success = not config.terminate_on_success
        self.init = np.zeros(spec.num_envs, dtype=np.int64)
        self.fault_texts: dict[int, str] = {}

    @abstractmethod
    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        """Puts each env into its initial state; the same number always gives the same state."""

    @abstractmethod
    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        """Executes one control step.

        Args:
            actions: (N, A) in [-1, 1].
            active: (N,) bool; envs that are not active must not change.
        """

    @abstractmethod
    def _observe(self, env_ids: list[int] | None) -> Obs:
        """The observation of all N envs; only the rows in ``env_ids`` (None: all) must be new."""

    def close(self) -> None:  # noqa: B027 - a simulator that holds nothing need not implement it
        """Releases what the simulator holds."""

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
            for k in ids:
                self.fault_texts.pop(k, None)
            self._reset(ids, inits)
            self._elapsed[ids] = 0
            limits = [self.spec.steps_of(init) for init in inits]
            self._limit[ids] = torch.tensor(limits, device=self.device)
            self._running[ids] = True
        self._last_obs = self._observe(None if len(ids) == self.spec.num_envs else ids)
        return self._last_obs

    def step(self, actions: Tensor) -> Step:
        """See ``VecEnv.step``."""
        actions = check_actions(actions.to(self.device), self.spec, self._running)
        return self._chunk(actions.shape[1], lambda h: actions[:, h])

    def rollout(self, act: Callable[[], Tensor], horizon: int) -> tuple[Step, Tensor]:
        """A chunk whose actions are chosen one control step at a time.

        Scripted experts act like this: they read the simulator's state before every action.

        Args:
            act: returns the next actions (N, A) for the present state.
            horizon: H, control steps.

        Returns:
            The step, and the actions (N, H, A) that were taken.
        """
        taken = torch.zeros(self.spec.num_envs, horizon, self.spec.action_dim, device=self.device)

        def next_actions(h: int) -> Tensor:
            actions = act().to(self.device)[:, None]
            taken[:, h] = check_actions(actions, self.spec, self._running)[:, 0]
            return taken[:, h]

        return self._chunk(horizon, next_actions), taken

    def _chunk(self, horizon: int, next_actions: Callable[[int], Tensor]) -> Step:
        """Executes H control steps; ``next_actions(h)`` gives the actions (N, A) of step h."""
        if self._last_obs is None:
            raise RuntimeError("step was called before the first reset.")
        num_envs = self.spec.num_envs
        started = self._running.clone()
        reward = torch.zeros(num_envs, horizon, device=self.device)
        valid = torch.zeros(num_envs, horizon, dtype=torch.bool, device=self.device)
        terminated, truncated, success, once, fault = (torch.zeros_like(started) for _ in range(5))
        human = None
        taken = None
        for h in range(horizon):
            # Only running episodes take the step. An episode that ended stays as it is.
            active = self._running.clone()
            if not active.any():
                break
            tick = self._step(next_actions(h), active)
            fault |= tick.fault & active
            # Where a person can take over, keep what they did.
            if tick.human is not None and tick.taken is not None:
                if human is None or taken is None:
                    human = torch.zeros_like(valid)
                    taken = torch.zeros(num_envs, horizon, self.spec.action_dim)
                human[:, h] = tick.human & active
                taken[:, h] = tick.taken
            # Reward and success of this step; success is that of the last valid step.
            valid[:, h] = active
            reward[:, h] = torch.where(active, tick.reward, 0.0)
            success = torch.where(active, tick.success, success)
            once |= active & tick.success
            # Does the episode end here? The task's own end comes before the time limit.
            terminated |= tick.terminated & active & ~(tick.success & self._ignore_success)
            self._elapsed += active
            truncated |= active & (self._elapsed >= self._limit)
            if tick.truncated is not None:
                truncated |= active & tick.truncated
            truncated &= ~terminated
            self._running &= ~(terminated | truncated | fault)

        previous = self._last_obs
        self._last_obs = obs = self._observe(None)
        if fault.any():
            # A broken simulation gives nothing to learn from, so the whole chunk is masked. The
            # observation is the last good one: then the masked chunk has an advantage of zero, and
            # the chunk before it is bootstrapped from a valid state.
            valid[fault] = False
            reward[fault] = 0.0
            terminated &= ~fault
            truncated |= fault
            success &= ~fault
            once &= ~fault
            self._last_obs = obs = replace_rows(obs, previous, fault)
        log = {"steps": valid.sum(1)}
        return Step(
            obs, reward, terminated, truncated, valid, success, fault, log, human, taken, once
        )


def plan_reset(
    spec: EnvSpec,
    rngs: list[np.random.Generator],
    env_ids: Tensor | Sequence[int] | None,
    seed: int | Sequence[int] | None,
    init: Sequence[int] | None,
) -> tuple[list[int], list[int]]:
    """The envs that a ``VecEnv.reset`` resets, and the initial state of each.

    Args:
        spec: of the env.
        rngs: the generators of the N envs, from which initial states are drawn if none are given.
            They are reseeded if a seed is given.
        env_ids: see ``VecEnv.reset``.
        seed: see ``VecEnv.reset``.
        init: see ``VecEnv.reset``.

    Returns:
        The indices of the envs, and the numbers of their initial states.

    Raises:
        UserError: an env or an initial state that does not exist, or lists of different lengths.
    """
    ids = env_index(env_ids, spec.num_envs)
    # New seeds, one for each env.
    if seed is not None:
        seeds = [seed + k for k in ids] if isinstance(seed, int) else list(seed)
        _same_length("seed", seeds, ids)
        for k, s in zip(ids, seeds, strict=True):
            rngs[k] = np.random.default_rng(s)
    # Initial states: drawn, or given and then checked.
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
    """The indices of envs as a list.

    Args:
        env_ids: indices, a (N,) bool mask, or None for all.
        num_envs: N.

    Raises:
        UserError: an env that does not exist, or a mask of another length.
    """
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


def split_index(split: str, splits: Sequence[str] = ("train", "eval")) -> int:
    """The place of ``split`` among the splits of an env, as a part of its seeds.

    Raises:
        UserError: the env has no such split.
    """
    if split not in splits:
        raise UserError(f"This env has no split {split!r}. {did_you_mean(split, splits)}")
    return list(splits).index(split)


def check_actions(actions: Tensor, spec: EnvSpec, running: Tensor) -> Tensor:
    """The actions, clipped to [-1, 1].

    Args:
        actions: (N, H, A).
        spec: of the env.
        running: (N,) bool; the actions of other envs may be anything.

    Raises:
        InvalidActionError: wrong shape, or NaN or infinity in a running env.
    """
    expected = (spec.num_envs, spec.action_dim)
    if actions.ndim != 3 or (actions.shape[0], actions.shape[2]) != expected:
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


def replace_rows(obs: Obs, source: Obs, rows: Tensor) -> Obs:
    """``obs``, with the rows where ``rows`` (N,) is True taken from ``source``."""

    def replaced(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(rows.view(-1, *[1] * (new.ndim - 1)), old, new)

    privileged = obs.privileged
    if privileged is not None and source.privileged is not None:
        privileged = replaced(privileged, source.privileged)
    previous = obs.previous
    if previous is not None and source.previous is not None:
        previous = replace_rows(previous, source.previous, rows)
    return Obs(
        images={name: replaced(image, source.images[name]) for name, image in obs.images.items()},
        proprio=replaced(obs.proprio, source.proprio),
        instruction=obs.instruction,
        privileged=privileged,
        previous=previous,
    )
