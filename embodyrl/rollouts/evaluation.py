"""The one evaluation protocol: the noise-free policy on a fixed list of initial states.

Each state is scored once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from embodyrl.env import VecEnv
from embodyrl.errors import UserError
from embodyrl.policy import Actor
from embodyrl.rollouts.batches import Episode, by_policy
from embodyrl.rollouts.episodes import EndedEpisode, EpisodeStream
from embodyrl.rollouts.fault_watch import guarded
from embodyrl.types import Obs, Step


@dataclass
class Evaluation:
    """Results in the order of the initial states asked for.

    Attributes:
        episodes: one per initial state.
        frames: init -> (steps + 1, h, w, 3) uint8 of the episodes that were filmed, cameras side by
            side.
        faults: episodes whose simulator or robot broke; they were played again from the start.
        instructions: init -> what the policy was told, of the episodes that were filmed.
    """

    episodes: list[Episode]
    frames: dict[int, Tensor]
    faults: int = 0
    instructions: dict[int, str] = field(default_factory=dict)

    @property
    def successes(self) -> int:
        """How many counted episodes were solved."""
        return sum(e.success for e in by_policy(self.episodes))


def evaluate(
    env: VecEnv,
    policy: Actor,
    inits: Sequence[int],
    *,
    seed: int = 0,
    film: Sequence[int] = (),
    device: torch.device | str = "cpu",
    progress: Callable[[int, list[Episode]], None] | None = None,
) -> Evaluation:
    """Scores a policy on each of ``inits`` once.

    Every episode draws its initial noise from its own generator, seeded by (seed, init), so that
    its outcome does not depend on the number of envs or on the other episodes (but for the rounding
    of larger matrix products).

    Args:
        env: N envs, of a split never trained on.
        policy: sampled in ``"eval"`` mode.
        inits: initial states.
        seed: of the noise.
        film: those of ``inits`` that are filmed, at one frame per action; the outcome stays the
            same.
        device: of the policy.
        progress: called with how many episodes are over, and with those of them that may be scored
            by now (``EpisodeStream.scored``); at the end these are all.

    Raises:
        UserError: ``inits`` is empty or names a state twice, or the simulator broke far too often.
    """
    if not inits:
        raise UserError("There is nothing to evaluate: the list of initial states is empty.")
    if twice := [i for i, count in Counter(inits).items() if count > 1]:
        raise UserError(
            f"Initial state {twice[0]} is listed twice; its episode would be the same again and "
            "make the interval look narrower than it is. List every state once, and vary the seed "
            "for more episodes."
        )
    env = guarded(env)
    done: dict[int, Episode] = {}
    frames: dict[int, Tensor] = {}
    instructions: dict[int, str] = {}
    faults = 0
    scored: list[Episode] = []
    # Filmed episodes come first. They are drawn at every action, the others once per chunk.
    filmed = set(film)
    for filming in (True, False):
        waiting = [i for i in inits if (i in filmed) is filming][::-1]
        while waiting:
            one_pass = _Pass(env, policy, waiting, seed, device, filming)
            for _ in one_pass.play():
                if progress is not None:
                    scored = [*scored, *one_pass.stream.scored()]
                    progress(len(done) + len(one_pass.done), scored)
            done |= one_pass.done
            scored = list(done.values())
            frames |= one_pass.frames
            instructions |= one_pass.instructions
            faults += one_pass.faults
    if progress is not None:
        progress(len(done), scored)
    return Evaluation([done[i] for i in inits], frames, faults, instructions)


class _Pass:
    """Works off a list of initial states, from its end, with as many envs as there are.

    A state whose simulation broke is put back; ``fault_watch`` ends that where it never works.
    """

    def __init__(
        self,
        env: VecEnv,
        policy: Actor,
        waiting: list[int],
        seed: int,
        device: torch.device | str,
        filming: bool,
    ) -> None:
        self.policy = policy
        self.waiting = waiting
        self.seed = seed
        self.filming = filming
        self.done: dict[int, Episode] = {}
        self.frames: dict[int, Tensor] = {}
        self.instructions: dict[int, str] = {}
        self.faults = 0
        self.stream = EpisodeStream(env, self, device)
        self.generators = [_generator(seed, 0) for _ in range(env.spec.num_envs)]
        self.reel: list[list[Tensor]] = [[] for _ in range(env.spec.num_envs)]

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        """The next initial state; there may be more again after a fault."""
        if not self.waiting:
            raise StopIteration
        return self.waiting.pop()

    def play(self) -> Iterator[None]:
        """Plays chunk after chunk, until all episodes are over."""
        stream = self.stream
        self._begin(stream.fill())
        while stream.running:
            sample = self.policy.sample(stream.obs, generator=self.generators, mode="eval")
            # A chunk that is filmed is executed one action at a time.
            actions = sample.actions
            for piece in actions.split(1, dim=1) if self.filming else (actions,):
                step = stream.env.step(piece)
                if self.filming:
                    self._film(step)
                for ended in stream.advance(step):
                    self._note(ended)
            yield
            self._begin(stream.fill())

    def _begin(self, started: list[int]) -> None:
        """Gives each episode that began its own noise and, where it is filmed, its first frame."""
        for k in started:
            self.generators[k] = _generator(self.seed, self.stream.init[k])
        if self.filming and started:
            images = _images(self.stream.obs)
            for k in started:
                self.reel[k] = [images[k]]
                self.instructions[self.stream.init[k]] = self.stream.obs.instruction[k]

    def _film(self, step: Step) -> None:
        valid = step.valid[:, 0].tolist()
        for k, image in enumerate(_images(step.obs)):
            if valid[k]:
                self.reel[k].append(image)

    def _note(self, ended: EndedEpisode) -> None:
        if ended.result is None:
            self.faults += 1
            self.waiting.append(ended.init)
            return
        self.done[ended.init] = ended.result
        if self.filming:
            self.frames[ended.init] = torch.stack(self.reel[ended.env])


def _images(obs: Obs) -> list[Tensor]:
    """Per env one picture with all cameras side by side."""
    if not obs.images:
        return [torch.zeros(8, 8, 3, dtype=torch.uint8)] * len(obs)
    return list(torch.cat([image.cpu() for image in obs.images.values()], dim=2))


def _generator(seed: int, init: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + init * 7_919 + 1) % 2**63)
