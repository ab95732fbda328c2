"""A run's envs in shards, each with a replica of the policy.

What a shard plays is a function of (weights, iteration, shard) alone, like every rollout here. So
it does not matter where it is computed, in which order, or how often: shards in this process and in
Ray's actors give the same bits, and so does a worker that died and plays its shard anew. One shard
gives what the plain training loop gives. Off-policy algorithms go on with the episodes of the
iteration before; there a worker that died begins new ones.

With ``run.max_lag`` L, iteration i is played with the weights of iteration i - L, while the learner
is at work on those before it. That is fixed, not a race, so such a run can be repeated too. Every
checkpoint and evaluation lets the pipeline run dry: resuming from one repeats what an uninterrupted
run did.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import torch
from torch import Tensor

from embodyrl import registry
from embodyrl.algorithms.grpo import GroupBatch
from embodyrl.build import pick_device
from embodyrl.config import Config
from embodyrl.errors import UserError
from embodyrl.rollouts.batches import Episode, EpisodeBatch, RolloutBatch, Transitions
from embodyrl.rollouts.collect import InProcess
from embodyrl.rollouts.seeding import seeded
from embodyrl.training.setup import Envs, build_algorithm
from embodyrl.types import DenoisingTrace, EnvSpec, Obs, TensorData

State = dict[str, Any]
Between = Callable[[], None]
# beside the weights: chunks so far, for algorithms that act otherwise while they warm up
COLLECTED = "collected"


@dataclasses.dataclass
class Piece:
    """What one shard played.

    Attributes:
        batch: a ``RolloutBatch`` or ``GroupBatch``, on the CPU.
        generator: the state of its noise's generator afterwards.
        episodes: that ended meanwhile, where the batch does not hold them (``Transitions``).
        player: the process that played it; empty for this one.
    """

    batch: Any
    generator: Tensor
    episodes: list[Episode] = dataclasses.field(default_factory=list)
    player: str = ""


class Pool(Protocol):
    """Where shards are played.

    Attributes:
        spec: of all envs together.
        restarts: how many workers died and were replaced.
    """

    spec: EnvSpec
    restarts: int

    def publish(self, frozen: State, weights: State) -> Any:
        """Makes weights available; ``frozen`` ones are the same in every call of a run."""
        ...

    def submit(self, shard: int, weights: Any, iteration: int) -> Any:
        """Asks for an iteration of a shard, with weights that were published."""
        ...

    def wait(self, job: Any, between: Between) -> Piece:
        """The result of ``submit``."""
        ...

    def close(self) -> None:
        """Frees everything."""
        ...


def share(config: Config, shard: int) -> Config:
    """The config of one of ``run.workers`` shards.

    Raises:
        UserError: envs or episodes cannot be dealt out evenly.
    """
    count = config.run.workers
    envs = config.env.num_envs
    algorithm = config.algorithm
    if count < 1 or envs % count:
        raise UserError(
            f"run.workers={count} cannot share env.num_envs={envs} evenly. Change one of them."
        )
    each = envs // count
    env = dataclasses.replace(config.env, num_envs=each, seed=config.env.seed + shard * each)
    if episodes := getattr(algorithm, "num_episodes", 0):
        if episodes % (count * algorithm.group_size):
            raise UserError(
                f"algorithm.num_episodes={episodes} cannot be shared by run.workers={count} in "
                f"whole groups of {algorithm.group_size}. Make it a multiple of "
                f"{count * algorithm.group_size}."
            )
        algorithm = dataclasses.replace(algorithm, num_episodes=episodes // count)
    if hasattr(algorithm, "capacity"):
        algorithm = dataclasses.replace(
            algorithm, capacity=1
        )  # the learner alone has a replay buffer
    run = dataclasses.replace(config.run, init_checkpoint="")  # the learner sends weights
    return dataclasses.replace(config, env=env, algorithm=algorithm, run=run)


class Shard:
    """Envs and a replica of the policy."""

    def __init__(self, config: Config, shard: int, device: torch.device) -> None:
        self.config = share(config, shard)
        self.shard = shard
        self.device = device
        self.envs = Envs(self.config)
        self._algorithm: Any = None
        self._player: InProcess | None = None
        self._next = 0

    @property
    def spec(self) -> EnvSpec:
        """Of its envs."""
        return self.envs.train.spec

    @property
    def has_weights(self) -> bool:
        """Whether ``load`` was called."""
        return self._algorithm is not None

    def load(self, weights: State) -> None:
        """Takes weights, at first all of them."""
        fresh = not self.has_weights
        if fresh:
            self._algorithm = build_algorithm(self.config, self.envs, self.device)
        policy = {name: value for name, value in weights.items() if name != COLLECTED}
        self._algorithm.policy.load_state_dict(policy, strict=fresh)
        if COLLECTED in weights:
            self._algorithm.collected = int(weights[COLLECTED])

    def act_for(self, algorithm: Any) -> None:
        """Plays with the policy of ``algorithm`` itself from now on, not a replica, and only this shard's share."""
        self._algorithm = copy.copy(algorithm)
        self._algorithm.config = self.config.algorithm

    def play(self, iteration: int, between: Between = lambda: None) -> Piece:
        """One iteration's rollout; ``between`` is called before every chunk, and may raise to give it up."""
        run = self.config.run
        if self._player is None:
            self._player = InProcess(self.envs.train, run.seed, self.device, self.shard)
        # As the plain loop: episodes begin anew after a checkpoint, so that a run which goes on
        # from it does the same.
        self._player.fresh |= iteration == run.last_pause(iteration) or iteration != self._next
        self._next = iteration + 1
        generator = seeded(run.seed, iteration, self.shard)
        batch = self._player.collect(
            self._algorithm, iteration, generator=generator, device=self.device, between=between
        )
        return Piece(moved(batch, "cpu"), generator.get_state(), self._player.take_episodes())


