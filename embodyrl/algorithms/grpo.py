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
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodyrl.algorithm import Algorithm, MemoryPlan, SharesGradients
from embodyrl.algorithms.branching import branch_advantages, noise_tree
from embodyrl.algorithms.clipped_actor import ClippedActor, on_policy_memory
from embodyrl.algorithms.flow_balance import FlowBalanceActor
from embodyrl.algorithms.grpo_config import REWARDS, GRPOConfig
from embodyrl.algorithms.success_baseline import SuccessBaseline
from embodyrl.algorithms.success_replay import SuccessReplay
from embodyrl.errors import UserError
from embodyrl.functional.returns import (
    combined_group_advantages,
    equal_episode_weights,
    group_advantages,
    masked_whiten,
    median_pivots,
)
from embodyrl.policy import Actor, PathPolicy, ScoresPaths, num_executed
from embodyrl.rollouts.batches import Episode, EpisodeBatch, GroupBatch
from embodyrl.rollouts.collect import Player, collect_episodes
from embodyrl.rollouts.group_draws import GroupDraws, Results
from embodyrl.rollouts.low_precision import acting_in, in_float32
from embodyrl.rollouts.noise_tree import NoiseTree
from embodyrl.types import EnvSpec

if TYPE_CHECKING:
    from embodyrl.data.demonstrations import Demonstrations

ACTORS = {"clipped": ClippedActor, "flow_balance": FlowBalanceActor}


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
        self.actor = ACTORS[config.objective](config, policy)
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
