"""The arms of a learner: which are connected, what each has played, and what is still to evaluate.

Every arm has one env, so one column of the run: its own episodes, whose numbers no other arm has,
its own initial states and its own noise. Chunks of different arms meet only in a batch of loose
transitions, where each names its episode.

Nothing here is locked; the learner does that.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace

import torch

from embodyrl.errors import UserError
from embodyrl.real_robot.arm_names import check_name
from embodyrl.rollouts.batches import Episode, TransitionBatch, by_policy
from embodyrl.rollouts.episodes import first_episode_id
from embodyrl.rollouts.evaluation import Evaluation

MAX_ARMS = 16
"""Arms of a learner at a time."""
MAX_SHARDS = 2**14
"""Connections of a run that have initial states of their own; episode numbers have room for them."""


@dataclass
class ConnectedArm:
    """An arm that is connected.

    Attributes:
        name: no other connected arm has it.
        place: address of its actor.
        shard: number of its connection; its initial states and noise depend on it.
        plays: whether its env is built and fits.
        begun: episodes that it began.
        episode: the number of the running one in the run; None between two episodes.
        theirs: the number that its actor gives that episode.
    """

    name: str
    place: str
    shard: int
    plays: bool = False
    begun: int = 0
    episode: int | None = None
    theirs: int | None = None

    def __str__(self) -> str:
        """For messages."""
        return f"arm {self.name} at {self.place}"


@dataclass
class _Tally:
    """What one arm, by its name, added to the next batch."""

    chunks: int = 0
    human: int = 0
    episodes: list[Episode] = field(default_factory=list)


class Arms:
    """All arms of a run, and the chunks that they played since the last ``take``.

    Attributes:
        connected: by name.
        returns: how often an arm came back.
        iteration: of the run; episode numbers begin with it.
    """

    def __init__(self) -> None:
        self.connected: dict[str, ConnectedArm] = {}
        self.returns = 0
        self.iteration = 0
        self._known: set[str] = set()
        self._connections = 0
        self._episodes = 0
        self._played: list[TransitionBatch] = []
        self._tallies: dict[str, _Tally] = {}

    def join(self, name: str, place: str) -> ConnectedArm:
        """Lets an arm in.

        Raises:
            UserError: its name cannot be, or another arm has it, or there are too many.
        """
        check_name(name)
        if (other := self.connected.get(name)) is not None:
            raise UserError(
                f"there is an {other} already. Give each arm a name of its own: ws://HOST:PORT/NAME"
            )
        if len(self.connected) >= MAX_ARMS:
            raise UserError(f"there are {MAX_ARMS} arms already")
        arm = ConnectedArm(name, place, self._connections % MAX_SHARDS)
        self.connected[name] = arm
        self._connections += 1
        return arm

    def ready(self, arm: ConnectedArm) -> None:
        """Notes that an arm's env fits, so that it takes part."""
        arm.plays = True
        self.returns += arm.name in self._known
        self._known.add(arm.name)

    def leave(self, arm: ConnectedArm) -> int:
        """Forgets an arm that is gone, and what was not yet learned of its unfinished episode.

        Returns:
            How many chunks that were.
        """
        del self.connected[arm.name]
        if arm.episode is None:
            return 0
        kept: list[TransitionBatch] = []
        dropped = 0
        for batch in self._played:
            assert batch.chunks.episode is not None
            own = batch.chunks.episode == arm.episode
            dropped += int(own.sum())
            # Results in the same message are of episodes that ended before.
            kept.append(replace(batch, chunks=batch.chunks[~own]) if own.any() else batch)
        self._played = [batch for batch in kept if len(batch.chunks) or batch.episodes]
        if arm.name in self._tallies:
            self._tallies[arm.name].chunks -= dropped
        return dropped

    def hear(self, arm: ConnectedArm, batch: TransitionBatch) -> None:
        """Takes what an arm played: one chunk of its env, or none if that broke.

        Args:
            arm: connected.
            batch: checked (``check_actor.check_played``).
        """
        chunks = batch.chunks
        if len(chunks):
            # The numbers of other machines only say where an episode ends.
            theirs = None if chunks.episode is None else int(chunks.episode[0])
            if arm.episode is None or theirs != arm.theirs:
                arm.episode = first_episode_id(self.iteration, 0) + self._episodes
                arm.theirs = theirs
                arm.begun += 1
                self._episodes += 1
            number = torch.full((len(chunks),), arm.episode, dtype=torch.int64)
            # All parts of a batch have the same fields.
            success = torch.zeros(len(chunks), dtype=torch.bool)
            success = success if chunks.success is None else chunks.success
            chunks = replace(chunks, episode=number, success=success)
            if bool((chunks.terminated | chunks.truncated).any()):
                arm.episode = None
        # Kept for the next batch, and counted for this arm.
        if len(chunks) or batch.episodes:
            self._played.append(replace(batch, chunks=chunks))
            tally = self._tallies.setdefault(arm.name, _Tally())
            tally.chunks += len(chunks)
            tally.human += 0 if chunks.human is None else int(chunks.human.sum())
            tally.episodes += batch.episodes

    def cut(self, arm: ConnectedArm) -> None:
        """The running episode of an arm goes no further: an evaluation takes its place."""
        arm.episode = None

    @property
    def playing(self) -> int:
        """How many arms take part."""
        return sum(arm.plays for arm in self.connected.values())

    @property
    def waiting_chunks(self) -> int:
        """Chunks since the last ``take``."""
        return sum(len(batch.chunks) for batch in self._played)

    def take(self) -> tuple[TransitionBatch, dict[str, float]]:
        """All that was played since the last call, and the metrics of each arm.

        Returns:
            The batch, and ``arms`` (how many take part), ``arm_chunks/NAME``,
            ``arm_human_chunks/NAME``, ``arm_episodes/NAME`` and ``arm_success/NAME``, the last two
            of episodes without a person's actions.
        """
        # Every message has the same fields, so the parts fit together.
        batch = TransitionBatch.merge(self._played)
        figures: dict[str, float] = {"arms": float(self.playing)}
        # A person's episodes say nothing about the policy.
        for name, tally in self._tallies.items():
            own = [episode.success for episode in by_policy(tally.episodes)]
            figures[f"arm_chunks/{name}"] = tally.chunks
            figures[f"arm_human_chunks/{name}"] = tally.human
            figures[f"arm_episodes/{name}"] = len(own)
            if own:
                figures[f"arm_success/{name}"] = sum(own) / len(own)
        self._played = []
        self._tallies = {}
        return batch, figures