class LocalPool:
    """Shards in this process, a thread each: while some simulate and draw, the policy acts in another."""

    def __init__(self, config: Config) -> None:
        device = pick_device(config.run.device)
        self._shards = [Shard(config, k, device) for k in range(config.run.workers)]
        self._threads = [
            ThreadPoolExecutor(1) for _ in self._shards
        ]  # each plays its iterations in their order
        self._closed = threading.Event()
        self.spec = dataclasses.replace(self._shards[0].spec, num_envs=config.env.num_envs)
        self.restarts = 0

    def publish(self, frozen: State, weights: State) -> State:
        """See ``Pool``; a copy, because the learner goes on changing its own."""
        return {**frozen, **{name: value.clone() for name, value in weights.items()}}

    def submit(self, shard: int, weights: State, iteration: int) -> Future[Piece]:
        """See ``Pool``."""
        if not self._shards[shard].has_weights:
            self._shards[shard].load(
                weights
            )  # not in its thread: a new policy borrows torch's global generator
        return self._threads[shard].submit(self._play, self._shards[shard], weights, iteration)

    def _play(self, shard: Shard, weights: State, iteration: int) -> Piece:
        shard.load(weights)
        return shard.play(iteration, self._check)

    def _check(self) -> None:
        if self._closed.is_set():
            raise CancelledError

    def wait(self, job: Future[Piece], between: Between) -> Piece:
        """See ``Pool``."""
        between()
        while not job.done():
            wait([job], timeout=0.1)
            between()
        return job.result()

    def close(self) -> None:
        """See ``Pool``."""
        self._closed.set()
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)
        for shard in self._shards:
            shard.envs.close()


