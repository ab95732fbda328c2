"""Settings of PA-RL, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from embodyrl.algorithms.edit_actor import EditConfig, check_edit
from embodyrl.errors import UserError, refuse_unread
from embodyrl.policy import HasFlow, Imitates, has_ability
from embodyrl.ranges import (
    Choice,
    Count,
    CountOrZero,
    Discount,
    NotNegative,
    Positive,
    Range,
    Share,
)

FOR_HINDSIGHT = ("hindsight_steps", "refresh_chunks")
FOR_PICTURES = ("shift", "jitter", *FOR_HINDSIGHT)
Ratio = Annotated[float, Range(0, 1000, open_low=True)]


@dataclass(frozen=True)
class PARLConfig(EditConfig):
    """Settings of PA-RL.

    Attributes:
        name: registry name.
        num_chunks: T, chunks per env and iteration.
        capacity: chunks in the replay buffer, allocated at the start.
        save_replay: whether checkpoints hold the buffer; without it a resumed run collects
            ``warmup_chunks`` anew.
        warmup_chunks: collected with the policy itself before the critics learn.
        critic_warmup: gradient steps of the critics, the first ones, before anything is chosen.
        mc_steps: of these, the first ones, which fit Monte Carlo returns: TD errors pass a sparse
            reward back by one chunk at a time.
        critic_utd: gradient steps of the critics per chunk collected.
        actor_utd: gradient steps of the actor per chunk collected; 0 leaves the policy as it is, and
            only what chooses and edits is trained.
        batch_size: chunks per gradient step of the critics.
        actor_batch_size: states per gradient step of the actor, each with N proposals.
        gamma: discount per action.
        bootstrap_timeouts: whether an episode that ran out of time is valued as if it went on.
            False counts it as failed, with nothing to come: the way for tasks that are solved or
            not. Dense rewards need True.
        lr: of the actor (Adam).
        ema: decay of the averaged weights, by which the policy proposes and which are evaluated and
            saved.
        critic_lr: of the critics (Adam).
        target_critics: whether a target takes the ``mean`` of the critics or the ``least`` of them
            (RAVL, arXiv:2402.12527, for dreams that are cut short). The mean chooses.
        tau: share by which target critics follow at each step.
        success_coef: so many own chunks of solved episodes are imitated per choice.
        bc_coef: so many chunks of the demonstrations of ``data.path`` are imitated per choice. With
            0 they only teach where things are in pictures.
        hindsight_steps: gradient steps in which that is learned first, after the warm-up. Read
            where there are pictures.
        refresh_chunks: after so many chunks it is learned further, with a third of the steps; 0
            means never.
        shift: pixels, at most, by which pictures are shifted at random before the actor sees them.
        jitter: share by which their brightness, contrast and saturation are changed then, at most;
            hue is changed a little. .2 is usual.
        max_grad_norm: of the actor and of the critics, each; 0 means no bound.
    """

    name: str = "pa_rl"
    num_chunks: Count = 4
    capacity: Count = 50_000
    save_replay: bool = True
    warmup_chunks: CountOrZero = 2_000
    critic_warmup: CountOrZero = 1_000
    mc_steps: CountOrZero = 150
    critic_utd: Ratio = 0.3
    actor_utd: Annotated[float, Range(0, 1000)] = 0.05
    batch_size: Count = 256
    actor_batch_size: Count = 64
    gamma: Discount = 0.99
    bootstrap_timeouts: bool = False
    lr: Positive = 2e-4
    ema: Annotated[float, Range(0, 1, open_high=True)] = 0.98
    critic_lr: Positive = 3e-4
    target_critics: Annotated[str, Choice("mean", "least")] = "mean"
    tau: Discount = 0.01
    success_coef: NotNegative = 0.5
    bc_coef: NotNegative = 0.0
    hindsight_steps: Count = 450
    refresh_chunks: CountOrZero = 5_000
    shift: CountOrZero = 0
    jitter: Share = 0.0
    max_grad_norm: NotNegative = 10.0

    def __post_init__(self) -> None:
        if self.mc_steps > self.critic_warmup:
            raise UserError(
                f"algorithm.mc_steps is {self.mc_steps}, more than algorithm.critic_warmup="
                f"{self.critic_warmup}, of which they are the first ones. Lower it, or raise the "
                "other."
            )


def check_can_choose(config: Any, policy: Any, actor_steps: str) -> None:
    """Refuses a policy that cannot choose, and settings that do not go with it.

    Args:
        config: of PA-RL, online or offline.
        policy: to be trained.
        actor_steps: the setting that is 0 where the policy is frozen.

    Raises:
        UserError: what is wrong.
    """
    # The policy must imitate, and have something to choose from.
    if not (has_ability(policy, HasFlow) or has_ability(policy, Imitates)):
        raise UserError(
            "PA-RL imitates what was chosen, so it needs a policy with the ability HasFlow, or "
            f"Imitates, and {type(policy).__name__} has neither. See embodyrl/policy.py."
        )
    if policy.chooser is None:
        raise UserError(
            "PA-RL trains critics that choose among the policy's proposals, and this policy "
            "has none. Set policy.chooser_width (256 is plenty)."
        )
    if policy.config.proposals < 2:
        raise UserError(
            "policy.proposals is 1, so there is nothing to choose from. Set it to 2 or more (8)."
        )
    # What nothing would read.
    shared = policy.config.chooser_sees == "shared"
    unread, why = (), ""
    if shared:
        unread, why = FOR_HINDSIGHT, "policy.chooser_sees=shared asks for no hindsight"
    if not policy.spec.cameras:
        unread, why = FOR_PICTURES, f"{policy.spec.name} has no pictures"
    refuse_unread(config, "algorithm", [name for name in unread if hasattr(config, name)], why)
    check_edit(config, policy)
    # Features that the replay buffer keeps.
    if shared and getattr(config, actor_steps):
        raise UserError(
            "policy.chooser_sees=shared lets the critics see the policy's features, and the "
            "replay buffer keeps these, so the policy must not change. Set "
            f"algorithm.{actor_steps}=0, or leave policy.chooser_sees out."
        )
