"""What off-policy algorithms share: short collections of loose chunks, kept in a replay buffer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embodyrl.algorithm import Algorithm
from embodyrl.rollouts.batches import TransitionBatch
from embodyrl.rollouts.collect import Player, collect_transitions
from embodyrl.types import Obs


class OffPolicy(Algorithm):
    """Base of the algorithms with a replay buffer; the config has ``num_chunks`` and ``capacity``.

    A subclass implements ``act`` and ``update``.
    """

    Batch = TransitionBatch
    continues_episodes = True

    @abstractmethod
    def act(self, obs: Obs, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See ``rollouts.collect.Act``."""

    def collect(
        self,
        player: Player,
        *,
        generator: torch.Generator,
        between: Callable[[], None] = lambda: None,
    ) -> TransitionBatch:
        """``num_chunks`` further chunks of the episodes in progress."""
        return collect_transitions(
            player.ongoing_episodes(),
            self.act,
            self.config.num_chunks,
            generator=generator,
            between=between,
        )

    @classmethod
    def tolerates_lag(cls, config: Any) -> bool:
        """See ``Algorithm``: off-policy, so always."""
        return True

    @classmethod
    def worker_config(cls, config: Any, count: int) -> Any:
        """See ``Algorithm``: the learner alone has a replay buffer."""
        return replace(config, capacity=1)