class Rollouts:
    """The rollouts of all shards, with weights that are ``run.max_lag`` updates old."""

    def __init__(self, config: Config, pool: Pool) -> None:
        self.config = config
        self.pool = pool
        self.spec = pool.spec
        self._first: int | None = None
        self._jobs: dict[int, list[Any]] = {}
        self._episodes: list[Episode] = []

    def collect(
        self,
        algorithm: Any,
        iteration: int,
        *,
        generator: torch.Generator,
        device: torch.device,
        between: Between,
    ) -> Any:
        """What the algorithm learns from in this iteration; ``generator`` goes on where the first shard's stopped.

        Args:
            algorithm: after the updates before ``iteration``.
            iteration: the next one after that of the last call.
            generator: of the update.
            device: where the result goes.
            between: called while waiting; may raise.
        """
        if self._first is None:
            self._first = iteration
        last = min(iteration + self.config.run.max_lag, self.config.run.iterations - 1)
        if new := [j for j in range(iteration, last + 1) if self._weights_of(j) == iteration]:
            weights = self.pool.publish(*_split(algorithm))
            for j in new:
                self._jobs[j] = [
                    self.pool.submit(k, weights, j) for k in range(self.config.run.workers)
                ]
        pieces = [self.pool.wait(job, between) for job in self._jobs.pop(iteration)]
        generator.set_state(pieces[0].generator)
        self._episodes += [episode for piece in pieces for episode in piece.episodes]
        return moved(merge([piece.batch for piece in pieces]), device)

    def take_episodes(self) -> list[Episode]:
        """The episodes that ended since the last call, where the batches do not hold them."""
        episodes = self._episodes
        self._episodes = []
        return episodes

    @property
    def restarts(self) -> int:
        """How many workers died and were replaced."""
        return self.pool.restarts

    def _weights_of(self, iteration: int) -> int:
        """The iteration before whose update the weights are taken that play ``iteration``."""
        run = self.config.run
        return max(self._first or 0, iteration - run.max_lag, run.last_pause(iteration))

    def close(self) -> None:
        """Frees everything."""
        self.pool.close()


def check(config: Config) -> None:
    """Refuses what cannot be played in shards.

    Raises:
        UserError: an algorithm that learns from demonstrations alone, or one that takes rollouts
            for the current policy's where they are older.
    """
    name = config.algorithm.name
    run = config.run
    source = registry.load("algorithms", name).source
    if source == "demos":
        raise UserError(f"{name} has no rollouts to share among workers. Leave run.workers at 1.")
    if (
        run.max_lag
        and source != "transitions"
        and not getattr(config.algorithm, "behaviour_cap", 0.0)
    ):
        raise UserError(
            f"run.max_lag={run.max_lag} lets {name} learn from rollouts of older weights, which it "
            "would take for the current ones. Set algorithm.behaviour_cap=5 (ppo and grpo have "
            "it), or run.max_lag=0."
        )
    share(config, 0)


def local_rollouts(config: Config) -> Rollouts:
    """Shards in this process."""
    check(config)
    return Rollouts(config, LocalPool(config))


def _split(algorithm: Any) -> tuple[State, State]:
    """What a replica acts with: weights that no update changes, and everything else."""
    frozen = {
        k
        for k, p in algorithm.result.named_parameters(remove_duplicate=False)
        if not p.requires_grad
    }
    state = algorithm.policy.state_dict()
    if algorithm.source == "transitions":
        state[COLLECTED] = torch.tensor(algorithm.collected)
    return {k: v for k, v in state.items() if k in frozen}, {
        k: v for k, v in state.items() if k not in frozen
    }


def moved(value: Any, device: torch.device | str) -> Any:
    """A batch on another device."""
    if isinstance(value, Tensor | TensorData):
        return value.to(device)
    if isinstance(value, RolloutBatch | EpisodeBatch | GroupBatch):
        parts = {f.name: moved(getattr(value, f.name), device) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value


def merge(parts: list[Any]) -> Any:
    """The batch of all shards: envs one shard after the other, or groups."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Transitions):
        return Transitions.cat(parts)
    if isinstance(parts[0], GroupBatch):
        kept = EpisodeBatch.cat([p.kept for p in parts])
        episodes = [e for p in parts for e in p.episodes]
        return GroupBatch(
            kept, episodes, sum(p.env_steps for p in parts), max(p.rounds for p in parts)
        )
    # Rows are in time-major order over all envs: (T, N1 + N2 + ...) flattened.
    numbers = []
    before = 0
    for p in parts:
        numbers.append(torch.arange(p.value.numel()).view(p.value.shape) + before)
        before += p.value.numel()
    rows = torch.cat(numbers, dim=1).flatten()
    tensors = ("value", "next_value", "reward", "valid", "terminated", "truncated")
    return RolloutBatch(
        obs=Obs.cat([p.obs for p in parts])[rows],
        trace=DenoisingTrace.cat([p.trace for p in parts])[rows],
        logprob=torch.cat([p.logprob for p in parts])[rows],
        **{name: torch.cat([getattr(p, name) for p in parts], dim=1) for name in tensors},
        episodes=[e for p in parts for e in p.episodes],
        env_steps=sum(p.env_steps for p in parts),
    )