class SharedEvaluation:
    """An evaluation that the arms share: each takes the next initial state when it is free.

    The result does not depend on who plays what (``rollouts.evaluation``): every episode draws its
    noise from the seed and its initial state.

    Args:
        inits: initial states, each once.
        seed: of the noise.
    """

    def __init__(self, inits: list[int], seed: int) -> None:
        self.seed = seed
        self._inits = inits
        self._waiting = deque(inits)
        self._done: dict[int, Episode] = {}
        self._faults = 0
        self.played_by: Counter[str] = Counter()

    @property
    def waits(self) -> bool:
        """Whether an initial state waits for an arm."""
        return bool(self._waiting)

    def take(self) -> int:
        """The next initial state."""
        return self._waiting.popleft()

    def give_back(self, init: int) -> None:
        """The arm that took an initial state is gone, so another one plays it."""
        self._waiting.appendleft(init)

    def note(self, arm: ConnectedArm, part: Evaluation) -> None:
        """Notes what an arm played."""
        for episode in part.episodes:
            self._done[episode.init] = episode
            self.played_by[arm.name] += 1
        self._faults += part.faults

    @property
    def result(self) -> Evaluation | None:
        """All episodes; None while some are not over."""
        if len(self._done) < len(self._inits):
            return None
        return Evaluation([self._done[init] for init in self._inits], {}, self._faults)
