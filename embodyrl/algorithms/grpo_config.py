"""The settings of GRPO, and which of them say nothing beside others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from embodyrl.algorithms.branching import check_branches
from embodyrl.algorithms.clipped_actor_config import ActorConfig
from embodyrl.errors import UserError, refuse_unread
from embodyrl.functional.returns import BASELINES
from embodyrl.ranges import Choice, Count, CountOrZero, Positive, Range, Share
from embodyrl.rollouts.batches import Episode

REWARDS: dict[str, Callable[[Episode], float]] = {
    "success": lambda e: float(e.success),
    "return": lambda e: e.reward,
    "length": lambda e: float(e.length),
}
WEIGHTINGS = ("episode", "chunk")
DRAWING = ("rounds", "as_needed", "ahead")
OBJECTIVES = ("clipped", "flow_balance")


@dataclass(frozen=True)
class GRPOConfig(ActorConfig):
    """Settings of GRPO; those of the actor's updates are in ``ActorConfig``.

    Attributes:
        num_episodes: episodes per iteration, before any are replaced.
        group_size: G, episodes from one initial state; must divide ``num_episodes``. 1 needs
            ``baseline=tracked``.
        keep_min: groups with a smaller share of successes are dropped, and others drawn; where
            ``rewards`` leaves success out, those are dropped whose episodes are all worth the same.
        keep_max: and those with a larger one.
        max_rounds: how often an iteration draws groups before it makes do with those that it has; 1
            replaces none.
        draw_groups: ``rounds``: groups are replaced once all of a round are over; ``as_needed``: as
            soon as one is found to be dropped; ``ahead``: free envs always begin the next one, and
            what is not needed is cut. At most ``max_rounds`` times as many groups begin as are
            learned from.
        replay_successes: successful episodes that are kept. Where a whole group fails, one from the
            same initial state takes the place of its last episode; 0 keeps none.
        baseline: ``mean``, ``median`` or ``leave_one_out`` of the group. With ``median`` and an odd
            ``group_size`` the median episode gives the baseline and is not learned from. Or
            ``tracked``, with ``group_size=1``: the recent success rate of the instruction.
        normalize: whether advantages are divided by the group's standard deviation; with
            ``baseline=tracked`` whether they get the mean 0 and the standard deviation 1.
        rewards: what an episode is worth: any of ``success``, ``return`` (sum of the env's rewards)
            and ``length`` (actions; give it a negative weight).
        reward_weights: one for each of ``rewards``.
        per_reward: normalise each reward within the group on its own, and their sum over the batch
            (GDPO).
        until_success: an episode is over with its first success, also in an env that would go on.
        branches: the episodes of a group are the leaves of a tree: into how many it branches at the
            start of the episode, and then each branch at each of ``branch_chunks``. The product is
            ``group_size``. Empty: all of them branch at the start.
        branch_chunks: the chunks of an episode, counted from 0, before which branches part again.
            Until then they draw the same noise.
        weighting: each ``episode`` counts the same, however long, or each ``chunk``.
        objective: ``clipped``, the surrogate that maximises advantages, or ``flow_balance``, which
            matches their distribution (``algorithms.flow_balance``).
        balance_beta: with ``flow_balance``, how many times likelier an advantage of 1 makes a chunk
            than under the policy that training began with, as a logarithm.
    """

    name: str = "grpo"
    clip_range_high: float = 0.28
    dual_clip: float = 0.0
    num_episodes: Count = 64
    group_size: Count = 8
    keep_min: Share = 0.1
    keep_max: Share = 0.9
    max_rounds: Count = 4
    draw_groups: Annotated[str, Choice(*DRAWING)] = "rounds"
    replay_successes: CountOrZero = 0
    baseline: Annotated[str, Choice(*BASELINES, "tracked")] = "mean"
    normalize: bool = True
    rewards: tuple[Annotated[str, Choice(*REWARDS)], ...] = ("success",)
    reward_weights: tuple[Annotated[float, Range()], ...] = (1.0,)
    per_reward: bool = False
    until_success: bool = True
    branches: tuple[Count, ...] = ()
    branch_chunks: tuple[Count, ...] = ()
    weighting: Annotated[str, Choice(*WEIGHTINGS)] = "episode"
    objective: Annotated[str, Choice(*OBJECTIVES)] = "clipped"
    balance_beta: Positive = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_episodes % self.group_size:
            raise UserError(
                f"algorithm.group_size {self.group_size} does not divide algorithm.num_episodes "
                f"{self.num_episodes}."
            )
        self._check_single()
        if self.keep_min > self.keep_max:
            raise UserError(
                f"algorithm.keep_min is {self.keep_min}; it must not be above algorithm.keep_max, "
                f"which is {self.keep_max}."
            )
        if not self.rewards or len(self.rewards) != len(self.reward_weights):
            raise UserError(
                f"algorithm.rewards has {len(self.rewards)} names and algorithm.reward_weights "
                f"{len(self.reward_weights)} numbers; give at least one, and one weight for each."
            )
        if "success" not in self.rewards:
            why = "algorithm.rewards leaves success out"
            refuse_unread(self, "algorithm", ("replay_successes",), why)
        if not self.keep_min:
            why = "algorithm.keep_min=0 learns from groups that fail as they are"
            refuse_unread(self, "algorithm", ("replay_successes",), why)
        if self.max_rounds == 1:
            refuse_unread(self, "algorithm", ("draw_groups",), "max_rounds=1 replaces no group")
        if self.per_reward:
            if len(self.rewards) < 2:
                raise UserError(
                    "algorithm.per_reward=true tells rewards apart, but algorithm.rewards has "
                    "only one."
                )
            refuse_unread(self, "algorithm", ("normalize",), "per_reward=true always normalises")
        if self.objective == "clipped":
            refuse_unread(
                self, "algorithm", ("balance_beta",), "objective=clipped balances nothing"
            )
        else:
            why = "objective=flow_balance has no surrogate that could be bounded"
            refuse_unread(self, "algorithm", ("dual_clip",), why)
        check_branches(self)

    def _check_single(self) -> None:
        """Refuses single episodes without a baseline, and beside them what needs a group."""
        if self.baseline != "tracked":
            if self.group_size == 1:
                raise UserError(
                    "algorithm.group_size is 1, and a single episode has no group to be compared "
                    "with. Set algorithm.baseline=tracked too, or a group_size of 2 or more."
                )
            return
        if self.group_size > 1:
            raise UserError(
                f"algorithm.baseline=tracked compares single episodes with the record of their "
                f"instruction, but algorithm.group_size is {self.group_size}. Set it to 1."
            )
        if self.rewards != ("success",):
            raise UserError(
                f"algorithm.baseline=tracked follows success, but algorithm.rewards is "
                f"{list(self.rewards)}. Make it [success]."
            )
        unread = ("keep_min", "keep_max", "replay_successes", "draw_groups", "branches")
        refuse_unread(self, "algorithm", unread, "baseline=tracked has no groups")
