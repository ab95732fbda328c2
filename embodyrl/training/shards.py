"""A run's envs in shards, each with a replica of the policy.

What a shard plays is a function of (weights and draws, iteration, shard) alone, like every rollout here. So
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
from embodyrl.algorithm import Algorithm
from embodyrl.config import Config
from embodyrl.devices import pick_device
from embodyrl.errors import UserError
from embodyrl.rollouts.collect import Player
from embodyrl.rollouts.seeding import seeded
from embodyrl.rollouts.start_sampling import Draws
from embodyrl.training.setup import Envs, build_algorithm
from embodyrl.types import EnvSpec

State = dict[str, Any]
Between = Callable[[], None]
ACTING = "acting/"
"""Prefix of what an algorithm needs for acting beside the policy's weights."""
DRAWS = "draws/"
"""Prefix of how initial states are drawn, where all are not alike, among what is published."""


@dataclasses.dataclass
class Piece:
    """What one shard played.

    Attributes:
        batch: what the algorithm's ``collect`` gave, on the CPU.
        generator: the state of its noise's generator afterwards.
        player: the process that played it; empty for this one.
    """

    batch: Any
    generator: Tensor
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


def shard_config(config: Config, shard: int) -> Config:
    """The config of one of ``run.workers`` shards.

    Raises:
        UserError: envs or episodes cannot be dealt out evenly.
    """
    count = config.run.workers
    num_envs = config.env.num_envs
    if count < 1 or num_envs % count:
        raise UserError(
            f"run.workers={count} cannot share env.num_envs={num_envs} evenly. Change one of them."
        )
    each = num_envs // count
    env = dataclasses.replace(config.env, num_envs=each, seed=config.env.seed + shard * each)
    algorithm = registry.load("algorithms", config.algorithm.name)
    settings = algorithm.worker_config(config.algorithm, count)
    run = dataclasses.replace(config.run, init_checkpoint="")  # the learner sends weights
    return dataclasses.replace(config, env=env, algorithm=settings, run=run)


class Shard:
    """Envs and a replica of the policy."""

    def __init__(self, config: Config, shard: int, device: torch.device) -> None:
        self.config = shard_config(config, shard)
        self.shard = shard
        self.device = device
        self.envs = Envs(self.config)
        self._algorithm: Algorithm | None = None
        self._player: Player | None = None
        self._next = 0
        self.draws: Draws | None = None

    @property
    def spec(self) -> EnvSpec:
        """Of its envs."""
        return self.envs.train.spec

    @property
    def has_weights(self) -> bool:
        """Whether ``load`` was called."""
        return self._algorithm is not None

    def load(self, weights: State) -> None:
        """Takes weights, at first all of them; and how initial states are drawn."""
        draws = {k.removeprefix(DRAWS): v for k, v in weights.items() if k.startswith(DRAWS)}
        self.draws = Draws.of_tensors(draws) if draws else None
        weights = {name: value for name, value in weights.items() if not name.startswith(DRAWS)}
        fresh = self._algorithm is None
        if self._algorithm is None:
            self._algorithm = build_algorithm(self.config, self.envs, self.device)
        policy = {name: value for name, value in weights.items() if not name.startswith(ACTING)}
        acting = {name: value for name, value in weights.items() if name.startswith(ACTING)}
        self._algorithm.policy.load_state_dict(policy, strict=fresh)
        self._algorithm.load_acting_state(
            {name.removeprefix(ACTING): value for name, value in acting.items()}
        )

    def act_for(self, algorithm: Algorithm) -> None:
        """Plays this shard's share with the policy of ``algorithm`` itself, not a replica."""
        self._algorithm = copy.copy(algorithm)
        self._algorithm.config = self.config.algorithm

    def play(self, iteration: int, between: Between = lambda: None) -> Piece:
        """One iteration's rollout; ``between`` may raise to give it up."""
        run = self.config.run
        if self._player is None:
            self._player = Player(self.envs.train, run.seed, self.device, self.shard)
        # As in the plain loop, episodes begin anew after a checkpoint, so that a run which goes on
        # from it does the same.
        if iteration == run.last_pause(iteration) or iteration != self._next:
            self._player.restart_episodes()
        self._next = iteration + 1
        generator = seeded(run.seed, iteration, self.shard)
        batch = self._player.collect(
            self._algorithm, iteration, generator=generator, between=between, draws=self.draws
        )
        return Piece(batch.to("cpu"), generator.get_state())


