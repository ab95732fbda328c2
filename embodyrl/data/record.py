"""Records what an expert or a policy does in an env, one ``Recording`` per episode."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from embodyrl.data.perturbed_replay import ReplayActor
from embodyrl.data.policy_actor import PolicyActor
from embodyrl.data.recording import Recording
from embodyrl.env import VecEnv
from embodyrl.errors import UserError
from embodyrl.types import EnvSpec, Obs, Step

Keep = Literal["success", "failure", "all"]


class Expert(Protocol):
    """Something that knows the simulator's state and says what to do next in each of the N envs."""

    def reset(self, env_ids: Sequence[int]) -> None:
        """Starts new plans in the envs named, which were reset just before."""
        ...

    def act(self) -> Tensor:
        """(N, A) in [-1, 1], the next action of every env; that of an env that ended is ignored."""
        ...


@dataclass
class CollectStats:
    """Figures of a collection, filled while it runs.

    Attributes:
        tried: episodes that ended.
        solved: of those, the successful ones.
        kept: recordings handed out.
        faults: episodes thrown away because the simulator broke.
        env_steps: actions executed.
        env_seconds: time in the simulator and the expert, rendering included.
        expert_seconds: time in the expert's resets.
    """

    tried: int = 0
    solved: int = 0
    kept: int = 0
    faults: int = 0
    env_steps: int = 0
    env_seconds: float = 0.0
    expert_seconds: float = 0.0


class _Row(NamedTuple):
    """What was seen before a control step, what was done, and what came of it."""

    images: dict[str, np.ndarray]
    proprio: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    solved: np.ndarray
    privileged: np.ndarray


@dataclass
class _Slot:
    """The episode that one env is in; ``number`` is its place in the order of initial states."""

    number: int
    init: int
    instruction: str
    rows: list[_Row] = field(default_factory=list)
    since_success: int = -1
    """Control steps since the task was first solved, -1 before."""

    def add(self, row: _Row) -> None:
        self.rows.append(row)
        if row.solved or self.since_success >= 0:
            self.since_success += 1


