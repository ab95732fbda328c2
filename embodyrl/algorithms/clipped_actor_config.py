"""Settings of ``ClippedActor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from embodyrl.algorithms.anchors import AnchorConfig
from embodyrl.errors import UserError, refuse_unread
from embodyrl.ranges import Choice, Count, CountOrZero, NotNegative, Positive, Range, Share
from embodyrl.rollouts.low_precision import PRECISIONS

RATIOS = ("joint", "per_step", "per_dim")
FILTERS = ("truncate", "mask")
SCHEDULES = ("linear", "adaptive")


@dataclass(frozen=True)
class ActorConfig(AnchorConfig):
    """Settings of the actor's updates; what holds the policy is in ``AnchorConfig``.

    Attributes:
        name: registry name.
        epochs: passes of the actor over a rollout.
        minibatch_size: chunks per gradient step.
        microbatch_size: chunks whose gradient is computed at a time, for models that fill the
            memory; 0 for all of the minibatch. Halved by itself when the memory runs out.
        lr: of the actor (Adam).
        lr_schedule: ``linear`` in the iterations (``lr_warmup``, ``lr_end``), or ``adaptive``:
            after an iteration whose last pass shows more than twice ``target_kl`` the rate falls by
            1.5, with less than half of it it rises.
        lr_warmup: iterations over which the actor's rate rises: Adam's first steps are as large as
            any, and random.
        lr_end: the rate falls linearly to this fraction of ``lr`` at the end of the run.
        clip_range: ratios are clipped to [1 - clip_range, 1 + clip_range_high].
        clip_range_high: 0 means the same as ``clip_range``.
        dual_clip: bound c on the loss of negative advantages; 0 means none.
        ratio: which log-ratio is clipped: ``joint`` over all steps and dims of a chunk, or its mean
            ``per_step`` or ``per_dim``; the same range is far looser for a mean.
        behaviour_cap: for rollouts of an older policy (asynchronous workers): the surrogate is
            built around a proximal policy, the one that the update starts from, and each chunk is
            weighted by proximal / behaviour, at most this (decoupled PPO, arXiv:2110.00641,
            arXiv:2505.24298). 0: the rollout is the current policy's.
        behaviour_filter: what happens to a weight above the cap: ``truncate`` it to the cap, or
            ``mask`` the chunk, as one below ``behaviour_low``, too (IcePop).
        behaviour_low: the smallest weight that ``mask`` keeps.
        behaviour_ess: scale the rate by the root of the weights' effective sample size, as a share
            of the chunks (VCPO, arXiv:2602.17616): a rollout of few useful chunks moves little.
        rollout_precision: what rollouts are computed in: ``exact``, ``bf16`` or ``int8`` (see
            ``rollouts/low_precision.py``); the last two need a ``behaviour_cap``.
        entropy_coef: weight of the entropy bonus (entropy per dim); only ``flow_noise`` learns its
            noise.
        target_kl: with the linear schedule it ends the actor's epochs once the estimated KL passes
            it, 0 meaning never.
        max_grad_norm: of the gradient.
    """

    name: str = ""
    epochs: Count = 5
    minibatch_size: Count = 512
    microbatch_size: CountOrZero = 0
    lr: Positive = 1e-4
    lr_schedule: Annotated[str, Choice(*SCHEDULES)] = "linear"
    lr_warmup: CountOrZero = 10
    lr_end: Share = 1.0
    clip_range: Annotated[float, Range(0, 1, open_low=True)] = 0.2
    clip_range_high: NotNegative = 0.0
    dual_clip: Annotated[float, Range(1, open_low=True, also=(0,))] = 3.0
    ratio: Annotated[str, Choice(*RATIOS)] = "joint"
    behaviour_cap: Annotated[float, Range(1, also=(0,))] = 0.0
    behaviour_filter: Annotated[str, Choice(*FILTERS)] = "truncate"
    behaviour_low: Share = 0.5
    behaviour_ess: bool = False
    rollout_precision: Annotated[str, Choice(*PRECISIONS)] = "exact"
    entropy_coef: NotNegative = 0.0
    target_kl: NotNegative = 0.0
    max_grad_norm: NotNegative = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr_schedule == "adaptive":
            if not self.target_kl:
                raise UserError(
                    "algorithm.lr_schedule=adaptive steers by algorithm.target_kl, which is 0; "
                    "0.02 is usual."
                )
            why = "lr_schedule=adaptive steers the rate by the KL alone"
            refuse_unread(self, "algorithm", ("lr_warmup", "lr_end"), why)
        self._check_behaviour()

    def _check_behaviour(self) -> None:
        """Refuses settings of the policy that acted which nothing reads, or that would mislead."""
        if self.rollout_precision != "exact" and not self.behaviour_cap:
            raise UserError(
                f"algorithm.rollout_precision={self.rollout_precision} lets another policy act than "
                "the one that is trained, so chunks must be weighted: set "
                "algorithm.behaviour_cap=2 as well."
            )
        if not self.behaviour_cap:
            why = "behaviour_cap=0 weights no chunk"
            refuse_unread(self, "algorithm", ("behaviour_filter", "behaviour_ess"), why)
        if self.behaviour_filter == "truncate":
            why = "behaviour_filter=truncate has no lower end"
            refuse_unread(self, "algorithm", ("behaviour_low",), why)