class LocalPool:
    """Shards in this process, a thread each.

    While some simulate and draw, the policy acts in another.
    """

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


class ShardedRollouts:
    """The rollouts of all shards, with weights that are ``run.max_lag`` updates old."""

    def __init__(self, config: Config, pool: Pool) -> None:
        self.config = config
        self.pool = pool
        self.spec = pool.spec
        self._first: int | None = None
        self._jobs: dict[int, list[Any]] = {}

    def collect(
        self,
        algorithm: Algorithm,
        iteration: int,
        *,
        generator: torch.Generator,
        device: torch.device,
        between: Between,
        draws: Draws | None = None,
    ) -> Any:
        """See ``Rollouts``; ``generator`` goes on where the first shard's stopped.

        Iterations must follow one another.
        """
        if self._first is None:
            self._first = iteration
        # Ask for all iterations that are to be played with these weights.
        last = min(iteration + self.config.run.max_lag, self.config.run.iterations - 1)
        if new := [j for j in range(iteration, last + 1) if self._weights_of(j) == iteration]:
            frozen, moving = _split(algorithm)
            if draws is not None:
                moving |= {f"{DRAWS}{name}": value for name, value in draws.tensors().items()}
            weights = self.pool.publish(frozen, moving)
            for j in new:
                self._jobs[j] = [
                    self.pool.submit(k, weights, j) for k in range(self.config.run.workers)
                ]
        # Wait for this one.
        pieces = [self.pool.wait(job, between) for job in self._jobs.pop(iteration)]
        generator.set_state(pieces[0].generator)
        return merge_batches([piece.batch for piece in pieces]).to(device)

    def restart_episodes(self) -> None:
        """See ``Rollouts``; the shards know by themselves when a checkpoint is due."""

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


def check_sharing(config: Config) -> None:
    """Refuses what cannot be played in shards.

    Raises:
        UserError: an algorithm that learns from demonstrations alone, or one that takes rollouts
            for the current policy's where they are older.
    """
    name = config.algorithm.name
    run = config.run
    algorithm = registry.load("algorithms", name)
    if not algorithm.plays:
        raise UserError(f"{name} has no rollouts to share among workers. Leave run.workers at 1.")
    if run.max_lag and not algorithm.tolerates_lag(config.algorithm):
        raise UserError(
            f"run.max_lag={run.max_lag} lets {name} learn from rollouts of older weights, which it "
            "would take for the current ones. Set algorithm.behaviour_cap=5 (ppo and grpo have "
            "it), or run.max_lag=0."
        )
    shard_config(config, 0)


def local_rollouts(config: Config) -> ShardedRollouts:
    """Shards in this process."""
    check_sharing(config)
    return ShardedRollouts(config, LocalPool(config))


def merge_batches(batches: list[Any]) -> Any:
    """The batch of all shards."""
    return batches[0] if len(batches) == 1 else type(batches[0]).merge(batches)


def _split(algorithm: Algorithm) -> tuple[State, State]:
    """What a replica acts with: weights that no update changes, and everything else."""
    parameters = algorithm.result.named_parameters(remove_duplicate=False)
    frozen = {name for name, p in parameters if not p.requires_grad}
    state = algorithm.policy.state_dict()
    state |= {f"{ACTING}{name}": value for name, value in algorithm.acting_state().items()}
    return (
        {k: v for k, v in state.items() if k in frozen},
        {k: v for k, v in state.items() if k not in frozen},
    )
