"""What off-policy algorithms share: short collections of loose chunks, kept in a replay buffer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodyrl.algorithm import Algorithm
from embodyrl.policies.normalize import Normalizer
from embodyrl.rollouts.batches import TransitionBatch
from embodyrl.rollouts.collect import Player, collect_transitions
from embodyrl.types import Obs

if TYPE_CHECKING:
    from embodyrl.data.demonstrations import Demonstrations


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

    def add_demos(self, demos: Demonstrations) -> None:
        """A policy that starts from nothing takes its units from them; a subclass keeps them."""
        take_units(self.policy, demos)

    @classmethod
    def tolerates_lag(cls, config: Any) -> bool:
        """See ``Algorithm``: off-policy, so always."""
        return True

    @classmethod
    def worker_config(cls, config: Any, count: int) -> Any:
        """See ``Algorithm``: the learner alone has a replay buffer."""
        return replace(config, capacity=1)


def take_units(policy: Any, demos: Demonstrations) -> None:
    """Normalises by the demonstrations, where the policy has learned no units yet."""
    units = [part for part in policy.modules() if isinstance(part, Normalizer)]
    if units and not any(part.fitted for part in units):
        device = next(policy.parameters()).device
        policy.fit_inputs(demos.proprio.to(device), demos.actions.to(device))
