"""Records what an expert or a policy does in an env, one ``Recording`` per episode."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from embodyrl.data.perturbed_replay import ReplayActor
from embodyrl.data.policy_actor import PolicyActor
from embodyrl.data.recording import Recording
from embodyrl.env import VecEnv
from embodyrl.errors import UserError
from embodyrl.rollouts.episodes import IDLE, EpisodeStream
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


class _Film:
    """What was recorded of one episode so far."""

    def __init__(self, init: int, instruction: str) -> None:
        self.init = init
        self.instruction = instruction
        self.rows: list[_Row] = []
        self.since_success = -1  # control steps since the task was first solved, -1 before

    def add(self, row: _Row) -> None:
        self.rows.append(row)
        if row.solved or self.since_success >= 0:
            self.since_success += 1


def record_episodes(
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
    stream = EpisodeStream(env, count() if inits is None else inits)
    env = stream.env
    films: dict[int, _Film] = {}  # of the episodes that are going on, by number
    ended: dict[int, Recording | None] = {}  # by number; None was thrown away
    emitted = 0
    while stats.kept < num_episodes:
        # Start as many episodes as are still missing.
        kept = stats.kept + sum(r is not None for r in ended.values())
        _start(stream, expert, films, stats, num_episodes, kept, keep)

        # One control step of every env.
        before = stream.obs
        step, actions = _timed(stats, "env_seconds", lambda obs=before: _advance(env, expert, obs))
        row_of = _row_of(before, actions[:, 0], step)
        over = step.done.clone()
        for k in (stream.playing != IDLE).nonzero().flatten().tolist():
            film = films[int(stream.playing[k])]
            if step.valid[k, 0]:
                film.add(row_of(k))
                stats.env_steps += 1
            if past_success is not None and film.since_success >= past_success:
                over[k] = True

        # Keep or throw away the episodes that ended, and hand them out in order.
        for one in stream.advance(step, over):
            film = films.pop(one.number)
            if one.result is None:
                stats.faults += 1
                ended[one.number] = None
                continue
            stats.tried += 1
            recording = _finish(film, env.spec, noise)
            stats.solved += recording.success
            wanted = keep == "all" or recording.success == (keep == "success")
            ended[one.number] = recording if wanted else None
            if progress is not None:
                progress(stats)
        while emitted in ended:
            recording = ended.pop(emitted)
            emitted += 1
            if recording is not None:
                stats.kept += 1
                yield recording


def _start(
    stream: EpisodeStream,
    expert: Expert | PolicyActor | ReplayActor,
    films: dict[int, _Film],
    stats: CollectStats,
    wanted: int,
    kept: int,
    keep: Keep,
) -> None:
    """Starts episodes in idle envs, but no more than are missing.

    Raises:
        UserError: too many were thrown away, or no initial state is left.
    """
    name = stream.env.spec.name
    running = int((stream.playing != IDLE).sum())
    missing = max(0, wanted - kept - running)
    if missing and running < len(stream.playing):
        if stream.started >= 20 + 10 * wanted:
            raise UserError(
                f"Of {stats.tried} episodes in {name} only {kept} could be kept (keep={keep!r}; "
                f"the expert solved {stats.solved}), so {wanted} are out of reach. Lower the "
                "expert's noise, or ask for fewer."
            )
        started = _timed(stats, "env_seconds", lambda: stream.fill(missing))
        for k in started:
            films[int(stream.playing[k])] = _Film(stream.init[k], stream.obs.instruction[k])
        if started:
            _timed(stats, "expert_seconds", lambda: expert.reset(started))
    if not stream.running:
        raise UserError(
            f"The initial states of {name} ran out after {kept} of {wanted} episodes. Ask for "
            "fewer, or give the expert some noise: then a state can be used again."
        )


def _advance(env: Any, expert: Any, obs: Obs) -> tuple[Step, Tensor]:
    """One control step and its actions (N, 1, A).

    The expert of a pool of worker processes acts inside them.
    """
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


def _finish(film: _Film, spec: EnvSpec, noise: float) -> Recording:
    images, *columns, privileged = zip(*film.rows, strict=True)
    return Recording(
        {name: np.stack([frame[name] for frame in images]) for name in images[0]},
        *(np.stack(column) for column in columns),
        init=film.init,
        task=spec.task_of(film.init),
        instruction=film.instruction,
        noise=noise,
        privileged=np.stack(privileged) if spec.privileged_dim else None,
    )


def _timed[T](stats: CollectStats, name: str, fn: Callable[[], T]) -> T:
    began = time.perf_counter()
    result = fn()
    setattr(stats, name, getattr(stats, name) + time.perf_counter() - began)
    return result