def collect_episodes(
    env: VecEnv,
    expert: Expert | PolicyActor | ReplayActor,
    num_episodes: int,
    *,
    inits: Iterable[int] | None = None,
    keep: Keep = "success",
    noise: float = 0.0,
    past_success: int | None = None,
    stats: CollectStats | None = None,
    progress: Callable[[CollectStats], None] | None = None,
) -> Iterator[Recording]:
    """Yields ``num_episodes`` recordings in the order of their initial states.

    An episode that is not kept is replaced by one from the next initial state. Which are kept does
    not depend on which ends first (short episodes are not preferred), nor, without noise, on the
    number of envs.

    Args:
        env: N envs, stepped one action at a time.
        expert: acts in all of them.
        num_episodes: how many to keep.
        inits: initial states, used in order; None means 0, 1, 2, ..., so that tasks take turns.
        keep: ``"success"``, ``"failure"`` or ``"all"`` episodes.
        noise: the expert's, for the record.
        past_success: in an env that goes on when the task is solved, break an episode off that many
            steps later: what a solved task looks like is worth having, the rest of the time is not.
                None lets it run to its end.
        stats: filled while running.
        progress: called after every episode.

    Raises:
        UserError: far too many episodes had to be thrown away, or the initial states ran out.
    """
    stats = stats if stats is not None else CollectStats()
    if keep not in ("success", "failure", "all"):
        raise UserError(f"keep is {keep!r}; it must be 'success', 'failure' or 'all'.")
    limit = 20 + 10 * num_episodes
    states = iter(count() if inits is None else inits)
    slots: list[_Slot | None] = [None] * env.spec.num_envs
    ended: dict[int, Recording | None] = {}  # by number; None was thrown away
    started = 0
    emitted = 0
    obs: Obs | None = None
    while stats.kept < num_episodes:
        held = stats.kept + sum(r is not None for r in ended.values())
        idle = [k for k, slot in enumerate(slots) if slot is None]
        fresh = idle[: max(0, num_episodes - held - (len(slots) - len(idle)))]
        if fresh:
            if started >= limit:
                raise UserError(
                    f"Of {stats.tried} episodes in {env.spec.name} only {held} could be kept "
                    f"(keep={keep!r}; the expert solved {stats.solved}), so {num_episodes} are out "
                    "of reach. Lower the expert's noise, or ask for fewer."
                )
            fresh = fresh[: len(chosen := [init for _, init in zip(fresh, states, strict=False)])]
            if fresh:
                obs = _timed(
                    stats, "env_seconds", lambda ids=fresh, i=chosen: env.reset(ids, init=i)
                )
                for k, init in zip(fresh, chosen, strict=True):
                    slots[k] = _Slot(started, init, obs.instruction[k])
                    started += 1
                _timed(stats, "expert_seconds", lambda ids=fresh: expert.reset(ids))
            elif len(idle) == len(slots):
                raise UserError(
                    f"The initial states of {env.spec.name} ran out after {held} of {num_episodes} "
                    "episodes. Ask for fewer, or give the expert some noise: then a state can be "
                    "used again."
                )
        assert obs is not None
        before = obs
        step, actions = _timed(stats, "env_seconds", lambda obs=before: _advance(env, expert, obs))
        actions = actions[:, 0]
        obs = step.obs
        valid = step.valid[:, 0].tolist()
        done = step.done.tolist()
        fault = step.log["fault"].tolist() if "fault" in step.log else [False] * len(slots)
        row_of = _row_of(before, actions, step)
        for k, slot in enumerate(slots):
            if slot is None:
                continue
            if valid[k]:
                slot.add(row_of(k))
                stats.env_steps += 1
            if not done[k] and (past_success is None or slot.since_success < past_success):
                continue
            slots[k] = None
            if fault[k]:
                stats.faults += 1
                ended[slot.number] = None
                continue
            stats.tried += 1
            recording = _finish(slot, env.spec, noise)
            stats.solved += recording.success
            wanted = keep == "all" or recording.success == (keep == "success")
            ended[slot.number] = recording if wanted else None
            if progress is not None:
                progress(stats)
        while emitted in ended:
            recording = ended.pop(emitted)
            emitted += 1
            if recording is not None:
                stats.kept += 1
                yield recording


def _advance(env: Any, expert: Any, obs: Obs) -> tuple[Step, Tensor]:
    """One control step and its actions (N, 1, A); the expert of a pool of processes acts inside them."""
    if hasattr(expert, "act_on"):
        actions = expert.act_on(obs)[:, None]
        return env.step(actions), actions
    return expert.rollout(1) if hasattr(expert, "rollout") else env.rollout(expert.act, 1)


def _row_of(obs: Obs, actions: Tensor, step: Step) -> Callable[[int], _Row]:
    """The row of each env, in memory of its own."""
    images = {name: image.cpu().numpy() for name, image in obs.images.items()}
    hidden = obs.proprio[:, :0] if obs.privileged is None else obs.privileged
    numbers = [x.cpu().float().numpy() for x in (obs.proprio, actions, step.reward[:, 0])]
    numbers += [step.success.cpu().numpy(), hidden.cpu().float().numpy()]
    return lambda k: _Row(
        {n: x[k].copy() for n, x in images.items()}, *(x[k].copy() for x in numbers)
    )


def _finish(slot: _Slot, spec: EnvSpec, noise: float) -> Recording:
    images, *columns, privileged = zip(*slot.rows, strict=True)
    return Recording(
        {name: np.stack([frame[name] for frame in images]) for name in images[0]},
        *(np.stack(column) for column in columns),
        init=slot.init,
        task=spec.task_of(slot.init),
        instruction=slot.instruction,
        noise=noise,
        privileged=np.stack(privileged) if spec.privileged_dim else None,
    )


def _timed[T](stats: CollectStats, name: str, fn: Callable[[], T]) -> T:
    began = time.perf_counter()
    result = fn()
    setattr(stats, name, getattr(stats, name) + time.perf_counter() - began)
    return result
