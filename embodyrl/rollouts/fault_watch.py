"""``GuardedEnv``: an env whose faults cost their episodes, and no more.

A simulator that raises, or hands over NaN, infinity or arrays of a wrong shape or type, has a
fault. The chunk of that env is masked, and its episode ends truncated with ``Step.fault``. The
other envs go on. A simulator that steps all its envs in one call, and raises in it, loses the
episodes of all: that is one fault. Too many faults have a cause that a reset does not remove: then
the run stops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embodyrl.env import VecEnv, env_index, replace_rows
from embodyrl.errors import UserError, error_text
from embodyrl.rollouts.contract import not_finite, obs_defect, step_defect
from embodyrl.rollouts.env_around import EnvAround
from embodyrl.types import Obs, Step

MAX_FAULTS = 5
FAULT_WINDOW = 100
"""So many faults, which cost so many of so many episodes, have a cause that no reset removes."""
MAX_NAMED = 4
"""So many envs of one fault are named in a message."""
BROKE = "its simulation broke (an error, NaN or infinity)"
"""What is said of a fault that the env gives no reason for."""


class FaultWindow:
    """Counts faults and the episodes that they cost.

    It is too much where at least ``MAX_FAULTS`` of the latest faults cost at least ``MAX_FAULTS``
    of ``FAULT_WINDOW`` episodes. So one fault of many envs is no reason to stop, and neither are a
    few broken envs of thousands; a simulator that loses all its envs again and again is one.

    Args:
        num_envs: how many episodes are played at the same time.
    """

    def __init__(self, num_envs: int = 1) -> None:
        self._least = max(FAULT_WINDOW, num_envs)
        self._episodes = 0
        # For each fault, how many episodes had begun by then, and how many it cost.
        self._faults: list[tuple[int, int]] = []

    def begin(self, episodes: int) -> None:
        """Notes that so many episodes begin."""
        self._episodes += episodes

    def add(self, lost: int = 1) -> str | None:
        """Notes a fault that cost ``lost`` episodes.

        Returns:
            Where it is one too many, the rest of a sentence about the env ("broke 5 times ...").
        """
        kept = max(MAX_FAULTS, MAX_FAULTS * self._least // FAULT_WINDOW + 1)
        self._faults = [*self._faults, (self._episodes, lost)][-kept:]
        total = 0
        for count, (begun, cost) in enumerate(reversed(self._faults), 1):
            total += cost
            episodes = max(self._least, self._episodes - begun)
            if count >= MAX_FAULTS and total * FAULT_WINDOW >= MAX_FAULTS * episodes:
                return f"broke {count} times within {episodes} episodes, so the run stops."
        return None


def guarded(env: VecEnv) -> VecEnv:
    """The env with its faults watched; the env itself if that is done already, as in a pool."""
    return env if getattr(env, "guards_itself", False) else GuardedEnv(env)


class GuardedEnv(EnvAround):
    """A VecEnv around another one, which turns whatever is wrong with it into faults.

    Everything that an env hands over passes through here once: ``contract`` says what is
    wrong. A ``UserError`` passes through, because it is a mistake of the user's.

    An env with ``supervised = True`` (a robot) keeps its exceptions: it is not reset unasked.

    Args:
        env: the env; with ``fault_texts`` (env number -> words) if it knows why it broke.
        catch: whether an exception is a fault. A worker process lets them pass and is remade.
    """

    guards_itself = True

    def __init__(self, env: VecEnv, *, catch: bool = True) -> None:
        super().__init__(env)
        self.faults: list[tuple[list[int], str]] = []
        """Envs and reason of each fault of the last reset and step."""
        self._catch = catch and not getattr(env, "supervised", False)
        self._counts = catch
        n = env.spec.num_envs
        self._window = FaultWindow(n)
        self._init: list[int | None] = [None] * n
        self._running = torch.zeros(n, dtype=torch.bool)
        # Envs that broke wait, masked, for their reset; ``_unready`` broke in the reset itself and
        # say so in the next step, because a reset cannot.
        self._masked = torch.zeros(n, dtype=torch.bool)
        self._unready: dict[int, str] = {}
        self._obs: Obs | None = None

    # ---- Resets.

    def reset(
        self,
        env_ids: Tensor | Sequence[int] | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        init: Sequence[int] | None = None,
    ) -> Obs:
        """See ``VecEnv.reset``. An env that breaks in it has its fault in the next step.

        Raises:
            UserError: the env broke too often, or no env could be reset.
        """
        ids = env_index(env_ids, self.spec.num_envs)
        inits = list(init) if init is not None else [None] * len(ids)
        for k, i in zip(ids, inits, strict=False):
            self._init[k] = i
        self._window.begin(len(ids))
        self.faults = []
        obs, broken = self._reset(env_ids, ids, seed, init)
        while obs is None or (self._obs is None and len(broken) == self.spec.num_envs):
            # Nothing at all to go on from: the same reset is tried again, until it is too often.
            k, why = next(iter(broken.items()))
            if not self._counts:
                raise RuntimeError(f"env {k} broke in its reset: {why}")
            self._count(list(broken), why)
            obs, broken = self._reset(env_ids, ids, seed, init)
        rows = torch.tensor(ids, dtype=torch.long)
        self._running[rows] = True
        self._masked[rows] = False
        self._unready = {k: why for k, why in self._unready.items() if k not in ids} | broken
        self._masked[list(broken)] = True
        self._obs = self._mended(obs)
        return self._obs

    def _reset(
        self,
        env_ids: Tensor | Sequence[int] | None,
        ids: list[int],
        seed: int | Sequence[int] | None,
        init: Sequence[int] | None,
    ) -> tuple[Obs | None, dict[int, str]]:
        """An observation of all envs, if any could be had, and the envs that broke."""
        try:
            obs = self.env.reset(env_ids, seed=seed, init=init)
            if defect := obs_defect(obs, self.spec):
                if not self._catch:
                    raise RuntimeError(defect)
                return self._obs, dict.fromkeys(ids, defect)
            here = self._running.clone()
            here[ids] = True
            return obs, {k: why for k, why in not_finite(obs).items() if here[k]}
        except UserError:
            raise
        except Exception as error:
            if not self._catch:
                raise
            why = error_text(error)
        if init is None or len(ids) < 2:
            return self._obs, dict.fromkeys(ids, why)
        # Which of them was it? Each is reset alone; the same number gives the same state.
        obs = self._obs
        broken: dict[int, str] = {}
        for k, i in zip(ids, init, strict=True):
            one, wrong = self._reset([k], [k], None, [i])
            obs = obs if one is None else one
            broken |= wrong
        return obs, broken

    # ---- Steps.

    def step(self, actions: Tensor) -> Step:
        """See ``VecEnv.step``.

        Raises:
            UserError: the env broke too often.
        """
        horizon = actions.shape[1] if actions.ndim == 3 else 0
        return self._guard(lambda: (self.env.step(actions), actions), horizon)[0]

    def rollout(self, act: Callable[[], Tensor], horizon: int) -> tuple[Step, Tensor]:
        """See ``SteppedVecEnv.rollout``."""
        inner: Any = self.env
        return self._guard(lambda: inner.rollout(act, horizon), horizon)

    def _guard(self, call: Callable[[], tuple[Step, Tensor]], horizon: int) -> tuple[Step, Tensor]:
        self.faults = []
        if self._obs is None:
            raise RuntimeError("step was called before the first reset.")
        try:
            step, taken = call()
            defect = step_defect(step, self.spec, horizon)
            if defect and not self._catch:
                raise RuntimeError(defect)
        except UserError:
            raise
        except Exception as error:
            if not self._catch:
                raise
            defect = error_text(error)
            step = taken = None
        if step is None or taken is None or defect:
            # Nothing of the step can be used, so all envs are lost.
            here = self._running & ~self._masked
            step, taken = self._nothing(horizon)
            wrong = dict.fromkeys(here.nonzero().flatten().tolist(), defect)
        else:
            wrong = self._wrong(step)
        return self._settled(step, wrong), taken

    def _wrong(self, step: Step) -> dict[int, str]:
        """The envs that broke in a step of the right shape."""
        wrong = not_finite(step.obs, step)
        if bool(step.fault.any()):
            texts = getattr(self.env, "fault_texts", {})
            # An env that says itself that it broke knows best why.
            for k in step.fault.nonzero().flatten().tolist():
                wrong[k] = texts.get(k, BROKE)
        if not wrong:
            return wrong
        here = self._running & ~self._masked
        return {k: why for k, why in wrong.items() if here[k]}

    def _settled(self, step: Step, wrong: dict[int, str]) -> Step:
        """The step with the chunks of broken envs masked, and its faults counted."""
        wrong = wrong | self._unready
        # All that ran broke in the same step: that has one cause, and is one fault.
        together = len(wrong) > 1 and len(wrong) == int((self._running & ~self._masked).sum())
        waiting = bool(self._masked.any())
        if wrong or waiting:
            # Their own flags mean nothing; of those that wait, there is nothing to say.
            now = torch.zeros_like(self._masked)
            now[list(wrong)] = True
            self._masked |= now
            gone = self._masked.to(step.reward.device)
            fault = now.to(step.reward.device)
            valid = step.valid & ~gone[:, None]
            step = replace(
                step,
                obs=self._mended(step.obs),
                reward=torch.where(gone[:, None], 0.0, step.reward),
                terminated=step.terminated & ~gone,
                truncated=(step.truncated & ~gone) | fault,
                valid=valid,
                success=step.success & ~gone,
                success_once=step.ever_solved & ~gone,
                fault=(step.fault & ~gone) | fault,
                log=step.log | {"steps": valid.sum(1)},
            )
        self._unready = {}
        self._obs = step.obs
        self._running &= ~step.done.cpu()
        if together:
            self._count(list(wrong), next(iter(wrong.values())))
        else:
            for k, why in wrong.items():
                self._count([k], why)
        return step

    def _nothing(self, horizon: int) -> tuple[Step, Tensor]:
        """A step in which nothing happened, and its actions (N, H, A)."""
        assert self._obs is not None
        n = self.spec.num_envs
        device = self._obs.proprio.device
        off = torch.zeros(n, dtype=torch.bool, device=device)
        step = Step(
            self._obs,
            reward=torch.zeros(n, horizon, device=device),
            terminated=off,
            truncated=off.clone(),
            valid=torch.zeros(n, horizon, dtype=torch.bool, device=device),
            success=off.clone(),
            fault=off.clone(),
            log={"steps": torch.zeros(n, dtype=torch.long, device=device)},
        )
        return step, torch.zeros(n, horizon, self.spec.action_dim, device=device)

    def _mended(self, obs: Obs) -> Obs:
        """The observation, with the last good one of each env that broke."""
        if not self._masked.any():
            return obs
        rows = self._masked.to(obs.proprio.device)
        if self._obs is not None:
            return replace_rows(obs, self._obs, rows)
        # At the first reset there is none: what another env shows stands in. It is never learned
        # from.
        good = int((~self._masked).nonzero()[0])
        return replace_rows(obs, obs[torch.full((self.spec.num_envs,), good)], rows)

    def _count(self, envs: list[int], why: str) -> None:
        """Notes a fault of some envs, and stops the run where there are too many."""
        self.faults.append((envs, why))
        if not self._counts:
            return  # the parent of a worker does
        where = named(envs, [self._init[k] for k in envs])
        if too_many := self._window.add(len(envs)):
            raise UserError(f"{self.spec.name} {too_many} Last it broke in {where}: {why}.")
        warn(f"{where} of {self.spec.name} broke: {why}.", len(envs))


def named(envs: Sequence[int], states: Sequence[Any]) -> str:
    """Envs and what their initial states are, for messages; of many, the first few."""
    some = len(envs) > 1
    known = [str(state) for state in states if state is not None]
    text = f"env{'s' * some} {_listed([str(k) for k in envs])}"
    return f"{text} (initial state{'s' * some} {_listed(known, '; ')})" if known else text


def _listed(words: list[str], between: str = ", ") -> str:
    more = len(words) - MAX_NAMED
    return between.join(words[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def warn(text: str, episodes: int = 1) -> None:
    """Says that so many episodes were lost."""
    lost = "Its episode does not count." if episodes == 1 else "Their episodes do not count."
    print(f"WARNING: {text} {lost}", file=sys.stderr)
