"""PA-RL: the policy chooses among its own proposals and imitates the choice (arXiv:2412.06685).

    propose   N chunks from the policy, noise-free, from N draws of the initial noise
    choose    a* = argmax_i Q(s, a_i), the mean of the critics
    critics   Q(s, a) -> sum_i gamma^i r_i + gamma^h Q'(s', a*'), a*' chosen when s' was last seen
    actor     imitation of a* at states of the replay buffer, of own successes and demonstrations

Critics of whole chunks are those of Q-chunking (arXiv:2507.07969). Nothing is differentiated
through the policy or, for the actor, through Q. So every policy that can be sampled and can imitate
is trained by the same code, and it stays near what it can do: maximising Q through the policy's
gradient leaves the data, where critics are wrong. No critic reads the simulator's state: where the
objects are in pictures they learn by hindsight (``policies.localiser``), and the buffer keeps what
they see as features.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from embodyrl.algorithms.choice_actor import ChoiceActor
from embodyrl.algorithms.edit_actor import EditActor, reference_columns
from embodyrl.algorithms.episode_buffer import EpisodeBuffer, without
from embodyrl.algorithms.hindsight import Hindsight
from embodyrl.algorithms.off_policy import OffPolicy
from embodyrl.algorithms.optim import GuardedAdam, Means
from embodyrl.algorithms.pa_rl_config import PARLConfig, check_can_choose
from embodyrl.errors import UserError
from embodyrl.functional.losses import td_loss
from embodyrl.functional.returns import chunk_td_target, ensemble_value
from embodyrl.policy import Chooses, ChoosingPolicy, num_executed
from embodyrl.rollouts.batches import TransitionBatch, Transitions
from embodyrl.types import Obs

if TYPE_CHECKING:
    from embodyrl.data.demonstrations import Demonstrations

TD_COLUMNS = ("next_features", "reward", "valid", "terminated", "truncated")


class PARL(OffPolicy):
    """See the module's docstring."""

    Config = PARLConfig
    needs = (Chooses,)
    actor_steps: ClassVar = "actor_utd"
    """Setting that is 0 where the policy is frozen."""

    def __init__(self, config: PARLConfig, policy: ChoosingPolicy) -> None:
        super().__init__(config, policy)
        c = config
        check_can_choose(c, policy, self.actor_steps)
        self.device = next(policy.parameters()).device
        self.chooser = policy.chooser
        self.target = copy.deepcopy(self.chooser.critics).requires_grad_(False)
        horizon = num_executed(policy.config)
        columns: dict[str, Any] = {
            "next_choice": ((horizon, policy.spec.action_dim), torch.float32)
        }
        if self.chooser.editor is not None:
            columns |= reference_columns(policy.spec, horizon)
        self.buffer = EpisodeBuffer(
            c.capacity,
            policy.spec,
            horizon,
            self.chooser.encoder,
            c.gamma,
            self.device,
            extra=columns,
        )
        self.hindsight = Hindsight(
            self.chooser.encoder, self.buffer, c.hindsight_steps, getattr(c, "refresh_chunks", 0)
        )
        self.actor = ChoiceActor(c, policy, self.buffer)
        self.critic_optimizer = GuardedAdam(
            self.chooser.critics.parameters(), c.critic_lr, c.max_grad_norm, "critics"
        )
        # Only with policy.edit_scale.
        self.edits: EditActor | None = None
        if self.chooser.editor is not None:
            self.edits = EditActor(c, policy, self.buffer)
        self.critic_steps = 0
        self.pending_critic = 0.0  # steps that the chunks collected so far still ask for
        self.pending_actor = 0.0

    # Demonstrations.

    @property
    def wants_demos(self) -> bool:
        """Whether the run's data set is read."""
        return self.config.bc_coef > 0

    @property
    def takes_demos(self) -> bool:
        """See ``Algorithm``: also to learn where things are in pictures."""
        return self.wants_demos or self.hindsight.looks

    def add_demos(self, demos: Demonstrations) -> None:
        """Demonstrations to imitate, and to learn where things are from."""
        super().add_demos(demos)
        if self.wants_demos:
            self.actor.demos = demos
        self.hindsight.demos = demos

    # Acting.

    def choose(self, obs: Obs, features: Tensor, generator: torch.Generator) -> Tensor:
        """The best of N proposals (B, H, A) at each observation; before warm-up the only one.

        Args:
            obs: B observations.
            features: of them, for the critics (B, F).
            generator: of the proposals.
        """
        if not self.chooser.ready:
            return self.policy.propose(obs, 1, generator)[:, 0]
        return self.actor.choose(obs, features, generator)[0]

    def act(self, obs: Obs, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See ``rollouts.collect.Act``."""
        choice = self.choose(obs, self.chooser.encoder(obs), generator)
        return choice, choice

    # Learning.

    def update(
        self, batch: TransitionBatch, *, progress: float, generator: torch.Generator
    ) -> dict[str, float]:
        """Stores the chunks, then takes the gradient steps that they ask for."""
        c = self.config
        stats = Means()
        self._store(batch.chunks, generator)
        if len(self.buffer) >= min(c.warmup_chunks, c.capacity):
            if not self.chooser.ready:
                self._warm_up(generator, stats)
            self.hindsight.played(len(batch.chunks), generator, stats)
            self.pending_critic += c.critic_utd * len(batch.chunks)
        while self.pending_critic >= 1:
            self.pending_critic -= 1
            self._update_critics(generator, stats)
            # The actor's steps are spread evenly among those of the critics.
            self.pending_actor += c.actor_utd / c.critic_utd
            while self.pending_actor >= 1:
                self.pending_actor -= 1
                self.actor.step(generator, stats)
        return {
            **stats.means(),
            "replay_chunks": float(len(self.buffer)),
            "replay_gib": self.buffer.nbytes / 2**30,
            "gradient_steps": float(self.critic_steps),
            "actor_steps": float(self.actor.steps),
        }

    def _store(self, chunks: Transitions, generator: torch.Generator) -> None:
        """Adds chunks to the buffer, with what was chosen after each.

        Raises:
            UserError: chunks do not say which episode they are of.
        """
        if chunks.episode is None or chunks.success is None:
            raise UserError(
                "PA-RL imitates own successes, so each chunk must name its episode and say whether "
                "it was solved. Collect with rollouts.collect.collect_transitions."
            )
        rows = self.buffer.store(chunks)
        if self.edits is not None:
            self.edits.note_references(rows, generator)
        self._note_choices(rows, generator)

    def _note_choices(self, rows: Tensor, generator: torch.Generator) -> None:
        """What is chosen after the chunks at those places, which were played in turn."""
        data = self.buffer.data
        before, after = self.buffer.next_ones(rows)
        data["next_choice"][before] = data["choice"][after]
        last = without(rows, before)
        if len(last):
            obs = self.buffer.rows(last).next_obs
            data["next_choice"][last] = self.choose(obs, data["next_features"][last], generator)

    def _warm_up(self, generator: torch.Generator, stats: Means) -> None:
        """Learns to see, and then the first steps of the critics, which judge the policy as it is."""
        if not self.hindsight.begun:
            self.hindsight.begin(generator, stats)
        while self.critic_steps < self.config.critic_warmup:
            self._update_critics(generator, stats)
        self.chooser.ready.fill_(True)

    def _return_batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Places of chunks of episodes that are over, and the discounted return from each on."""
        known = self.buffer.data["over"][: len(self.buffer)].nonzero().flatten()
        if not len(known):
            raise UserError(
                f"No episode ended in the first {len(self.buffer)} chunks, so the critics have no "
                "returns to begin with. Raise algorithm.warmup_chunks, or set algorithm.mc_steps=0."
            )
        rows = self.buffer.draw(self.config.batch_size, generator, known)
        return rows, self.buffer.data["return"][rows]

    def _td_batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Places of chunks, and their TD targets."""
        rows = self.buffer.draw(self.config.batch_size, generator)
        data = {name: self.buffer.data[name][rows] for name in TD_COLUMNS}
        # The value after each chunk, of what was chosen there.
        with torch.no_grad():
            next_choice = self._next_choices(rows)
            next_q = self.target(data["next_features"], next_choice)
        next_value = ensemble_value(next_q, self.config.target_critics, generator)
        # Nothing comes after a solved episode, nor after one that failed because its time was over.
        over = data["terminated"]
        if not self.config.bootstrap_timeouts:
            over = over | data["truncated"]
        gamma = self.config.gamma
        return rows, chunk_td_target(data["reward"], data["valid"], next_value, over, gamma)

    def _next_choices(self, rows: Tensor) -> Tensor:
        """What is chosen after the chunks at those places (B, H, A).

        A policy that is always edited does there what its editor makes of a proposal by now.
        """
        data = self.buffer.data
        if not self.chooser.config.edit_only:
            return data["next_choice"][rows]
        return self.chooser.best_of(
            data["next_features"][rows], data["next_reference"][rows][:, None]
        )

    def _update_critics(self, generator: torch.Generator, stats: Means) -> None:
        c = self.config
        if self.critic_steps < c.mc_steps:
            rows, target = self._return_batch(generator)
        else:
            rows, target = self._td_batch(generator)
        self._fit_critics(rows, target, generator, stats)
        # The target nets follow.
        self.target.follow(self.chooser.critics, c.tau)

    def _fit_critics(
        self, rows: Tensor, target: Tensor, generator: torch.Generator, stats: Means
    ) -> None:
        """One gradient step of the critics towards targets of the chunks at those places."""
        features, choice = self.buffer.data["features"][rows], self.buffer.data["choice"][rows]
        critics = self.chooser.critics
        if self.chooser.config.chooser_prefixes:
            # Nothing is seen inside a chunk, so all of its prefixes have the same target.
            each = critics.after_each_action(features, choice)
            loss = td_loss(each.flatten(1), target.repeat_interleave(each.shape[-1]))
            q = each[..., -1]
        else:
            q = critics(features, choice)
            loss = td_loss(q, target)
        # Backward pass and optimiser step.
        self.critic_optimizer.zero_grad()
        loss.backward()
        norm = self.critic_optimizer.step(loss)
        self.critic_steps += 1
        stats.add(critic_loss=loss, critic_grad_norm=norm, q=q.mean(), td_target=target.mean())
        if self.edits is not None:
            self.edits.step(rows, generator, stats)

    # Checkpoints.

    @property
    def _saves_replay(self) -> bool:
        return self.config.save_replay

    def _optimizers(self) -> list[GuardedAdam]:
        more = self.hindsight.optimizers
        editing = [] if self.edits is None else [self.edits.optimizer]
        return [self.actor.optimizer, self.critic_optimizer, *editing, *more]

    def state_dict(self) -> dict[str, Any]:
        """Target critics, optimisers, counters and, with ``save_replay``, the buffer."""
        return {
            "target": self.target.state_dict(),
            "trained": self.actor.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers()],
            "steps": [self.critic_steps, self.actor.steps, self.hindsight.chunks],
            "pending": [self.pending_critic, self.pending_actor],
            "replay": self.buffer.state_dict() if self._saves_replay else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self.target.load_state_dict(state["target"])
        self.actor.average.load_state_dict(state["trained"])
        for optimizer, saved in zip(self._optimizers(), state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        steps = (int(x) for x in state["steps"])
        self.critic_steps, self.actor.steps, self.hindsight.chunks = steps
        self.pending_critic, self.pending_actor = (float(x) for x in state["pending"])
        if state["replay"] is not None:
            self.buffer.load_state_dict(state["replay"])
