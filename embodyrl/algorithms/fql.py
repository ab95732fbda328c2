"""FQL: Flow Q-learning, offline and then online (arXiv:2502.02538).

A flow that imitates the data is no policy to maximise Q through: the gradient would pass all of its
denoising steps. So a one-step head beside it is what maximises Q and what acts, and the flow holds
it near the data:

    flow      mu_w: flow matching on chunks of the replay buffer
    head      m(s, z), from the same noise z: alpha |m(s, z) - mu_w(s, z)|^2 - mean_e Q_e(s, m(s, z))
    critics   Q(s, a) -> sum_i gamma^i r_i + gamma^h mean_e Q'_e(s', m(s', z')),   z, z' ~ N(0, I)

One decision is a chunk of H actions. With H = 1 that is FQL, with more it is QC-FQL, which
Q-chunking proposes (arXiv:2507.07969). First come ``offline_steps`` gradient steps on a data set
with failed episodes in it, without an env step. Then it plays, and draws from both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor

from embodyrl.algorithms.imitation import imitation_loss
from embodyrl.algorithms.off_policy import OffPolicy
from embodyrl.algorithms.optim import GuardedAdam, Means
from embodyrl.errors import UserError, refuse_unread
from embodyrl.functional.flow import randn
from embodyrl.functional.losses import one_step_loss, td_loss
from embodyrl.functional.returns import chunk_td_target, ensemble_value
from embodyrl.policies.critics import Critics
from embodyrl.policy import ActsInOneStep, HasFeatures, HasFlow, OneStepPolicy, num_executed
from embodyrl.ranges import Choice, Count, CountOrZero, Discount, NotNegative, Positive, Range
from embodyrl.rollouts.batches import TransitionBatch, Transitions
from embodyrl.rollouts.collect import Player
from embodyrl.rollouts.replay_buffer import DEMO, ReplayBuffer
from embodyrl.types import Obs

if TYPE_CHECKING:
    from embodyrl.data.demonstrations import Demonstrations

STEPS = "gradient_steps"


@dataclass(frozen=True)
class FQLConfig:
    """Settings of FQL.

    Attributes:
        name: registry name.
        offline_steps: gradient steps on ``data.path`` before the first env step; 0 plays at once.
        steps_per_iteration: of them, between two rows of the log.
        num_chunks: T, chunks per env and iteration, after that.
        capacity: own chunks in the replay buffer, allocated at the start; those of the data set are
            kept beside it.
        save_replay: whether checkpoints hold the buffer; without it a resumed run collects
            ``warmup_chunks`` anew.
        warmup_chunks: collected before the first gradient step online.
        utd: update-to-data ratio: gradient steps per chunk collected.
        demo_fraction: share of every batch that is drawn from the data set, online; 0 draws all
            chunks alike, as from one buffer (the paper).
        batch_size: chunks per gradient step.
        gamma: discount per action.
        alpha: how close the head stays to the flow. Values are in units of the return, so it is
            tuned to the task; the paper tries .3 to 1000.
        normalize_q: divide values by their mean magnitude in the batch, so that ``alpha`` depends
            less on the units of rewards.
        lr: of the flow and of the head (Adam).
        critic_lr: of the critics (Adam).
        num_critics: E.
        target_critics: whether a target takes their ``mean`` (the paper) or the ``least`` of them
            (RAVL, arXiv:2402.12527, for dreams that are cut short). The head maximises the mean.
        critic_width: of their hidden layers, which have LayerNorm.
        critic_layers: hidden layers.
        tau: share by which target critics follow at each step.
        max_grad_norm: of flow, head and critics, each; 0 means no bound.
    """

    name: str = "fql"
    offline_steps: CountOrZero = 20_000
    steps_per_iteration: Count = 100
    num_chunks: Count = 4
    capacity: Count = 200_000
    save_replay: bool = True
    warmup_chunks: CountOrZero = 1_000
    utd: Annotated[float, Range(0, 1000, open_low=True)] = 1.0
    demo_fraction: Annotated[float, Range(0, 1, open_high=True)] = 0.0
    batch_size: Count = 256
    gamma: Discount = 0.99
    alpha: Positive = 10.0
    normalize_q: bool = False
    lr: Positive = 3e-4
    critic_lr: Positive = 3e-4
    num_critics: Count = 2
    target_critics: Annotated[str, Choice("mean", "least")] = "mean"
    critic_width: Count = 256
    critic_layers: Count = 2
    tau: Discount = 0.005
    max_grad_norm: NotNegative = 0.0

    def __post_init__(self) -> None:
        if self.num_critics == 1:
            refuse_unread(
                self,
                "algorithm",
                ("target_critics",),
                "num_critics=1 has one value, which is mean and least; set num_critics=10",
            )


class FQL(OffPolicy):
    """See the module's docstring."""

    Config = FQLConfig
    needs = (HasFlow, HasFeatures, ActsInOneStep)

    def __init__(self, config: FQLConfig, policy: OneStepPolicy) -> None:
        super().__init__(config, policy)
        c = config
        if policy.one_step is None:
            raise UserError(
                "FQL acts by a one-step head beside the flow, and this policy has none. Set "
                "policy.one_step_width (256 is plenty), of policy.name=flow_mlp or flow_vla."
            )
        self.device = next(policy.parameters()).device
        # Critics of whole chunks see what the policy sees.
        horizon = num_executed(policy.config)
        size = horizon * policy.spec.action_dim
        self.critics = Critics(
            policy.features_dim, size, c.num_critics, c.critic_width, c.critic_layers, "layer"
        ).to(self.device)
        self.target = copy.deepcopy(self.critics).requires_grad_(False)
        self.buffer = self._make_buffer(c.capacity)
        self.prior: ReplayBuffer | None = None
        # One optimiser for each of the three losses.
        self.flow_optimizer = GuardedAdam(policy.actor_parameters(), c.lr, c.max_grad_norm, "flow")
        self.head_optimizer = GuardedAdam(
            policy.one_step.parameters(), c.lr, c.max_grad_norm, "one-step head"
        )
        self.critic_optimizer = GuardedAdam(
            self.critics.parameters(), c.critic_lr, c.max_grad_norm, "critics"
        )
        self.gradient_steps = 0
        self.pending_steps = 0.0  # gradient steps that the chunks collected so far still ask for

    def _make_buffer(self, capacity: int) -> ReplayBuffer:
        horizon = num_executed(self.policy.config)
        return ReplayBuffer(
            capacity, self.policy.spec, horizon, privileged=False, device=self.device
        )

    # The data set.

    @property
    def wants_demos(self) -> bool:
        """Whether it learns from a data set first, or draws from one."""
        return self.config.offline_steps > 0 or self.config.demo_fraction > 0

    @property
    def takes_demos(self) -> bool:
        """Always: a data set is replay like any other."""
        return True

    def add_demos(self, demos: Demonstrations) -> None:
        """Fills a buffer with all chunks of the data set, failed episodes' too."""
        super().add_demos(demos)
        self.prior = self._make_buffer(len(demos))
        for chunks in demos.transitions():
            self.prior.add(chunks, DEMO)

    @property
    def offline(self) -> bool:
        """Whether the gradient steps before the first env step are not over yet."""
        return self.gradient_steps < self.config.offline_steps

    # Acting.

    def act(self, obs: Obs, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See ``rollouts.collect.Act``: the head, from random noise; before it has learned the flow."""
        choice = self.policy.sample(obs, generator=generator, mode="train").actions
        return choice, choice

    def collect(
        self,
        player: Player,
        *,
        generator: torch.Generator,
        between: Callable[[], None] = lambda: None,
    ) -> TransitionBatch:
        """As ``OffPolicy.collect``; nothing while it learns offline."""
        if self.offline:
            nothing = torch.empty(0, dtype=torch.long, device=self.device)
            return TransitionBatch(self.buffer.rows(nothing))
        return super().collect(player, generator=generator, between=between)

    # Learning.

    def update(
        self, batch: TransitionBatch, *, progress: float, generator: torch.Generator
    ) -> dict[str, float]:
        """Stores the chunks and takes the gradient steps they ask for; offline, a number of them."""
        c = self.config
        stats = Means()
        self.buffer.add(batch.chunks)
        if self.offline:
            steps = min(c.steps_per_iteration, c.offline_steps - self.gradient_steps)
        else:
            if len(self.buffer) >= min(c.warmup_chunks, c.capacity):
                self.pending_steps += c.utd * len(batch.chunks)
            steps = int(self.pending_steps)
            self.pending_steps -= steps
        for _ in range(steps):
            drawn = self._batch(generator)
            self._update_critics(drawn, generator, stats)
            self._update_flow(drawn, generator, stats)
            self._update_head(drawn.obs, generator, stats)
            self.gradient_steps += 1
        return {
            **stats.means(),
            "replay_chunks": float(len(self.buffer)),
            "replay_gib": self.buffer.nbytes / 2**30,
            "gradient_steps": float(self.gradient_steps),
        }

    def _batch(self, generator: torch.Generator) -> Transitions:
        """Chunks of the data set and own ones; see ``demo_fraction``."""
        size = self.config.batch_size
        own, given = len(self.buffer), 0 if self.prior is None else len(self.prior)
        # How many are drawn from the data set.
        if self.config.demo_fraction and own and given:
            count = round(self.config.demo_fraction * size)
        else:
            share = given / max(own + given, 1)
            count = int((torch.rand(size, generator=generator) < share).sum())
        parts = []
        if self.prior is not None and count:
            parts.append(self.prior.sample(count, generator)[0])
        if count < size:
            parts.append(self.buffer.sample(size - count, generator)[0])
        return Transitions.cat(parts).to(self.device)

    def _noise(self, count: int, generator: torch.Generator) -> Tensor:
        """The flow's initial noise (count, C, D)."""
        return randn((count, *self.policy.flow_shape), generator, self.device)

    @torch.no_grad()
    def _features(self, obs: Obs) -> Tensor:
        """What critics and head see of obs (B, F)."""
        return self.policy.features(self.policy.encode(obs))

    def _update_critics(self, batch: Transitions, generator: torch.Generator, stats: Means) -> None:
        """One gradient step of the critics towards the TD targets of whole chunks."""
        c = self.config
        # The value of what the head does after each chunk.
        with torch.no_grad():
            next_features = self._features(batch.next_obs)
            noise = self._noise(len(batch), generator)
            next_choice = self.policy.one_step_actions(next_features, noise).clamp(-1.0, 1.0)
            next_q = self.target(next_features, next_choice)
        next_value = ensemble_value(next_q, c.target_critics, generator)
        target = chunk_td_target(batch.reward, batch.valid, next_value, batch.terminated, c.gamma)
        # Loss, backward pass and optimiser step.
        q = self.critics(self._features(batch.obs), batch.choice)
        loss = td_loss(q, target)
        self.critic_optimizer.zero_grad()
        loss.backward()
        norm = self.critic_optimizer.step(loss)
        # The target nets follow.
        self.target.follow(self.critics, c.tau)
        stats.add(critic_loss=loss, critic_grad_norm=norm, q=q.mean(), td_target=target.mean())

    def _update_flow(self, batch: Transitions, generator: torch.Generator, stats: Means) -> None:
        """One gradient step of flow matching on the chunks, whoever played them."""
        loss = imitation_loss(self.policy, batch.obs, batch.choice, batch.valid, generator)
        self.flow_optimizer.zero_grad()
        loss.backward()
        self.flow_optimizer.step(loss)
        stats.add(flow_loss=loss)

    def _update_head(self, obs: Obs, generator: torch.Generator, stats: Means) -> None:
        """One gradient step of the head: near the flow, and of a high value."""
        c = self.config
        with torch.no_grad():
            context = self.policy.encode(obs)
            features = self.policy.features(context)
        # The flow's actions from the same noise.
        noise = self._noise(len(obs), generator)
        target = self.policy.decode(context, noise)
        # Distance and value; the gradient goes through the critics, and not into them.
        action = self.policy.one_step_actions(features, noise)
        q = self.critics(features, action.clamp(-1.0, 1.0)).mean(0)
        scale = q.abs().mean() if c.normalize_q else 1.0
        loss = one_step_loss(action, target, q, c.alpha, scale)
        self.head_optimizer.zero_grad()
        loss.backward(inputs=self.head_optimizer.parameters)
        self.head_optimizer.step(loss)
        self.policy.one_step.ready.fill_(True)
        distance = (action - target).square().mean()
        stats.add(head_loss=loss, head_distance=distance, q_head=q.mean())

    # Checkpoints and workers.

    def state_dict(self) -> dict[str, Any]:
        """Critics, optimisers, counters and, with ``save_replay``, own chunks.

        The data set is read again.
        """
        return {
            "critics": self.critics.state_dict(),
            "target": self.target.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers()],
            "counters": [self.gradient_steps, self.pending_steps],
            "data_chunks": 0 if self.prior is None else len(self.prior),
            "replay": self.buffer.state_dict() if self.config.save_replay else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``; ``add_demos`` comes before it.

        Raises:
            UserError: the data set is another one.
        """
        now, then = 0 if self.prior is None else len(self.prior), int(state["data_chunks"])
        if now != then:
            raise UserError(
                f"The data set has {now} chunks now and had {then} when this run began. Give it the "
                "same data.path, or start a new run."
            )
        self.critics.load_state_dict(state["critics"])
        self.target.load_state_dict(state["target"])
        for optimizer, saved in zip(self._optimizers(), state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        gradient_steps, pending_steps = state["counters"]
        self.gradient_steps = int(gradient_steps)
        self.pending_steps = float(pending_steps)
        if state["replay"] is not None:
            self.buffer.load_state_dict(state["replay"])

    def _optimizers(self) -> tuple[GuardedAdam, GuardedAdam, GuardedAdam]:
        return self.flow_optimizer, self.head_optimizer, self.critic_optimizer

    def acting_state(self) -> dict[str, Tensor]:
        """See ``Algorithm``: gradient steps so far, which say whether it plays."""
        return {STEPS: torch.tensor(self.gradient_steps)}

    def load_acting_state(self, state: dict[str, Tensor]) -> None:
        """See ``Algorithm``."""
        self.gradient_steps = int(state[STEPS])
