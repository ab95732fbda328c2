"""The policy acts in the env: so many chunks, loose transitions, or whole episodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from embodyrl.env import VecEnv
from embodyrl.errors import UserError
from embodyrl.policy import Actor, HasValue
from embodyrl.rollouts.batches import (
    Episode,
    EpisodeBatch,
    RolloutBatch,
    TransitionBatch,
    Transitions,
)
from embodyrl.rollouts.episodes import (
    IDLE,
    EpisodeStream,
    first_episode_id,
    start_episodes,
)
from embodyrl.rollouts.fault_watch import guarded
from embodyrl.rollouts.group_draws import GroupDraws
from embodyrl.rollouts.noise_tree import NoiseTree
from embodyrl.rollouts.seeding import init_states
from embodyrl.rollouts.start_sampling import Draws
from embodyrl.types import ActionSample, DenoisingTrace, EnvSpec, Obs, Step

Act = Callable[[Obs, torch.Generator], tuple[Tensor, Tensor]]
"""Observations to actions (N, H, A) in [-1, 1], and the algorithm's choice (N, H, A).

The two are the same, except where an algorithm chooses something else than actions: DSRL chooses
the noise.
"""


class ActorWithValue(Actor, HasValue, Protocol):
    """A policy that acts and has a value head."""


class Rollouts(Protocol):
    """Who plays the training episodes of a run: this process, workers, or a robot elsewhere.

    Attributes:
        spec: of all envs together.
        restarts: how many workers died and were replaced.
    """

    @property
    def spec(self) -> EnvSpec: ...  # noqa: D102

    @property
    def restarts(self) -> int: ...  # noqa: D102

    def collect(
        self,
        algorithm: Any,
        iteration: int,
        *,
        generator: torch.Generator,
        device: torch.device,
        between: Callable[[], None],
        draws: Draws | None = None,
    ) -> Any:
        """What ``algorithm.collect`` gives for an iteration.

        Args:
            algorithm: after the updates before ``iteration``.
            iteration: its number; the initial states depend on it.
            generator: of the policy's noise, and then of the update.
            device: where the batch goes.
            between: called before every chunk, or while waiting; may raise, to give it up.
            draws: how initial states are drawn (``start_sampling``); None for all alike.
        """
        ...

    def restart_episodes(self) -> None:
        """The next collection begins new episodes, as a run that resumes here will."""
        ...

    def close(self) -> None:
        """Frees everything."""
        ...


class Player:
    """Plays a run's training episodes, or a shard of them, in this process; see ``Rollouts``.

    The episodes that begin in an iteration take initial states that depend on (seed, iteration,
    shard) and their odds alone. So a rollout is a function of these and the parameters: a
    resumed run repeats it bit for bit, and no simulator state needs to be saved.
    """

    restarts = 0

    def __init__(
        self, env: VecEnv, seed: int = 0, device: torch.device | str = "cpu", shard: int = 0
    ) -> None:
        self.env = guarded(env)  # faults are counted over all its streams
        self.seed = seed
        self.device = device
        self.shard = shard
        self.begin(0)
        self._stream: EpisodeStream | None = None

    @property
    def spec(self) -> EnvSpec:
        """Of its envs."""
        return self.env.spec

    def begin(self, iteration: int, draws: Draws | None = None) -> None:
        """From now on episodes take the initial states of ``iteration``, as ``draws`` says."""
        self.draws = draws or Draws()
        self.states = init_states(self.env.spec, self.seed, iteration, self.shard, draws)
        self.first_id = first_episode_id(iteration, self.shard)

    def new_episodes(self) -> EpisodeStream:
        """A stream that starts new episodes in all envs."""
        self._stream = start_episodes(self.env, self.states, self.device, self.first_id, self.draws)
        return self._stream

    def ongoing_episodes(self) -> EpisodeStream:
        """The stream as the last collection left it; a new one after ``restart_episodes``."""
        if self._stream is None:
            return self.new_episodes()
        self._stream.states = self.states
        self._stream.draws = self.draws
        return self._stream

    def collect(
        self,
        algorithm: Any,
        iteration: int,
        *,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
        between: Callable[[], None] = lambda: None,
        draws: Draws | None = None,
    ) -> Any:
        """See ``Rollouts``; the batch is on the player's own device."""
        self.begin(iteration, draws)
        return algorithm.collect(self, generator=generator, between=between)

    def restart_episodes(self) -> None:
        """See ``Rollouts``."""
        self._stream = None

    def close(self) -> None:
        """The envs are closed by whoever built them."""


