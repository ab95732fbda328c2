"""GRPO on flow-matching policies: episodes are compared with others from the same start.

A group is G episodes from one initial state with one instruction. The advantage of an episode, and
of each of its chunks, is its outcome compared with its group's: GRPO, arXiv:2402.03300; on VLAs
SimpleVLA-RL, 2509.09674; on flow policies Flow-GRPO, 2505.05470. Groups that always or never
succeed say nothing and are replaced by new ones (dynamic sampling, DAPO, arXiv:2503.14476). RLOO
(arXiv:2402.14740) is ``baseline=leave_one_out normalize=false``, MC-GRPO ``baseline=median``, GDPO
(arXiv:2601.05242) ``per_reward=true``; the actor's step is PPO's. ``replay_successes`` is ARPO's.
``baseline=tracked group_size=1`` has no groups: SPO, MSSR (``algorithms.success_baseline``).
``draw_groups`` lets envs go on with the next group in place of waiting for a round's slowest episode
(``rollouts.group_draws``).
With ``branches`` a group is a tree, and each of its levels is compared with its siblings (BranchGRPO,
arXiv:2509.06040). ``objective=flow_balance`` matches the distribution of rewards (FlowRL, 2509.15207).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor

from embodyrl.algorithm import Algorithm, MemoryPlan, SharesGradients
from embodyrl.algorithms.branching import branch_advantages, check_branches, noise_tree
from embodyrl.algorithms.clipped_actor import ClippedActor, on_policy_memory
from embodyrl.algorithms.clipped_actor_config import ActorConfig
from embodyrl.algorithms.flow_balance import FlowBalanceActor
from embodyrl.algorithms.success_baseline import SuccessBaseline
from embodyrl.algorithms.success_replay import SuccessReplay
from embodyrl.errors import UserError, refuse_unread
from embodyrl.functional.returns import (
    BASELINES,
    combined_group_advantages,
    equal_episode_weights,
    group_advantages,
    masked_whiten,
    median_pivots,
)
from embodyrl.policy import Actor, PathPolicy, ScoresPaths, num_executed
from embodyrl.ranges import Choice, Count, CountOrZero, Positive, Range, Share
from embodyrl.rollouts.batches import Episode, EpisodeBatch, GroupBatch
from embodyrl.rollouts.collect import Player, collect_episodes
from embodyrl.rollouts.group_draws import GroupDraws, Results
from embodyrl.rollouts.low_precision import acting_in, in_float32
from embodyrl.rollouts.noise_tree import NoiseTree
from embodyrl.types import EnvSpec

if TYPE_CHECKING:
    from embodyrl.data.demonstrations import Demonstrations

REWARDS: dict[str, Callable[[Episode], float]] = {
    "success": lambda e: float(e.success),
    "return": lambda e: e.reward,
    "length": lambda e: float(e.length),
}
WEIGHTINGS = ("episode", "chunk")
DRAWING = ("rounds", "as_needed", "ahead")
OBJECTIVES = {"clipped": ClippedActor, "flow_balance": FlowBalanceActor}


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


class GRPO(Algorithm):
    """See the module's docstring."""

    Config = GRPOConfig
    needs = (ScoresPaths,)
    Batch = GroupBatch
    whole_episodes = True

    def __init__(self, config: GRPOConfig, policy: PathPolicy) -> None:
        super().__init__(config, policy)
        if "success" in config.rewards and not policy.spec.reports_success:
            raise UserError(
                f"{policy.spec.name} reports no success, so a group's episodes would all be worth "
                "the same. Set algorithm.rewards=[return]."
            )
        self.actor = OBJECTIVES[config.objective](config, policy)
        self.successes = SuccessReplay(config.replay_successes)
        self.expected = SuccessBaseline()

    @property
    def wants_demos(self) -> bool:
        """See ``Algorithm``: to imitate them."""
        return self.config.bc_coef > 0

    def add_demos(self, demos: Demonstrations) -> None:
        """Demonstrations to imitate."""
        self.actor.anchors.demos = demos

    def collect(
        self,
        player: Player,
        *,
        generator: torch.Generator,
        between: Callable[[], None] = lambda: None,
    ) -> GroupBatch:
        """Plays groups until enough of them are informative, or ``max_rounds`` are over."""
        c = self.config
        num_envs = player.spec.num_envs
        if num_envs > c.num_episodes:
            raise UserError(
                f"algorithm.num_episodes {c.num_episodes} cannot keep env.num_envs={num_envs} "
                "busy: lower env.num_envs, or raise algorithm.num_episodes."
            )
        if c.draw_groups != "rounds":
            return self._collect_at_once(player, generator, between)
        fills_envs = -(-num_envs // c.group_size)
        missing = c.num_episodes // c.group_size
        kept: list[EpisodeBatch] = []
        failed: list[EpisodeBatch] = []
        episodes: list[Episode] = []
        rounds = 0
        while missing > 0 and rounds < c.max_rounds:
            # Play one group from each of so many new initial states.
            with acting_in(self.policy, c.rollout_precision):
                batch = collect_groups(
                    player,
                    self.policy,
                    max(missing, fills_envs),
                    c.group_size,
                    until_success=c.until_success,
                    generator=generator,
                    between=between,
                    tree=noise_tree(c, generator),
                )
            batch = in_float32(batch)
            # Keep the groups whose episodes differ; the others are drawn anew.
            size = c.group_size
            groups = [range(i, i + size) for i in range(0, len(batch.episodes), size)]
            good = [g for g in groups if self._is_informative([batch.episodes[i] for i in g])]
            kept.append(batch.select([i for group in good for i in group]))
            # Where all failed, a kept success may stand in.
            if c.replay_successes:
                lost = [g for g in groups if self._all_failed([batch.episodes[i] for i in g])]
                failed.append(batch.select([i for group in lost for i in group]))
            episodes += [e for e in batch.episodes if e is not None]
            missing -= len(good)
            rounds += 1
        whole = EpisodeBatch.cat(kept)
        lost = EpisodeBatch.cat(failed) if failed else None
        return GroupBatch(whole, episodes, whole.env_steps, rounds, lost)

    def _collect_at_once(
        self, player: Player, generator: torch.Generator, between: Callable[[], None]
    ) -> GroupBatch:
        """Lets envs go on with the next group until enough of them are informative."""
        c = self.config
        size = c.group_size
        wanted = c.num_episodes // size
        draws = GroupDraws(
            player.states,
            size,
            wanted,
            wanted * c.max_rounds,
            ahead=c.draw_groups == "ahead",
            informative=self._is_informative,
            hopeless=self._is_hopeless,
        )
        with acting_in(self.policy, c.rollout_precision):
            batch = collect_episodes(
                player.env,
                self.policy,
                draws,
                generator=generator,
                until_success=c.until_success,
                device=player.device,
                between=between,
                draws=player.draws,
                tree=noise_tree(c, generator),
            )
        batch = in_float32(batch)
        # The groups up to the last one that counts; what came after it is cut, or not needed.
        begun = len(batch.episodes)
        rows = [range(i, i + size) for i in range(0, begun - size + 1, size)]
        counted = rows[: draws.last + 1]
        episodes = [e for group in counted for i in group if (e := batch.episodes[i]) is not None]
        kept = batch.select([i for g in draws.kept for i in rows[g]])
        # Where all failed, a kept success may stand in.
        lost = None
        if c.replay_successes:
            failed = [g for g in counted if self._all_failed([batch.episodes[i] for i in g])]
            lost = batch.select([i for group in failed for i in group])
        return GroupBatch(kept, episodes, batch.env_steps, -(-begun // c.num_episodes), lost)

    def _is_hopeless(self, ended: Results) -> bool:
        """Whether a group will be dropped, whatever its other episodes come to."""
        if None in ended:
            return True
        if "success" not in self.config.rewards:
            return False
        solved = sum(e.success for e in ended if e is not None)
        failed = len(ended) - solved
        # Where a kept success may stand in, it must be known whether all fail.
        if not solved and self.config.replay_successes:
            return False
        size = self.config.group_size
        return solved / size > self.config.keep_max or (size - failed) / size < self.config.keep_min

    def _all_failed(self, group: Results) -> bool:
        """Whether a group has no success, and would be dropped for it."""
        return not self._is_informative(group) and all(e and not e.success for e in group)

    def _is_informative(self, group: Results) -> bool:
        if None in group:
            return False  # a simulation broke, and the others have lost what they are compared with
        if self.config.baseline == "tracked":
            return True
        # Where success does not count, what an episode is worth tells.
        episodes = [e for e in group if e is not None]
        if "success" not in self.config.rewards:
            return len(set(self._worth(episodes).tolist())) > 1
        rate = sum(e.success for e in episodes) / len(group)
        return self.config.keep_min <= rate <= self.config.keep_max

    def update(
        self, batch: GroupBatch, *, progress: float, generator: torch.Generator
    ) -> dict[str, float]:
        """One iteration: advantages of the kept episodes, then the actor's epochs."""
        self.actor.anchors.note(batch.episodes)
        kept = self._with_replay(batch)
        size = self.config.group_size
        stats = {"groups": len(kept.episodes) / size, "group_rounds": float(batch.rounds)}
        if self.config.replay_successes:
            stats["replayed_groups"] = (len(kept.episodes) - len(batch.kept.episodes)) / size
        if not kept.episodes:
            # Every group was alike: the next iteration draws others.
            return stats | self.actor.imitate(progress=progress, generator=generator)

        # An episode's advantage is that of each of its chunks; in a tree each level has its own.
        episodes = [e for e in kept.episodes if e is not None]
        if self.config.branches:
            advantage, figures = branch_advantages(self.config, kept, self._worth(episodes))
            stats |= figures
        else:
            of_episode = self._advantages(episodes).to(kept.logprob.device)
            advantage = of_episode[kept.episode]
            stats["advantage_std"] = float(of_episode.std(correction=int(len(episodes) > 1)))
            if self.config.baseline == "tracked":
                stats["baseline"] = float(self.expected.of(episodes).mean())
                self.expected.note(batch.episodes)
        rows = self._learned(episodes).to(kept.episode.device)[kept.episode].nonzero().flatten()
        weight = None
        if self.config.weighting == "episode":
            weight = torch.zeros_like(kept.logprob[:, 0])
            weight[rows] = equal_episode_weights(kept.episode[rows]).to(weight)

        # The clipped surrogate, as PPO's.
        stats |= self.actor.update(
            kept.obs,
            kept.trace,
            kept.logprob,
            advantage,
            rows,
            weight=weight,
            progress=progress,
            generator=generator,
        )
        return stats | {"skipped_steps": float(self.actor.optimizer.skipped)}

    def _with_replay(self, batch: GroupBatch) -> EpisodeBatch:
        """The groups to learn from: those kept, and those that failed with a success from before."""
        if not self.config.replay_successes:
            return batch.kept
        # Successes from before this iteration stand in; those of this one are kept for later.
        rescued = None
        if batch.failed is not None:
            rescued = self.successes.rescued(batch.failed, self.config.group_size)
        self.successes.store(batch.kept)
        return batch.kept if rescued is None else EpisodeBatch.cat([batch.kept, rescued])

    def _learned(self, episodes: list[Episode]) -> Tensor:
        """(E,) bool: all but the median of each group, where that is the baseline (MC-GRPO)."""
        c = self.config
        if c.baseline != "median" or c.per_reward:
            return torch.ones(len(episodes), dtype=torch.bool)
        return ~median_pivots(self._worth(episodes).view(-1, c.group_size)).flatten()

    def _advantages(self, episodes: list[Episode]) -> Tensor:
        """(E,) of the kept episodes, group after group."""
        c = self.config
        if c.per_reward:
            rewards = self._rewards(episodes).view(len(c.rewards), -1, c.group_size)
            weights = torch.tensor(c.reward_weights)
            return combined_group_advantages(rewards, weights, c.baseline).flatten()
        if c.baseline == "tracked":
            # Compared with earlier episodes of the instruction; see ``success_baseline``.
            advantage = self._worth(episodes) - self.expected.of(episodes)
            every = torch.ones_like(advantage, dtype=torch.bool)
            return masked_whiten(advantage, every) if c.normalize else advantage
        total = self._worth(episodes).view(-1, c.group_size)
        return group_advantages(total, c.baseline, c.normalize).flatten()

    def _rewards(self, episodes: list[Episode]) -> Tensor:
        """(R, E): each of ``rewards``."""
        rows = [[REWARDS[name](e) for e in episodes] for name in self.config.rewards]
        return torch.tensor(rows, dtype=torch.float32)

    def _worth(self, episodes: list[Episode]) -> Tensor:
        """(E,): their weighted sum."""
        return torch.tensor(self.config.reward_weights) @ self._rewards(episodes)

    def state_dict(self) -> dict[str, Any]:
        """Of the actor's optimiser, and the kept successes."""
        state = {"actor": self.actor.state_dict()}
        if self.config.replay_successes:
            state["successes"] = self.successes.state_dict()
        if self.config.baseline == "tracked":
            state["expected"] = self.expected.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self.actor.load_state_dict(state["actor"])
        if self.config.replay_successes:
            self.successes.load_state_dict(state["successes"])
        if self.config.baseline == "tracked":
            self.expected.load_state_dict(state["expected"])

    @classmethod
    def tolerates_lag(cls, config: GRPOConfig) -> bool:
        """See ``Algorithm``: decoupled clipping does."""
        return config.behaviour_cap > 0

    @classmethod
    def worker_config(cls, config: GRPOConfig, count: int) -> GRPOConfig:
        """See ``Algorithm``: each worker plays whole groups, and the learner alone compares."""
        alone = replace(config, reference_coef=0.0, objective="clipped", balance_beta=1.0)
        return share_episodes(alone, count)

    def shared_gradients(self) -> list[SharesGradients]:
        """See ``Algorithm``."""
        return [self.actor.microbatches]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """See ``Algorithm``."""
        return [self.actor.optimizer.adam]

    @classmethod
    def memory_plan(cls, config: GRPOConfig, policy: Any, spec: EnvSpec) -> MemoryPlan | None:
        """See ``Algorithm``."""
        chunks = config.num_episodes * -(-spec.max_episode_steps // num_executed(policy.config))
        if config.draw_groups != "rounds":
            chunks *= config.max_rounds  # what is dropped stays until all is played
        copies = int(config.objective == "flow_balance")
        return on_policy_memory(config, chunks, copies)


def collect_groups(
    player: Player,
    policy: Actor,
    groups: int,
    size: int,
    *,
    generator: torch.Generator,
    between: Callable[[], None],
    until_success: bool = True,
    tree: NoiseTree | None = None,
) -> EpisodeBatch:
    """``size`` whole episodes from each of ``groups`` new initial states, group after group.

    With ``tree`` they share noise until they branch.
    """
    inits = [init for init in islice(player.states, groups) for _ in range(size)]
    return collect_episodes(
        player.env,
        policy,
        inits,
        generator=generator,
        until_success=until_success,
        device=player.device,
        between=between,
        draws=player.draws,
        tree=tree,
    )


def share_episodes(config: Any, count: int) -> Any:
    """The settings of one of ``count`` workers, which plays its share of the groups.

    Raises:
        UserError: the groups cannot be dealt out evenly.
    """
    if config.num_episodes % (count * config.group_size):
        raise UserError(
            f"algorithm.num_episodes={config.num_episodes} cannot be shared by run.workers={count} "
            f"in whole groups of {config.group_size}. Make it a multiple of "
            f"{count * config.group_size}."
        )
    return replace(config, num_episodes=config.num_episodes // count)
