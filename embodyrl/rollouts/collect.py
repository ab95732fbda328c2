"""The policy acts in the env: so many chunks (``collect``), loose transitions, or whole episodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from embodyrl.env import VecEnv
from embodyrl.errors import UserError
from embodyrl.policy import Policy
from embodyrl.rollouts.batches import Episode, EpisodeBatch, RolloutBatch, Transitions
from embodyrl.rollouts.seeding import draw_inits, initial_states
from embodyrl.types import DenoisingTrace, Obs, Step

Act = Callable[[Obs, torch.Generator], tuple[Tensor, Tensor]]
"""Observations to actions (N, H, A) in [-1, 1], and the choice (N, H, A) that the algorithm made: mostly the same."""


@torch.no_grad()
def collect(
    env: VecEnv,
    policy: Policy,
    num_chunks: int,
    *,
    inits: Tensor,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
    between: Callable[[], None] = lambda: None,
) -> RolloutBatch:
    """Runs every env for ``num_chunks`` chunks, starting a new episode wherever one ended.

    Starting from named initial states each time, rather than going on where the last rollout
    stopped, makes a rollout a function of (parameters, inits, generator) alone: a resumed run
    repeats it bit for bit, and no simulator state needs to be saved.

    Args:
        env: N envs.
        policy: sampled in ``"train"`` mode.
        num_chunks: T.
        inits: (>= 1,) initial states, used in order; the first N at the start, and each reset takes
            the next. When they run out they are used again from the first.
        generator: source of the policy's noise.
        device: of the policy.
        between: called before every chunk; may raise, to give the rollout up.

    Raises:
        UserError: there are no initial states, or the policy has no critic.
    """
    player = Player(env, device)
    player.begin(inits)
    all_obs: list[Obs] = []
    traces: list[DenoisingTrace] = []
    logprobs: list[Tensor] = []
    values: list[Tensor] = []
    next_values: list[Tensor] = []
    steps: list[Step] = []
    for _ in range(num_chunks):
        between()
        obs = player.obs
        sample = policy.sample(obs, generator=generator, mode="train")
        if sample.trace is None or sample.logprob is None or sample.value is None:
            raise UserError(
                f"{type(policy).__name__} gives no trace, log-probability or value, which a "
                "rollout needs."
            )
        step, after = player.step(sample.actions)
        all_obs.append(obs)
        traces.append(sample.trace)
        logprobs.append(sample.logprob)
        values.append(sample.value)
        next_values.append(policy.value(after))
        steps.append(step)
    return RolloutBatch(
        obs=Obs.cat(all_obs),
        trace=DenoisingTrace.cat(traces),
        logprob=torch.cat(logprobs),
        value=torch.stack(values),
        next_value=torch.stack(next_values),
        reward=torch.stack([s.reward for s in steps]).to(device),
        valid=torch.stack([s.valid for s in steps]).to(device),
        terminated=torch.stack([s.terminated for s in steps]).to(device),
        truncated=torch.stack([s.truncated for s in steps]).to(device),
        episodes=player.take_episodes(),
        env_steps=int(sum(int(s.valid.sum()) for s in steps)),
    )


@torch.no_grad()
def collect_transitions(
    player: Player,
    act: Act,
    num_chunks: int,
    *,
    inits: Tensor,
    generator: torch.Generator,
    between: Callable[[], None] = lambda: None,
) -> Transitions:
    """Goes on with the episodes of ``player`` for ``num_chunks`` chunks: what an off-policy algorithm learns from.

    Off-policy updates are frequent, so their rollouts are far shorter than an episode.

    Args:
        player: the episodes in progress; a fresh one, or one that was restarted, begins new ones.
        act: gives the actions, and what was chosen (see ``Act``).
        num_chunks: T.
        inits: initial states for the episodes that begin, used in order.
        generator: source of the policy's noise.
        between: called before every chunk; may raise, to give the rest up.

    Returns:
        The chunks; where a person took over, ``choice`` is what was executed.
    """
    if player.fresh:
        player.begin(inits)
    else:
        player.queue = _Queue(inits)
    parts: list[Transitions] = []
    for _ in range(num_chunks):
        between()
        obs = player.obs
        actions, choice = act(obs, generator)
        step, after = player.step(actions)
        reward, valid, terminated, truncated = (
            x.to(player.device) for x in (step.reward, step.valid, step.terminated, step.truncated)
        )
        keep = valid.any(-1)  # an env that broke did nothing that can be learned from
        human = None
        if step.human is not None and step.taken is not None:
            human = step.human.any(-1).to(player.device)
            if choice is actions:
                choice = torch.where(human[:, None, None], step.taken.to(choice), choice)
            else:  # a person's actions are no choice of an algorithm that chooses something else
                keep &= ~human
        part = Transitions(obs, choice, reward, valid, terminated, truncated, after, human)
        parts.append(part if keep.all() else part[keep])
    return Transitions.cat(parts)


class Player:
    """Episodes in progress: steps every env, and starts a new episode where one ended.

    Attributes:
        obs: what the policy sees next, on ``device``.
        fresh: whether the next collection begins with new episodes.
    """

    obs: Obs

    def __init__(self, env: VecEnv, device: torch.device | str = "cpu") -> None:
        self.env = env
        self.device = device
        self.fresh = True
        self._episodes: list[Episode] = []

    def begin(self, inits: Tensor) -> None:
        """New episodes in all envs, from the first N of ``inits``; each reset takes the next."""
        if len(inits) == 0:
            raise UserError("A rollout needs initial states, but the list of them is empty.")
        n = self.env.spec.num_envs
        self.queue = _Queue(inits)
        self._current = self.queue.take(n)
        self._reward = torch.zeros(n)
        self._length = torch.zeros(n, dtype=torch.long)
        self.obs = self.env.reset(init=self._current).to(self.device)
        self.fresh = False

    def step(self, actions: Tensor) -> tuple[Step, Obs]:
        """Executes a chunk in every env; returns what it did, and the observations after it, before any reset."""
        step = self.env.step(actions)
        self.obs = after = step.obs.to(self.device)
        self._reward += step.reward.sum(1).cpu()
        self._length += step.valid.sum(1).cpu()
        if ended := step.done.nonzero().flatten().tolist():
            fault = step.log.get("fault", torch.zeros(len(step.done)))
            for k in ended:
                if not bool(fault[k]):
                    init = self._current[k]
                    success = bool(step.success[k])
                    task = self.env.spec.task_of(init)
                    self._episodes.append(
                        Episode(init, task, success, float(self._reward[k]), int(self._length[k]))
                    )
                self._reward[k] = 0.0
                self._length[k] = 0
            new = self.queue.take(len(ended))
            for k, init in zip(ended, new, strict=True):
                self._current[k] = init
            self.obs = self.env.reset(ended, init=new).to(self.device)
        return step, after

    def take_episodes(self) -> list[Episode]:
        """The episodes that ended since the last call."""
        episodes = self._episodes
        self._episodes = []
        return episodes


class InProcess(Player):
    """Plays a run's training episodes, or a shard of them; those who play them elsewhere are in ``real_robot``."""

    def __init__(self, env: VecEnv, seed: int, device: torch.device, shard: int = 0) -> None:
        super().__init__(env, device)
        self.seed = seed
        self.shard = shard

    def collect(
        self, algorithm: Any, iteration: int, *, device: torch.device, **options: Any
    ) -> Any:
        """What ``algorithm`` learns from in an iteration; ``options`` are those of the functions in this module.

        The episodes that begin take initial states that depend on (seed, iteration, shard) alone.
        """
        now = (self.env, self.seed, iteration, self.shard)
        if algorithm.source == "groups":
            return algorithm.collect(self.env, initial_states(*now), device=device, **options)
        num_chunks = algorithm.config.num_chunks
        inits = draw_inits(self.env, num_chunks, *now[1:])
        if algorithm.source == "transitions":
            return collect_transitions(self, algorithm.act, num_chunks, inits=inits, **options)
        return collect(
            self.env, algorithm.policy, num_chunks, inits=inits, device=device, **options
        )