@torch.no_grad()
def collect_rollout(
    stream: EpisodeStream,
    policy: ActorWithValue,
    num_chunks: int,
    *,
    generator: torch.Generator,
    between: Callable[[], None] = lambda: None,
    keep_chunks: bool = False,
) -> RolloutBatch:
    """Steps every env for ``num_chunks`` chunks, starting a new episode wherever one ended.

    Args:
        stream: of fresh episodes (``Player.new_episodes``), with an endless list of states.
        policy: sampled in ``"train"`` mode.
        num_chunks: T.
        generator: source of the policy's noise.
        between: called before every chunk; may raise, to give the rollout up.
        keep_chunks: whether ``RolloutBatch.chunks`` is wanted too.

    Raises:
        UserError: the policy gives no log-probability or no value.
    """
    all_obs: list[Obs] = []
    samples: list[ActionSample] = []
    steps: list[Step] = []
    next_values: list[Tensor] = []
    episodes: list[Episode] = []
    chunks: list[Transitions] = []
    for _ in range(num_chunks):
        between()
        # The policy chooses a chunk for every env.
        sample = policy.sample(stream.obs, generator=generator, mode="train")
        if sample.trace is None or sample.logprob is None or sample.value is None:
            raise UserError(
                f"{type(policy).__name__} gives no trace, log-probability or value, which a "
                "rollout needs."
            )
        obs = stream.obs
        episode = stream.episode_ids()
        all_obs.append(obs)
        samples.append(sample)
        # The envs execute it. The value after the chunk is that before any reset.
        step = stream.step(sample.actions)
        stream.advance(step)
        steps.append(step)
        if keep_chunks:
            after = replace(step, obs=stream.obs).to(stream.device)
            number = episode.to(stream.device)
            chunks.append(_transitions(obs, sample.actions, sample.actions, after, number))
        next_values.append(policy.value(stream.obs))
        episodes += stream.scored()
        stream.fill()
    device = stream.device
    return RolloutBatch(
        obs=Obs.cat(all_obs),
        trace=DenoisingTrace.cat([s.trace for s in samples if s.trace is not None]),
        logprob=torch.cat([s.logprob for s in samples if s.logprob is not None]),
        value=torch.stack([s.value for s in samples if s.value is not None]),
        next_value=torch.stack(next_values),
        reward=torch.stack([s.reward for s in steps]).to(device),
        valid=torch.stack([s.valid for s in steps]).to(device),
        terminated=torch.stack([s.terminated for s in steps]).to(device),
        truncated=torch.stack([s.truncated for s in steps]).to(device),
        episodes=episodes,
        env_steps=sum(int(s.valid.sum()) for s in steps),
        chunks=Transitions.cat(chunks) if chunks else None,
    )


@torch.no_grad()
def collect_transitions(
    stream: EpisodeStream,
    act: Act,
    num_chunks: int,
    *,
    generator: torch.Generator,
    between: Callable[[], None] = lambda: None,
) -> TransitionBatch:
    """Goes on with the episodes of ``stream``: what an off-policy algorithm learns from.

    Off-policy updates are frequent, so their rollouts are far shorter than an episode.

    Args:
        stream: the episodes in progress (``Player.ongoing_episodes``).
        act: gives the actions, and what was chosen.
        num_chunks: T.
        generator: source of the policy's noise.
        between: called before every chunk; may raise, to give the rest up.

    Returns:
        The chunks; where a person took over, ``choice`` is what was executed.
    """
    parts: list[Transitions] = []
    episodes: list[Episode] = []
    for _ in range(num_chunks):
        between()
        obs = stream.obs
        episode = stream.episode_ids()
        actions, choice = act(obs, generator)
        step = stream.step(actions)
        stream.advance(step)
        step = replace(step, obs=stream.obs).to(stream.device)
        parts.append(_transitions(obs, actions, choice, step, episode.to(stream.device)))
        episodes += stream.scored()
        stream.fill()
    return TransitionBatch(Transitions.cat(parts), episodes)


