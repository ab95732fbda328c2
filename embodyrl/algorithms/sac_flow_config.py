"""The settings of SAC-Flow, which RLPD, WSRL and DSRL share with other defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from embodyrl.algorithms.hindsight import FoundConfig
from embodyrl.errors import refuse_unread
from embodyrl.policies.critics import NORMS
from embodyrl.ranges import Choice, Count, CountOrZero, Discount, NotNegative, Positive, Range

ENTROPIES = ("action", "path")


@dataclass(frozen=True)
class SACFlowConfig(FoundConfig):
    """Settings of SAC-Flow.

    Attributes:
        name: registry name.
        num_chunks: T, chunks per env and iteration.
        capacity: chunks in the replay buffer, allocated at the start.
        save_replay: whether checkpoints hold the buffer; without it a resumed run collects
            ``warmup_chunks`` anew.
        warmup_chunks: collected before the first gradient step.
        random_warmup: those are uniformly random actions, for a policy that starts from nothing,
            not the policy's own.
        critic_warmup: gradient steps, the first ones, in which only the critics learn; for a policy
            worth keeping.
        utd: update-to-data ratio: gradient steps of the critics per chunk collected.
        policy_delay: critic steps per step of the actor and the temperature.
        batch_size: chunks per gradient step.
        gamma: discount per action.
        lr: of the actor (Adam).
        critic_lr: of the critics (Adam).
        alpha_lr: of the temperature (Adam).
        alpha: the temperature at the start; it stays there if ``alpha_lr`` is 0.
        entropy: whose the temperature holds, of the ``action`` or of the joint ``path``; see the
            module.
        target_entropy: at how many nats per action dim, for the path also per denoising step;
            negative. In all that is target_entropy * H * A, or target_entropy * K * H * A, in the
            units of actions.
        entropy_backup: whether TD targets hold the entropy bonus of the next decision.
        bc_coef: weight of the flow matching loss on ``data.path`` in the actor's loss
            (offline-to-online).
        num_critics: E; see ``target_critics``.
        target_critics: ``two``: a target is the smaller value of two of them, drawn for every step
            (REDQ, arXiv:2101.05982), and the actor maximises the mean, of two critics the smaller.
            ``least``: targets and actor take the least of all of them (SAC-N, arXiv:2110.01548).
            It is for dreams that are cut short (RAVL, arXiv:2402.12527), with ``num_critics`` of
            10 or more.
        shared_critic: critics see the actor's features, also where ``policy.critic`` is privileged;
            must be false where it is found.
        own_encoder: critics see the features of an encoder of their own instead, where
            ``policy.critic`` is privileged or shared: a copy of the actor's that their loss trains
            further.
        critic_shift: pixels, at most, by which pictures are shifted at random before it sees them
            (DrQ, arXiv: 2004.13649).
        critic_width: of their hidden layers.
        critic_layers: hidden layers.
        critic_norm: ``none``, ``layer`` (LayerNorm), or ``batch``: CrossQ, which has no target
            nets.
        tau: share by which target nets follow at each step; not read by CrossQ.
        max_grad_norm: of the actor and of the critics, each; 0 means no bound. The critics' norms
            grow with returns, and a bound that always binds makes all batches weigh the same.
    """

    name: str = "sac_flow"
    num_chunks: Count = 1
    capacity: Count = 200_000
    save_replay: bool = True
    warmup_chunks: CountOrZero = 5_000
    random_warmup: bool = True
    critic_warmup: CountOrZero = 0
    utd: Annotated[float, Range(0, 1000, open_low=True)] = 1.0
    policy_delay: Count = 2
    batch_size: Count = 256
    gamma: Discount = 0.99
    lr: Positive = 3e-4
    critic_lr: Positive = 1e-3
    alpha_lr: NotNegative = 1e-3
    alpha: Positive = 0.2
    entropy: Annotated[str, Choice(*ENTROPIES)] = "action"
    target_entropy: Annotated[float, Range(high=0, open_high=True)] = -1.0
    entropy_backup: bool = True
    bc_coef: NotNegative = 0.0
    num_critics: Annotated[int, Range(2, 1000)] = 2
    target_critics: Annotated[str, Choice("two", "least")] = "two"
    shared_critic: bool = False
    own_encoder: bool = False
    critic_shift: CountOrZero = 4
    critic_width: Count = 256
    critic_layers: Count = 2
    critic_norm: Annotated[str, Choice(*NORMS)] = "none"
    tau: Discount = 0.005
    max_grad_norm: NotNegative = 0.0

    def __post_init__(self) -> None:
        if self.num_critics == 2:
            refuse_unread(
                self,
                "algorithm",
                ("target_critics",),
                "with num_critics=2 the least of all is the smaller of two; set num_critics=10",
            )
        if not self.own_encoder:
            refuse_unread(
                self, "algorithm", ("critic_shift",), "own_encoder=false shifts no pictures"
            )
        if self.critic_norm == "batch":
            refuse_unread(
                self, "algorithm", ("tau",), "critic_norm=batch (CrossQ) has no target nets"
            )
        if not self.alpha_lr:
            refuse_unread(
                self, "algorithm", ("target_entropy",), "alpha_lr=0 leaves the temperature as it is"
            )