class _Queue:
    def __init__(self, inits: Tensor) -> None:
        self.inits = cast(list[int], inits.tolist())
        self.used = 0

    def take(self, count: int) -> list[int]:
        out = [self.inits[(self.used + i) % len(self.inits)] for i in range(count)]
        self.used += count
        return out


@torch.no_grad()
def collect_episodes(
    env: VecEnv,
    policy: Policy,
    inits: list[int],
    *,
    generator: torch.Generator,
    until_success: bool = True,
    device: torch.device | str = "cpu",
    between: Callable[[], None] = lambda: None,
) -> EpisodeBatch:
    """Plays every initial state once, as a whole episode; the same number several times is a group.

    Args:
        env: N envs; when one ends it takes the next initial state, and idles when none is left.
        policy: sampled in ``"train"`` mode; needs no critic.
        inits: at least N initial states.
        generator: source of the policy's noise.
        until_success: an episode is over with its first success, also in an env that would go on.
        device: of the policy.
        between: called before every chunk; may raise, to give the rollout up.

    Raises:
        UserError: fewer initial states than envs, or a policy without a trace.
    """
    n = env.spec.num_envs
    if len(inits) < n:
        raise UserError(
            f"{len(inits)} episodes cannot keep {n} envs busy: lower env.num_envs, or ask for more "
            "episodes."
        )
    playing = torch.arange(n)  # the episode that each env is in; -1 idles
    started = n
    env_steps = 0
    obs = env.reset(init=inits[:n]).to(device)
    reward = torch.zeros(len(inits))
    length = torch.zeros(len(inits), dtype=torch.long)
    episodes: list[Episode | None] = [None] * len(inits)
    parts: list[tuple[Obs, DenoisingTrace, Tensor, Tensor]] = []
    while (playing >= 0).any():
        between()
        sample = policy.sample(obs, generator=generator, mode="train")
        if sample.trace is None or sample.logprob is None:
            raise UserError(
                f"{type(policy).__name__} gives no trace or log-probability, which a rollout needs."
            )
        step = env.step(sample.actions)
        env_steps += int(step.valid.sum())
        acted = ((playing >= 0) & step.valid.any(-1).cpu()).nonzero().flatten()
        rows = acted.to(device)
        numbers = playing[acted]
        parts.append((obs[rows], sample.trace[rows], sample.logprob[rows], numbers.to(device)))
        reward[numbers] += step.reward.sum(1).cpu()[acted]
        length[numbers] += step.valid.sum(1).cpu()[acted]
        obs = step.obs.to(device)
        fault = step.log.get("fault", torch.zeros(n))
        over = step.done | (step.success & until_success)
        ended = (over.cpu() & (playing >= 0)).nonzero().flatten().tolist()
        for k in ended:
            i = int(playing[k])
            if not bool(fault[k]):
                init = inits[i]
                success = bool(step.success[k])
                episodes[i] = Episode(
                    init, env.spec.task_of(init), success, float(reward[i]), int(length[i])
                )
            playing[k] = started if started < len(inits) else -1
            started += 1
        if fresh := [k for k in ended if playing[k] >= 0]:
            obs = env.reset(fresh, init=[inits[int(playing[k])] for k in fresh]).to(device)
    all_obs, traces, logprobs, numbers = zip(*parts, strict=True)
    return EpisodeBatch(
        Obs.cat(list(all_obs)),
        DenoisingTrace.cat(list(traces)),
        torch.cat(logprobs),
        torch.cat(numbers),
        episodes,
        env_steps,
    )
