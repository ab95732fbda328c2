"""Hindsight: where the robot was when a task was solved is a label for all that it saw before.

It trains what critics see in pictures (``policies.found_features``), on own successes and on
demonstrations. PA-RL's chooser sees that, and every critic with ``policy.critic=found``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodyrl.algorithms.episode_buffer import EpisodeBuffer
from embodyrl.algorithms.optim import GuardedAdam, Means
from embodyrl.algorithms.side_by_side import gradient_of_sum
from embodyrl.errors import UserError, refuse_unread
from embodyrl.policies.found_features import MEDIAN_OF, FoundFeatures
from embodyrl.policies.localiser import (
    AGREEMENT,
    ENDS,
    LABELLED,
    LOCALISER_LR,
    ON_THE_WAY,
    PAINTED,
    PAINTER_LR,
    PAIRS,
)
from embodyrl.policies.shared_features import SharedFeatures
from embodyrl.ranges import Count, CountOrZero
from embodyrl.types import Obs

if TYPE_CHECKING:
    from embodyrl.data.demonstrations import Demonstrations
    from embodyrl.rollouts.batches import Transitions


@dataclass(frozen=True)
class FoundConfig:
    """Settings of what hindsight finds, for the algorithms whose critics may see it.

    Attributes:
        hindsight_steps: with ``policy.critic=found``: gradient steps in which the critics first
            learn where things are in pictures.
        refresh_chunks: after so many chunks they learn it further, with a third of the steps; 0
            means never.
    """

    hindsight_steps: Count = 450
    refresh_chunks: CountOrZero = 5_000


def check_found(config: Any, policy: Any, more: tuple[str, ...] = ()) -> FoundFeatures | None:
    """What critics see beside the policy, where that is ``found``; None otherwise.

    Args:
        config: of the algorithm.
        policy: that it trains.
        more: further settings that are read for pictures alone.

    Raises:
        UserError: a changed setting that nothing would read.
    """
    found = getattr(policy, "found", None)
    names = [f.name for f in fields(FoundConfig)] + list(more)
    if found is None:
        why = "policy.critic is not found, so the critics see nothing that hindsight has found"
        refuse_unread(config, "algorithm", names, why)
    elif found.localiser is None:
        refuse_unread(config, "algorithm", names, f"{policy.spec.name} has no pictures")
    return found


class Hindsight:
    """Trains ``FoundFeatures`` from what a buffer holds, and from demonstrations.

    Args:
        features: are trained; of ``SharedFeatures`` only the units are found.
        buffer: of episodes.
        steps: gradient steps of the first lesson; a later one has a third.
        refresh_chunks: chunks from one lesson to the next; 0 means no further ones.

    Attributes:
        demos: what was shown, if anything.
        begun: whether there was a lesson.
        chunks: since the last lesson.
        optimizers: of the painter and the localiser; empty where there are no pictures.
    """

    def __init__(
        self,
        features: FoundFeatures | SharedFeatures,
        buffer: EpisodeBuffer,
        steps: int,
        refresh_chunks: int,
    ) -> None:
        self.features = features
        self.buffer = buffer
        self.steps = steps
        self.refresh_chunks = refresh_chunks
        self.demos: Demonstrations | None = None
        self.begun = False
        self.chunks = 0
        self.optimizers: list[GuardedAdam] = []
        if features.localiser is not None:
            self.localiser = features.localiser
            painters = self.localiser.painters()
            ids = {id(p) for p in painters}
            rest = [p for p in self.localiser.parameters() if id(p) not in ids]
            self.painter_optimizer = GuardedAdam(painters, PAINTER_LR, 0.0, "painter")
            self.optimizer = GuardedAdam(rest, LOCALISER_LR, 0.0, "localiser")
            self.optimizers = [self.painter_optimizer, self.optimizer]

    @property
    def looks(self) -> bool:
        """Whether there are pictures to look at."""
        return bool(self.optimizers)

    def begin(self, generator: torch.Generator, stats: Means) -> None:
        """The first lesson; the buffer's features are those after it.

        Features that were taught in an earlier run keep their units, and learn further.
        """
        # What is usual in proprioception and pictures.
        if not self.features.fitted:
            rows = self.buffer.draw(MEDIAN_OF, generator)
            self.features.fit_inputs(self.buffer.rows(rows).obs)
            if self.looks:
                self.fit_painter(self.steps, generator, stats)
        if self.looks:
            self.fit(self.steps, generator, stats)
        self.buffer.see_all()
        self.begun = True

    def played(self, chunks: int, generator: torch.Generator, stats: Means) -> bool:
        """Counts chunks; where a lesson is due after them, it is given.

        Returns:
            Whether there was one: the buffer's features are new then.
        """
        self.chunks += chunks
        if not self.refresh_chunks or self.chunks < self.refresh_chunks:
            return False
        self.chunks = 0
        if not self.looks:
            return False
        self.fit(max(1, self.steps // 3), generator, stats)
        self.buffer.see_all()
        return True

    def fit_painter(self, steps: int, generator: torch.Generator, stats: Means) -> None:
        """Learns what proprioception explains of a picture; it stays as it is from then on."""
        # All observations teach it, of failed episodes too.
        for _ in range(steps):
            obs = self.buffer.rows(self.buffer.draw(PAINTED, generator)).obs
            halves = [partial(self._half_painting_loss, obs[i::2]) for i in range(2)]
            losses = _step(self.painter_optimizer, halves, self.buffer.device)
            stats.add(painting_loss=sum(losses))

    def fit(self, steps: int, generator: torch.Generator, stats: Means) -> None:
        """Learns where solved episodes led.

        Raises:
            UserError: no episode was solved, neither an own one nor one of the demonstrations.
        """
        solved = self.buffer.solved_ones()
        if not len(solved) and not self._demos_are_solved():
            raise UserError(
                f"No episode was solved in the first {len(self.buffer)} chunks and there are no "
                "demonstrations of success, so nothing says what matters in a picture. Give "
                "demonstrations (data.path=FOLDER), start from a better policy, or play more first "
                "(algorithm.warmup_chunks or algorithm.num_chunks)."
            )
        # Own successes and demonstrations in equal parts, where there are both.
        own = LABELLED if self.demos is None else LABELLED // 2 if len(solved) else 0
        for step in range(steps):
            self.optimizer.lr = LOCALISER_LR * _one_cycle(step, steps)
            # What was seen on the way to a success, and where that led.
            parts = []
            if own:
                pick = self.buffer.draw(own, generator, solved)
                parts.append((self.buffer.rows(pick).obs, self.buffer.data["places"][pick]))
            if self.demos is not None:
                frames = self.demos.draw(LABELLED - own, generator)
                places, solved_ones = self.demos.later_proprio(frames, ENDS, ON_THE_WAY)
                obs, _, _ = self.demos.batch(frames[solved_ones])
                parts.append((obs.to(self.buffer.device), places[solved_ones]))
            obs = Obs.cat([o for o, _ in parts])
            places = torch.cat([p.to(self.buffer.device) for _, p in parts])
            # Where it led must be told, and where it ends may not move from chunk to chunk.
            pairs = self.buffer.rows(self.buffer.draw(PAIRS, generator))
            losses = [
                partial(self.localiser.hindsight_loss, obs, places),
                partial(self._disagreement, pairs),
            ]
            loss, _ = _step(self.optimizer, losses, self.buffer.device)
            stats.add(hindsight_loss=loss)

    def state_dict(self) -> dict[str, Any]:
        """Optimisers and counters; the weights are the policy's."""
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "begun": self.begun,
            "chunks": self.chunks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.begun = bool(state["begun"])
        self.chunks = int(state["chunks"])

    def _demos_are_solved(self) -> bool:
        """Whether any demonstration is."""
        if self.demos is None:
            return False
        return bool(self.demos.later_proprio(torch.arange(len(self.demos)), 1)[1].any())

    def _half_painting_loss(self, obs: Obs) -> Tensor:
        return 0.5 * self.localiser.painting_loss(obs)

    def _disagreement(self, chunks: Transitions) -> Tensor:
        """How far apart two observations of one episode, a chunk apart, say that it will end."""
        return AGREEMENT * self.localiser.difference(chunks.obs, chunks.next_obs)


def _one_cycle(step: int, steps: int) -> float:
    """Share of the learning rate: it rises in the first part, stays, and falls in the last."""
    rising, falling = 0.15, 0.6
    return min(1.0, (step + 1) / (rising * steps), (steps - step) / (falling * steps))


def _step(
    optimizer: GuardedAdam, losses: list[Callable[[], Tensor]], device: torch.device
) -> list[Tensor]:
    """One gradient step on the sum of losses, which are returned."""
    found = gradient_of_sum(losses, optimizer.parameters, device)
    optimizer.step(torch.stack(found).sum())
    return found
