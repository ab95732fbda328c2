"""``ChoiceActor``: the policy of PA-RL proposes chunks, and imitates those that its critics choose.

    propose   N chunks by the average of the weights, noise-free, from N draws of the initial noise
    choose    the one that the critics' mean values most
    imitate   choices at states of the replay buffer, own successes, demonstrations

Nothing is differentiated through Q. Proposals and gradients are computed in halves side by side.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodyrl.algorithms.episode_buffer import EpisodeBuffer
from embodyrl.algorithms.imitation import imitation_loss
from embodyrl.algorithms.optim import GuardedAdam, Means
from embodyrl.algorithms.side_by_side import fork, gradient_of_sum, side_by_side
from embodyrl.algorithms.weight_average import WeightAverage
from embodyrl.errors import UserError
from embodyrl.policies.augment import augmented
from embodyrl.policy import Imitates, has_ability, imitation_noise
from embodyrl.types import Obs

if TYPE_CHECKING:
    from embodyrl.data.demonstrations import Demonstrations

SAME = 1e-5
"""Chunks whose actions differ by no more are the same."""


class ChoiceActor:
    """Chooses by a policy's chooser, and trains the policy to propose what was chosen.

    Args:
        config: of PA-RL, online or offline.
        policy: with a chooser; holds the average of its weights.
        buffer: whose states are visited.

    Attributes:
        demos: imitated too, where there are some.
        steps: gradient steps so far.
    """

    def __init__(self, config: Any, policy: Any, buffer: EpisodeBuffer) -> None:
        self.config = config
        self.policy = policy
        self.chooser = policy.chooser
        self.buffer = buffer
        self.device = buffer.device
        self.optimizer = GuardedAdam(
            policy.actor_parameters(), config.lr, config.max_grad_norm, "actor"
        )
        self.average = WeightAverage(self.optimizer.parameters, config.ema)
        self.demos: Demonstrations | None = None
        self.steps = 0

    def choose(
        self, obs: Obs, features: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """The best of N proposals (B, H, A), and by how much (B,) it beats their mean."""

        def half(i: int, own: torch.Generator) -> tuple[Tensor, Tensor]:
            seen = features[i::2]
            proposals = self.policy.propose(obs[i::2], self.policy.config.proposals, own)
            if torch.allclose(proposals[:, 0], proposals[:, 1], atol=SAME):
                raise UserError(
                    "The policy proposes the same chunk each time, so there is nothing to choose "
                    "from. PA-RL needs a policy whose samples differ, such as a flow "
                    "(policy.velocity other than gaussian)."
                )
            best = self.chooser.best_of(seen, proposals)
            value = self.chooser.values_of(seen, best[:, None])[:, 0]
            return best, value - self.chooser.values_of(seen, proposals).mean(1)

        halves = [partial(half, i, fork(generator)) for i in range(min(2, len(obs)))]
        chosen = torch.zeros(len(obs), *self.buffer.data["choice"].shape[1:], device=self.device)
        gain = torch.zeros(len(obs), device=self.device)
        for i, found in enumerate(side_by_side(halves, self.device)):
            chosen[i::2], gain[i::2] = found
        return chosen, gain

    def step(self, generator: torch.Generator, stats: Means) -> None:
        """One gradient step towards the best proposals at states of the buffer, and what is shown."""
        c = self.config
        data = self.buffer.data
        # States before and after chunks, so that first states are among them.
        rows = self.buffer.draw(c.actor_batch_size, generator)
        after = torch.rand(len(rows), generator=generator) < 0.5
        after = after.to(self.device) & ~data["terminated"][rows]
        before, after = rows[~after], rows[after]
        obs = Obs.cat([self.buffer.rows(before).obs, self.buffer.rows(after).next_obs])
        features = torch.cat([data["features"][before], data["next_features"][after]])
        # The best of N proposals. What is chosen after a chunk is kept for the critics.
        best, gain = self.choose(obs, features, generator)
        data["next_choice"][after] = best[len(before) :]
        # It is imitated beside own successes and demonstrations.
        whole = torch.ones(best.shape[:2], dtype=torch.bool, device=self.device)
        self._imitate([(obs, best, whole), *self._shown(generator)], generator, stats)
        stats.add(choice_gain=gain.mean())

    def imitate(self, generator: torch.Generator, stats: Means) -> None:
        """One gradient step towards own successes and demonstrations, without a choice."""
        if parts := self._shown(generator):
            self._imitate(parts, generator, stats)

    def _imitate(
        self,
        parts: list[tuple[Obs, Tensor, Tensor]],
        generator: torch.Generator,
        stats: Means,
    ) -> None:
        """A gradient step of observations, chunks (B, H, A) and masks (B, H)."""
        # Half of each at a time.
        count = min(2, len(parts[0][0]))

        def half(i: int, own: torch.Generator) -> Tensor:
            mine = [(o[i::count], a[i::count], m[i::count]) for o, a, m in parts]
            return self._imitation(mine, own) / count

        halves = [partial(half, i, fork(generator)) for i in range(count)]
        optimizer = self.optimizer
        with self.average.trained():
            loss = torch.stack(gradient_of_sum(halves, optimizer.parameters, self.device)).sum()
            norm = optimizer.step(loss)
        self.steps += 1
        stats.add(actor_loss=loss, actor_grad_norm=norm)

    def _shown(self, generator: torch.Generator) -> list[tuple[Obs, Tensor, Tensor]]:
        """Observations, chunks (B, H, A) and masks (B, H) of own successes, and of demonstrations."""
        c = self.config
        parts = []
        solved = self.buffer.data["solved"][: len(self.buffer)].nonzero().flatten()
        if len(solved) and (share := round(c.success_coef * c.actor_batch_size)):
            own = self.buffer.rows(self.buffer.draw(share, generator, solved))
            parts.append((own.obs, own.choice, own.valid))
        if self.demos is not None:
            share = max(1, round(c.bc_coef * c.actor_batch_size))
            obs, actions, mask = self.demos.batch(self.demos.draw(share, generator))
            d = self.device
            parts.append((obs.to(d), actions.to(d), mask.to(d)))
        return parts

    def _imitation(
        self, parts: list[tuple[Obs, Tensor, Tensor]], generator: torch.Generator
    ) -> Tensor:
        """The imitation loss of observations, chunks (B, H, A) and masks (B, H)."""
        obs = Obs.cat([o for o, _, _ in parts])
        c = self.config
        obs = augmented(obs, generator, shift=c.shift, jitter=c.jitter)
        actions, mask = torch.cat([a for _, a, _ in parts]), torch.cat([m for _, _, m in parts])
        if has_ability(self.policy, Imitates):
            noise = imitation_noise(self.policy, actions, generator)
            return self.policy.imitation_loss(obs, actions, mask, *noise)
        return imitation_loss(self.policy, obs, actions, mask, generator)
