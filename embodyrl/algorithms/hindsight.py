"""Hindsight: where the robot was when a task was solved is a label for all that it saw before.

It trains the ``Localiser`` of the critics, on own successes and on demonstrations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embodyrl.algorithms.optim import GuardedAdam, Means
from embodyrl.algorithms.side_by_side import gradient_of_sum
from embodyrl.errors import UserError
from embodyrl.policies.localiser import ENDS, ON_THE_WAY, Localiser
from embodyrl.types import Obs

if TYPE_CHECKING:
    from embodyrl.data.demonstrations import Demonstrations
    from embodyrl.rollouts.batches import Transitions
    from embodyrl.rollouts.replay_buffer import ReplayBuffer

LR = 2e-3
"""Of the localiser: it rises to this and falls to nothing in each fit."""
PAINTER_LR = 5e-3
BATCH = 48
PAINTED = 32
PAIRS = 16
"""Pairs of observations that must agree, in each gradient step."""
AGREEMENT = 0.3
"""Weight of: two observations of one episode lead to the same place. Failed ones teach it too."""


class Hindsight:
    """Trains a ``Localiser`` from what a replay buffer holds, and from demonstrations.

    Args:
        localiser: is trained.
        buffer: with ``extra`` ``places`` (J, P), ``solved``, ``over`` and ``episode``.
    """

    def __init__(self, localiser: Localiser, buffer: ReplayBuffer) -> None:
        self.localiser = localiser
        self.buffer = buffer
        self.demos: Demonstrations | None = None
        painters = localiser.painters()
        ids = {id(p) for p in painters}
        rest = [p for p in localiser.parameters() if id(p) not in ids]
        self.painter_optimizer = GuardedAdam(painters, PAINTER_LR, 0.0, "painter")
        self.optimizer = GuardedAdam(rest, LR, 0.0, "localiser")

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
        data, count = self.buffer.data, len(self.buffer)
        solved = (data["solved"][:count] & data["over"][:count]).nonzero().flatten()
        if not len(solved) and not self._demos_are_solved():
            raise UserError(
                f"No episode was solved in the first {len(self.buffer)} chunks and there are no "
                "demonstrations of success, so nothing says what matters in a picture. Start from a "
                "better policy, raise algorithm.warmup_chunks, or set data.path and "
                "algorithm.bc_coef=0.1."
            )
        # Own successes and demonstrations in equal parts, where there are both.
        own = BATCH if self.demos is None else BATCH // 2 if len(solved) else 0
        for step in range(steps):
            self.optimizer.lr = LR * _one_cycle(step, steps)
            # What was seen on the way to a success, and where that led.
            parts = []
            if own:
                pick = self.buffer.draw(own, generator, solved)
                parts.append((self.buffer.rows(pick).obs, data["places"][pick]))
            if self.demos is not None:
                frames = self.demos.draw(BATCH - own, generator)
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
