"""NFT: no likelihood and no critic; flow matching towards what worked and away from what did not.

Episodes from one initial state are compared as in GRPO; the advantage becomes a probability of
being good, r = (1 + clip(A, -1, 1)) / 2. The old policy's velocity is then mirrored, v+- = v_old +-
beta (v - v_old), and

    loss = r |x0+ - a|^2 + (1 - r) |x0- - a|^2          x0+- = x_t - t v+-

is flow matching for good chunks and its reflection for bad ones: DiffusionNFT, arXiv:2509.16117.
``target=step`` supervises each denoising step of the rollout instead, |mean+-(x_k) - x_{k+1}|^2 /
std^2, after pi-StepNFT, arXiv:2603.02083.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor

from embodyrl.algorithm import Algorithm, MemoryPlan
from embodyrl.algorithms.anchors import AnchorConfig, Anchors
from embodyrl.algorithms.grpo import collect_groups, share_episodes
from embodyrl.algorithms.imitation import (
    flow_loss_of_shapes,
    refuse_shortcut,
    refuse_thoughts,
)
from embodyrl.algorithms.optim import GuardedAdam, Means, Microbatches, minibatches
from embodyrl.errors import UserError
from embodyrl.functional.flow import flow_matching_pair, randn, sample_training_time, timesteps
from embodyrl.functional.losses import nft_branches, nft_loss
from embodyrl.functional.returns import equal_episode_weights, group_advantages
from embodyrl.policy import FlowPolicyProtocol, HasFlow, num_executed
from embodyrl.ranges import LARGEST, Choice, Count, NotNegative, Positive, Range
from embodyrl.rollouts.batches import EpisodeBatch, GroupBatch
from embodyrl.rollouts.collect import Player
from embodyrl.types import DenoisingTrace, EnvSpec, Obs

if TYPE_CHECKING:
    from embodyrl.data.demonstrations import Demonstrations

TARGETS = ("action", "step")


@dataclass(frozen=True)
class NFTConfig(AnchorConfig):
    """Settings of NFT; what holds the policy is in ``AnchorConfig``.

    Attributes:
        name: registry name.
        num_episodes: episodes per iteration.
        group_size: G, episodes from one initial state; must divide ``num_episodes``.
        beta: how far the branches stand from the old policy; smaller means larger steps.
        target: ``action`` (the chunk that was executed, from noise drawn anew) or ``step`` (the
            rollout's own path).
        epochs: passes over an iteration's chunks.
        minibatch_size: chunks per gradient step.
        lr: of Adam.
        old_decay: after an iteration the old policy, which acts, keeps this share of itself; 0
            makes it the new one.
        max_grad_norm: 0 means no bound.
    """

    name: str = "nft"
    num_episodes: Count = 64
    group_size: Annotated[int, Range(2, LARGEST)] = 8
    beta: Positive = 1.0
    target: Annotated[str, Choice(*TARGETS)] = "action"
    epochs: Count = 8
    minibatch_size: Count = 256
    lr: Positive = 1e-4
    old_decay: Annotated[float, Range(0, 1, open_high=True)] = 0.95
    max_grad_norm: NotNegative = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_episodes % self.group_size:
            raise UserError(
                f"algorithm.group_size {self.group_size} does not divide algorithm.num_episodes "
                f"{self.num_episodes}."
            )


class NFT(Algorithm):
    """See the module's docstring."""

    Config = NFTConfig
    needs = (HasFlow,)
    Batch = GroupBatch
    whole_episodes = True

    def __init__(self, config: NFTConfig, policy: FlowPolicyProtocol) -> None:
        super().__init__(config, policy)
        if config.target == "step" and policy.transition.num_noisy == 0:
            raise UserError(
                "algorithm.target=step needs noisy denoising steps, but policy.eta is 0."
            )
        if not policy.spec.reports_success:
            raise UserError(
                "NFT learns from which episodes succeed, and "
                f"{policy.spec.name} reports no success. Use another algorithm, such as grpo with "
                "algorithm.rewards=[return]."
            )
        refuse_shortcut(policy, config.name)
        refuse_thoughts(policy, config.name)
        self.anchors = Anchors(config, policy)
        # The old policy acts; the new one is trained.
        self.policy = copy.deepcopy(policy).requires_grad_(False)
        self.optimizer = GuardedAdam(
            policy.actor_parameters(), config.lr, config.max_grad_norm, "policy"
        )
        self.pieces = Microbatches(0, self.optimizer.parameters)

    @property
    def wants_demos(self) -> bool:
        """See ``Algorithm``: to imitate them."""
        return self.config.bc_coef > 0

    def add_demos(self, demos: Demonstrations) -> None:
        """Demonstrations to imitate."""
        self.anchors.demos = demos

    def collect(
        self,
        player: Player,
        *,
        generator: torch.Generator,
        between: Callable[[], None] = lambda: None,
    ) -> GroupBatch:
        """``group_size`` whole episodes of the old policy from each initial state."""
        c = self.config
        groups = c.num_episodes // c.group_size
        batch = collect_groups(
            player, self.policy, groups, c.group_size, generator=generator, between=between
        )
        episodes = [e for e in batch.episodes if e is not None]
        return GroupBatch(batch, episodes, batch.env_steps, rounds=1)

    def update(
        self, batch: GroupBatch, *, progress: float, generator: torch.Generator
    ) -> dict[str, float]:
        """One iteration: how good each chunk was, the epochs, then the old policy follows."""
        c = self.config
        kept = batch.kept
        # The probability that an episode is good is that of each of its chunks.
        optimality = self._optimality(kept).to(kept.episode.device)[kept.episode]
        weight = equal_episode_weights(kept.episode)
        rows = (optimality != 0.5).nonzero().flatten()  # at 1/2 the two branches cancel
        self.anchors.note(batch.episodes)
        stats = Means()
        # Where the reference is compared, for all epochs.
        points = None
        if c.reference_coef and len(rows):
            chunks = kept.trace.x[:, -1]
            points = self.anchors.reference_points(
                kept.obs, chunks, rows, self.pieces, c.minibatch_size, generator
            )
        for _ in range(c.epochs):
            # Without an informative group there is at most the loss of imitation.
            given = minibatches(rows, c.minibatch_size, generator) if len(rows) else [rows]
            for i in given if len(rows) or c.bc_coef else []:
                # The loss, with what holds the policy.
                loss = torch.zeros((), device=rows.device)
                if len(i):
                    good = optimality[i]
                    loss = self._loss(kept.obs[i], kept.trace[i], good, weight[i], generator)
                # The distance to the policy that training began with.
                if points is not None:
                    distance = self.anchors.distance(kept.obs, points, i)
                    loss = loss + c.reference_coef * distance
                    stats.add(reference_distance=distance)
                # Imitation of as many chunks of demonstrations.
                if c.bc_coef:
                    count = len(i) or c.minibatch_size
                    imitated, imitation = self.anchors.imitation(count, generator)
                    stats.add(bc_weight=self.anchors.weight * len(imitated) / count)
                    if len(imitated):
                        weighted, figures = imitation(imitated)
                        loss = loss + weighted
                        stats.add(**figures)
                if not loss.requires_grad:
                    continue  # no informative group, and nothing that is imitated
                # Backward pass and optimiser step.
                self.optimizer.zero_grad()
                loss.backward()
                norm = self.optimizer.step(loss)
                stats.add(loss=loss, grad_norm=norm)
        # The old policy follows the new one.
        with torch.no_grad():
            for old, new in zip(self.policy.parameters(), self.result.parameters(), strict=True):
                old.lerp_(new, 1.0 - c.old_decay)
        return {
            **stats.means(),
            "informative": len(rows) / max(1, len(optimality)),
            "optimality": float((optimality * weight).mean()),
        }

    def _optimality(self, batch: EpisodeBatch) -> Tensor:
        """(E,) r of each episode: 1/2 in groups that are all alike, or in which a simulation broke.

        Its mean over a group is 1/2. Were it less, the policy would be pushed away from its own
        actions on the whole, further with each iteration: that is why advantages are scaled, not
        clipped, and episodes weigh the same.
        """
        c = self.config
        returns = torch.tensor([0.0 if e is None else float(e.success) for e in batch.episodes])
        broken = (
            torch.tensor([e is None for e in batch.episodes])
            .view(-1, c.group_size)
            .any(1, keepdim=True)
        )
        advantage = torch.where(broken, 0.0, group_advantages(returns.view(-1, c.group_size)))
        largest = advantage.abs().amax(1, keepdim=True)
        return (0.5 + 0.5 * torch.where(largest > 0, advantage / largest, 0.0)).flatten()

    def _loss(
        self,
        obs: Obs,
        trace: DenoisingTrace,
        good: Tensor,
        weight: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Of B chunks, at one time or step each."""
        n = len(obs)
        device = good.device
        if self.config.target == "action":
            action = trace.x[:, -1]
            t = sample_training_time(n, generator, device=device)
            x, _ = flow_matching_pair(action, t, randn(action.shape, generator, device))
            branches, _ = self._branches(obs, x, t)
            plus, minus = (x - t[:, None, None] * branch for branch in branches)
            return nft_loss(*self._executed(plus, minus, action), optimality=good, weight=weight)
        k = torch.multinomial(trace.stochastic.float().cpu(), 1, generator=generator)[:, 0].to(
            device
        )
        row = torch.arange(n, device=device)
        x = trace.x[row, k]
        t = timesteps(trace.stochastic.shape[1], device)[k]
        branches, log_std = self._branches(obs, x, t)
        (plus, std), (minus, _) = (
            self.policy.transition.mean_std(x, branch, k, log_std) for branch in branches
        )
        return nft_loss(
            *self._executed(plus / std, minus / std, trace.x[row, k + 1] / std),
            optimality=good,
            weight=weight,
        )

    def _executed(self, *parts: Tensor) -> Iterator[Tensor]:
        """The executed actions of each (B, C, D): a model's chunk may be longer and wider."""
        return (
            x[:, : num_executed(self.policy.config), : self.policy.spec.action_dim] for x in parts
        )

    def _branches(
        self, obs: Obs, x: Tensor, t: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """The mirrored velocities at x (B, H, A) and t (B,), and the old log-std, if it has one."""
        new = self.result
        old = self.policy
        x = x[:, None]
        t = t[:, None]
        velocity = new.velocity(new.encode(obs), x, t)[:, 0]
        with torch.no_grad():
            before, log_std = old.step_inputs(old.encode(obs), x, t)
        branches = nft_branches(velocity, before[:, 0], self.config.beta)
        return branches, None if log_std is None else log_std[:, 0]

    def state_dict(self) -> dict[str, Any]:
        """The optimiser, the old policy, and what holds the new one."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "old": self.policy.state_dict(),
            **self.anchors.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.policy.load_state_dict(state["old"])
        self.anchors.load_state_dict(state)

    @classmethod
    def worker_config(cls, config: NFTConfig, count: int) -> NFTConfig:
        """See ``Algorithm``: each worker plays whole groups."""
        return replace(share_episodes(config, count), reference_coef=0.0)

    @classmethod
    def memory_plan(cls, config: NFTConfig, policy: Any, spec: EnvSpec) -> MemoryPlan | None:
        """See ``Algorithm``; the old policy is a copy."""
        chunks = config.num_episodes * -(-spec.max_episode_steps // num_executed(policy.config))
        copies = 1 + int(config.reference_coef > 0)
        return MemoryPlan(config.minibatch_size, flow_loss_of_shapes, chunks, extra_policies=copies)
