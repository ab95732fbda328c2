"""``EpisodeStream``: whole episodes, played one after the other in N parallel envs.

Rollouts, groups, evaluation and recording all play their episodes through it. It says which episode
each env is in, adds up rewards and lengths, and starts the next episode where one ended. Who acts,
and what is kept of a chunk, is the caller's business:

    stream = EpisodeStream(env, states)
    stream.fill()
    while stream.running:
        step = stream.step(actions for stream.obs)
        ended = stream.advance(step)
        stream.fill()

All envs begin together, and short episodes end first: those that have ended are no fair sample of
those that began. ``scored`` hands out each result when the time limit of its episode has passed,
however early it ended, so that a rate over them is unbiased at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from embodyrl.env import VecEnv
from embodyrl.errors import UserError
from embodyrl.rollouts.batches import Episode
from embodyrl.rollouts.fault_watch import guarded
from embodyrl.rollouts.start_sampling import Draws
from embodyrl.types import Obs, Step

IDLE = -1


def first_episode_id(iteration: int, shard: int) -> int:
    """The id of the first episode of a stream that begins in ``iteration`` of shard ``shard``.

    No other stream of a run gives out the same ids: there is room for 2^24 episodes of a stream.
    """
    return (shard << 48) + (iteration << 24)


def start_episodes(
    env: VecEnv,
    states: Iterable[int],
    device: torch.device | str = "cpu",
    first_id: int = 0,
    draws: Draws | None = None,
) -> EpisodeStream:
    """A stream whose envs are all in an episode, where there are as many initial states."""
    stream = EpisodeStream(env, states, device, first_id)
    stream.draws = draws or stream.draws
    stream.fill()
    return stream


@dataclass
class EndedEpisode:
    """An episode that came to its end.

    Attributes:
        env: the env that it was played in.
        number: its place in the order of initial states, from 0.
        init: its initial state.
        result: what it scored; None where the simulation broke.
    """

    env: int
    number: int
    init: int
    result: Episode | None


class EpisodeStream:
    """Episodes from the initial states of ``states``, in that order, in all envs of ``env``.

    Attributes:
        env: the env, whose faults are watched (``fault_watch.guarded``).
        obs: what the policy sees next, (N, ...) on ``device``.
        playing: (N,) the number of the episode that each env is in; ``IDLE`` where it is in none.
        init: the initial state of each env's episode.
        started: how many episodes have begun.
        draws: how ``states`` are drawn: the weights of episodes that begin from now on, and how
            long they last.
    """

    obs: Obs

    def __init__(
        self,
        env: VecEnv,
        states: Iterable[int],
        device: torch.device | str = "cpu",
        first_id: int = 0,
    ) -> None:
        """Plays nothing yet; ``first_id`` is added to an episode's number to make its id."""
        n = env.spec.num_envs
        self.env = guarded(env)
        self.device = device
        self.states = iter(states)
        self.playing = torch.full((n,), IDLE)
        self.first_id = first_id
        self.init = [0] * n
        self.started = 0
        self.draws = Draws()
        self._weight = [1.0] * n
        self._instruction = [""] * n
        self._limit = torch.zeros(n, dtype=torch.long)  # actions; 0 for the env's own limit
        self._reward = torch.zeros(n)
        self._length = torch.zeros(n, dtype=torch.long)
        self._once = torch.zeros(n, dtype=torch.bool)
        self._person = torch.zeros(n, dtype=torch.bool)
        self._clock = 0  # control steps that the stream has made
        self._due = [0] * n  # when the time limit of each env's episode passes
        self._results: list[tuple[int, Episode]] = []  # with when they may be scored

    @property
    def running(self) -> bool:
        """Whether any env is in an episode."""
        return bool((self.playing != IDLE).any())

    def episode_ids(self) -> Tensor:
        """(N,) int64: ``first_id`` + the number of each env's episode; ``IDLE`` for none."""
        return torch.where(self.playing == IDLE, IDLE, self.first_id + self.playing)

    def fill(self, most: int | None = None) -> list[int]:
        """Starts an episode in every idle env for which there is an initial state.

        Args:
            most: starts no more episodes than that; None means as many as there are idle envs.

        Returns:
            The envs in which an episode began.

        Raises:
            UserError: there was no initial state from the very start.
        """
        idle = (self.playing == IDLE).nonzero().flatten().tolist()[:most]
        states = list(islice(self.states, len(idle)))
        rows = idle[: len(states)]
        if not self.started and not rows and most != 0:
            raise UserError("Episodes need initial states, but the list of them is empty.")
        for k, init in zip(rows, states, strict=True):
            self.playing[k] = self.started
            self.init[k] = init
            self._reward[k] = 0.0
            self._length[k] = 0
            self._once[k] = False
            self._person[k] = False
            self._weight[k] = self.draws.weight(self.env.spec, init)
            steps = self.draws.steps(self.env.spec, init)
            self._limit[k] = steps
            self._due[k] = self._clock + (steps or self.env.spec.max_episode_steps)
            self.started += 1
        if rows and self.started == len(rows):
            # At the start, envs without an episode are reset too: only then do they show anything.
            spare = self.env.spec.num_envs - len(rows)
            self.obs = self.env.reset(init=states + [states[0]] * spare).to(self.device)
        elif rows:
            self.obs = self.env.reset(rows, init=states).to(self.device)
        for k in rows:
            self._instruction[k] = self.obs.instruction[k]
        return rows

    def step(self, actions: Tensor) -> Step:
        """The env's step; an episode that is shorter than the env's is truncated after it."""
        step = self.env.step(actions)
        if not self._limit.any():
            return step
        # Its time is up before the env's is.
        late = self._length + step.valid.sum(1).cpu() >= self._limit
        late &= (self._limit > 0) & (self.playing != IDLE) & ~step.done.cpu()
        return replace(step, truncated=step.truncated | late.to(step.truncated.device))

    def advance(self, step: Step, over: Tensor | None = None) -> list[EndedEpisode]:
        """Notes what a chunk did, and which episodes it ended; their envs idle until ``fill``.

        Args:
            step: of all envs.
            over: (N,) bool, the episodes to end now; None means those that the env ended.
        """
        self.obs = step.obs.to(self.device)
        self._reward += step.reward.sum(1).cpu()
        self._length += step.valid.sum(1).cpu()
        self._once |= step.ever_solved.cpu()
        if step.human is not None:
            self._person |= step.human.any(1).cpu()
        self._clock += step.valid.shape[1]
        over = (step.done if over is None else over).cpu() & (self.playing != IDLE)
        ended = []
        for k in over.nonzero().flatten().tolist():
            number = int(self.playing[k])
            result = self._result(step, k)
            ended.append(EndedEpisode(k, number, self.init[k], result))
            if result is not None:
                self._results.append((self._due[k], result))
            self.playing[k] = IDLE
        return ended

    def abandon(self, envs: Iterable[int]) -> None:
        """Gives the episodes of some envs up: they have no result, and their envs idle."""
        for k in envs:
            self.playing[k] = IDLE

    def scored(self) -> list[Episode]:
        """The results whose time limit has passed since the last call.

        An episode is among them ``max_episode_steps`` after it began: all that began with it have
        ended by then as well. Episodes that broke are not.
        """
        now = [result for due, result in self._results if due <= self._clock]
        self._results = [(due, result) for due, result in self._results if due > self._clock]
        return now

    def _result(self, step: Step, k: int) -> Episode | None:
        if step.fault[k]:
            return None
        task = self.env.spec.task_of(self.init[k])
        reward = float(self._reward[k])
        return Episode(
            self.init[k],
            task,
            bool(step.success[k]),
            reward,
            int(self._length[k]),
            bool(self._once[k]),
            bool(self._person[k]),
            self._weight[k],
            self._instruction[k],
        )
