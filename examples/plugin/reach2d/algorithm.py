"""``Reinforce``: each episode's return, minus the mean, weighs its chunks; an algorithm in one file.

Williams 1992, "Simple statistical gradient-following algorithms".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from embodyrl.algorithm import Algorithm, SharesGradients
from embodyrl.algorithms.grpo import share_episodes
from embodyrl.algorithms.optim import GuardedAdam, Microbatches
from embodyrl.policy import PathPolicy, ScoresPaths
from embodyrl.ranges import Count, Positive
from embodyrl.rollouts.batches import GroupBatch
from embodyrl.rollouts.collect import Player, collect_episodes


@dataclass(frozen=True)
class ReinforceConfig:
    """Settings of ``Reinforce``.

    Attributes:
        name: registry name.
        num_episodes: per iteration.
        group_size: episodes that a worker cannot split; always 1.
        lr: of Adam.
    """

    name: str = "reinforce"
    num_episodes: Count = 64
    group_size: int = 1
    lr: Positive = 1e-2


class Reinforce(Algorithm):
    """See the module's docstring."""

    Config = ReinforceConfig
    needs = (ScoresPaths,)
    Batch = GroupBatch
    whole_episodes = True

    def __init__(self, config: ReinforceConfig, policy: PathPolicy) -> None:
        super().__init__(config, policy)
        self.optimizer = GuardedAdam(policy.actor_parameters(), config.lr, 1.0, "policy")
        self.pieces = Microbatches(0, self.optimizer.parameters)

    def collect(
        self,
        player: Player,
        *,
        generator: torch.Generator,
        between: Callable[[], None] = lambda: None,
    ) -> GroupBatch:
        """``num_episodes`` whole episodes from new initial states."""
        inits = list(islice(player.states, self.config.num_episodes))
        batch = collect_episodes(
            player.env,
            self.policy,
            inits,
            generator=generator,
            device=player.device,
            between=between,
        )
        return GroupBatch(batch, [e for e in batch.episodes if e], batch.env_steps, rounds=1)

    def update(
        self, batch: GroupBatch, *, progress: float, generator: torch.Generator
    ) -> dict[str, float]:
        """One gradient step on all chunks."""
        kept = batch.kept
        returns = torch.tensor([e.reward if e else 0.0 for e in kept.episodes])
        advantage = ((returns - returns.mean()) / returns.std().clamp_min(1e-6))[kept.episode]
        total = len(advantage)

        def loss_of(rows: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            logprob = self.policy.evaluate(kept.obs[rows], kept.trace[rows]).logprob.sum(1)
            return -(advantage[rows] * logprob).sum() / total, {}

        loss, _ = self.pieces.backward(torch.arange(total), loss_of)
        return {"loss": float(loss), "grad_norm": self.optimizer.step(loss)}

    def state_dict(self) -> dict[str, Any]:
        """Of the optimiser."""
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self.optimizer.load_state_dict(state["optimizer"])

    # What workers and torchrun need beyond that.

    @classmethod
    def worker_config(cls, config: ReinforceConfig, count: int) -> ReinforceConfig:
        """Each worker plays its share of the episodes."""
        return share_episodes(config, count)

    def shared_gradients(self) -> list[SharesGradients]:
        """The gradient is computed in pieces, so processes can share it."""
        return [self.pieces]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimiser, whose state is sharded with the weights."""
        return [self.optimizer.adam]
