"""RLPD: SAC-Flow whose batches are half demonstrations (arXiv:2302.02948).

Demonstrations are data like any other. What makes that work is symmetric sampling
(``demo_fraction``), LayerNorm in the critics, which bounds the value of actions that nobody tried,
a large ensemble, and a high update-to-data ratio. A human's corrections on a robot are
demonstrations too (HIL-SERL, arXiv:2410.21845). The paper's policies start from nothing and imitate
nobody; ours is worth keeping: its loss holds it near demonstrations and corrections (``bc_coef``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor

from embodyrl.algorithms.episode_buffer import EpisodeBuffer
from embodyrl.algorithms.hindsight import Hindsight
from embodyrl.algorithms.imitation import imitation_loss
from embodyrl.algorithms.optim import Means
from embodyrl.algorithms.sac_flow import SACFlow, SACFlowConfig
from embodyrl.errors import UserError
from embodyrl.policy import FlowCriticPolicy
from embodyrl.ranges import CountOrZero, Range
from embodyrl.rollouts.batches import TransitionBatch, Transitions
from embodyrl.rollouts.replay_buffer import DEMO, INTERVENTION, ReplayBuffer

if TYPE_CHECKING:
    from embodyrl.data.demonstrations import Demonstrations


@dataclass(frozen=True)
class RLPDConfig(SACFlowConfig):
    """Settings of RLPD: those of ``SACFlowConfig`` with other defaults, and two more.

    Attributes:
        demo_fraction: share of every batch that is drawn from demonstrations and interventions.
        intervention_capacity: chunks of human corrections that there is room for beside the
            demonstrations.
    """

    name: str = "rlpd"
    warmup_chunks: int = 1_000
    random_warmup: bool = False
    critic_warmup: int = 1_000
    utd: float = 4.0
    policy_delay: int = 4
    critic_lr: float = 3e-4
    num_critics: int = 10
    shared_critic: bool = True
    critic_norm: str = "layer"
    bc_coef: float = 1.0
    demo_fraction: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.5
    intervention_capacity: CountOrZero = 10_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < round(self.demo_fraction * self.batch_size) < self.batch_size:
            raise UserError(
                f"algorithm.demo_fraction is {self.demo_fraction}; a batch must hold some of both "
                "kinds. Without demonstrations use algorithm.name=sac_flow, and without own "
                "experience algorithm.name=sft."
            )


class RLPD(SACFlow):
    """See the module's docstring."""

    Config = RLPDConfig

    def __init__(self, config: RLPDConfig, policy: FlowCriticPolicy) -> None:
        super().__init__(config, policy)
        if self.privileged:
            raise UserError(
                "RLPD's critics learn from demonstrations, which have no privileged state: leave "
                "algorithm.shared_critic at true, or set it to false and policy.critic=found."
            )
        self.prior: ReplayBuffer | None = None
        self.intervention_weight = 1.0

    @property
    def wants_demos(self) -> bool:
        """Always."""
        return True

    def add_demos(self, demos: Demonstrations) -> None:
        """Fills the second buffer with all chunks of the demonstrations."""
        super().add_demos(demos)
        self.intervention_weight = demos.intervention_weight
        room = len(demos) + self.config.intervention_capacity
        self.prior = self._make_buffer(room)
        for chunks in demos.transitions():
            self._store(self.prior, chunks, DEMO)

    def add_interventions(self, chunks: Transitions) -> None:
        """A human's corrections: they count as demonstrations and as online experience."""
        self._add_corrections(chunks)
        self._store(self.buffer, chunks, INTERVENTION)

    def update(
        self, batch: TransitionBatch, *, progress: float, generator: torch.Generator
    ) -> dict[str, float]:
        """As SAC-Flow's; chunks in which a person took over count as demonstrations too."""
        human = batch.chunks.human
        if human is None:
            return super().update(batch, progress=progress, generator=generator)
        if human.any():
            self._add_corrections(batch.chunks[human])
        row = super().update(batch, progress=progress, generator=generator)
        return row | {"human_chunks": float(human.sum())}

    def _add_corrections(self, chunks: Transitions) -> None:
        """Corrections are drawn as often as those that the data set holds."""
        weight = torch.full((len(chunks),), self.intervention_weight)
        # Weighed as a data set is: without the episodes that they were part of.
        chunks = replace(chunks, weight=weight, episode=None, success=None)
        self._store(self._prior, chunks, INTERVENTION)

    def _look(
        self, hindsight: Hindsight, chunks: int, generator: torch.Generator, stats: Means
    ) -> bool:
        """As SAC-Flow's; what was shown is seen anew too."""
        taught = super()._look(hindsight, chunks, generator, stats)
        if taught and isinstance(self._prior, EpisodeBuffer):
            self._prior.see_all()
        return taught

    @property
    def _prior(self) -> ReplayBuffer:
        if self.prior is None:
            raise UserError(
                "RLPD has been given no demonstrations yet: call add_demos first "
                "(data.path=FOLDER)."
            )
        return self.prior

    def _batch(self, generator: torch.Generator) -> Transitions:
        size = self.config.batch_size
        demos = round(self.config.demo_fraction * size)
        own, _ = self.buffer.sample(size - demos, generator)
        given, _ = self._prior.sample(demos, generator)
        return Transitions.cat([own, given])

    def _imitation(self, generator: torch.Generator) -> Tensor:
        """The flow matching loss of demonstrations and corrections.

        Where a person took over, the policy has most to learn (HG-DAgger, arXiv:1810.02890).
        """
        given = self._prior.sample(self.config.batch_size, generator)[0].to(self.device)
        return imitation_loss(self.policy, given.obs, given.choice, given.valid, generator)

    def state_dict(self) -> dict[str, Any]:
        """As SAC-Flow's, with the demonstrations and interventions."""
        prior = self._prior.state_dict() if self.config.save_replay else None
        return super().state_dict() | {"prior": prior}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``; ``add_demos`` comes before it."""
        super().load_state_dict(state)
        if state["prior"] is not None:
            self._prior.load_state_dict(state["prior"])
        elif isinstance(self._prior, EpisodeBuffer):
            self._prior.see_all()  # with the weights that came back