def _transitions(
    obs: Obs, actions: Tensor, choice: Tensor, step: Step, episode: Tensor
) -> Transitions:
    """One chunk of every env, without those that nothing can be learned from."""
    keep = step.valid.any(-1)  # an env that broke executed nothing
    human = None
    if step.human is not None and step.taken is not None:
        human = step.human.any(-1)
        if choice is actions:
            choice = torch.where(human[:, None, None], step.taken.to(choice), choice)
        else:
            # A person's actions are no choice of an algorithm that chooses something else.
            keep &= ~human
    chunks = Transitions(
        obs,
        choice,
        step.reward,
        step.valid,
        step.terminated,
        step.truncated,
        step.obs,
        human,
        episode,
        step.ever_solved,
    )
    return chunks if keep.all() else chunks[keep]


@torch.no_grad()
def collect_episodes(
    env: VecEnv,
    policy: Actor,
    inits: list[int] | GroupDraws,
    *,
    generator: torch.Generator,
    until_success: bool = True,
    device: torch.device | str = "cpu",
    between: Callable[[], None] = lambda: None,
    draws: Draws | None = None,
    tree: NoiseTree | None = None,
) -> EpisodeBatch:
    """Plays every initial state once, as a whole episode; the same number several times is a group.

    Args:
        env: N envs; when one ends it takes the next initial state, and idles when none is left.
        policy: sampled in ``"train"`` mode; needs no critic.
        inits: at least N initial states, or groups that are drawn while others are played. What
            those cut has no result, as what broke.
        generator: source of the policy's noise.
        until_success: an episode is over with its first success, also in an env that would go on.
        device: of the policy.
        between: called before every chunk; may raise, to give the rollout up.
        draws: how ``inits`` were drawn; None for all alike.
        tree: gives the noise in place of ``generator``; None for noise of each chunk's own.

    Raises:
        UserError: fewer initial states than envs, or a policy without a trace.
    """
    n = env.spec.num_envs
    groups = inits if isinstance(inits, GroupDraws) else None
    if isinstance(inits, list) and len(inits) < n:
        raise UserError(
            f"{len(inits)} episodes cannot keep {n} envs busy: lower env.num_envs, or ask for more "
            "episodes."
        )
    states = inits.inits() if isinstance(inits, GroupDraws) else inits
    stream = start_episodes(env, states, device, draws=draws)
    env_steps = 0
    results: dict[int, Episode | None] = {}
    parts: list[tuple[Obs, DenoisingTrace, Tensor, Tensor]] = []
    chunk = torch.zeros(n, dtype=torch.long)  # of each env's episode, the number of the next one
    while stream.running:
        between()
        obs = stream.obs
        noise = generator if tree is None else tree.generators(stream.playing, chunk)
        sample = policy.sample(obs, generator=noise, mode="train")
        if sample.trace is None or sample.logprob is None:
            raise UserError(
                f"{type(policy).__name__} gives no trace or log-probability, which a rollout needs."
            )
        step = stream.step(sample.actions)
        env_steps += int(step.valid.sum())
        # Chunks count where an episode is going on and something was executed.
        acted = ((stream.playing != IDLE) & step.valid.any(-1).cpu()).nonzero().flatten()
        rows = acted.to(device)
        numbers = stream.playing[acted].to(device)
        parts.append((obs[rows], sample.trace[rows], sample.logprob[rows], numbers))
        if until_success:
            step = replace(step, success=step.ever_solved)
        ended = stream.advance(step, step.done | (step.success & until_success))
        results |= {one.number: one.result for one in ended}
        if groups is not None:
            groups.note(ended)
        # An episode that begins counts its chunks from 0.
        chunk += 1
        chunk[stream.fill() if groups is None else groups.refill(stream)] = 0
    all_obs, traces, logprobs, numbers = zip(*parts, strict=True)
    return EpisodeBatch(
        Obs.cat(list(all_obs)),
        DenoisingTrace.cat(list(traces)),
        torch.cat(logprobs),
        torch.cat(numbers),
        [results.get(number) for number in range(stream.started)],
        env_steps,
    )
