"""PA-RL: the policy chooses among its own proposals and imitates the choice (arXiv:2412.06685).

    propose   N chunks from the policy, noise-free, from N draws of the initial noise
    choose    a* = argmax_i Q(s, a_i), the mean of the critics
    critics   Q(s, a) -> sum_i gamma^i r_i + gamma^h Q'(s', a*'), a*' chosen when s' was last seen
    actor     imitation of a* at states of the replay buffer, of own successes and demonstrations

Critics of whole chunks are those of Q-chunking (arXiv:2507.07969). Nothing is differentiated
through the policy or, for the actor, through Q. So every policy that can be sampled and can imitate
is trained by the same code, and it stays near what it can do: maximising Q through the policy's
gradient leaves the data, where critics are wrong. No critic reads the simulator's state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor

from embodyrl.algorithms.off_policy import OffPolicy, shifted
from embodyrl.algorithms.optim import GuardedAdam, Means
from embodyrl.algorithms.sft import imitation_loss
from embodyrl.errors import UserError
from embodyrl.functional.losses import td_loss
from embodyrl.functional.returns import chunk_td_target, discounted_returns
from embodyrl.policy import Chooses, ChoosingPolicy, HasFlow, Imitates, has_ability
from embodyrl.ranges import Count, CountOrZero, Discount, NotNegative, Positive, Range
from embodyrl.rollouts.batches import TransitionBatch, Transitions
from embodyrl.rollouts.replay_buffer import ReplayBuffer
from embodyrl.types import Obs

if TYPE_CHECKING:
    from embodyrl.data.demonstrations import Demonstrations

SAME = 1e-5
"""Chunks whose actions differ by no more are the same."""
Ratio = Annotated[float, Range(0, 1000, open_low=True)]


@dataclass(frozen=True)
class PARLConfig:
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
        actor_utd: gradient steps of the actor per chunk collected.
        batch_size: chunks per gradient step of the critics.
        actor_batch_size: states per gradient step of the actor, each with N proposals.
        gamma: discount per action.
        bootstrap_timeouts: whether an episode that ran out of time is valued as if it went on.
            False counts it as failed, with nothing to come: the way for tasks that are solved or
            not. Dense rewards need True.
        lr: of the actor (Adam).
        critic_lr: of the critics (Adam).
        tau: share by which target critics follow at each step.
        success_coef: weight of imitating own chunks of episodes that were solved.
        bc_coef: weight of imitating the demonstrations of ``data.path``.
        shift: pixels, at most, by which pictures are shifted at random before nets see them.
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
    actor_utd: Ratio = 0.05
    batch_size: Count = 256
    actor_batch_size: Count = 64
    gamma: Discount = 0.99
    bootstrap_timeouts: bool = False
    lr: Positive = 2e-4
    critic_lr: Positive = 3e-4
    tau: Discount = 0.01
    success_coef: NotNegative = 0.5
    bc_coef: NotNegative = 0.0
    shift: CountOrZero = 0
    max_grad_norm: NotNegative = 10.0

    def __post_init__(self) -> None:
        if self.mc_steps > self.critic_warmup:
            raise UserError(
                f"algorithm.mc_steps is {self.mc_steps}, more than algorithm.critic_warmup="
                f"{self.critic_warmup}, of which they are the first ones. Lower it, or raise the "
                "other."
            )


class PARL(OffPolicy):
    """See the module's docstring."""

    Config = PARLConfig
    needs = (Chooses,)

    def __init__(self, config: PARLConfig, policy: ChoosingPolicy) -> None:
        super().__init__(config, policy)
        c = config
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
        if c.shift and not policy.spec.cameras:
            raise UserError(
                f"algorithm.shift is {c.shift}, but {policy.spec.name} has no pictures to shift. "
                "Leave it at 0."
            )
        self.device = next(policy.parameters()).device
        self.chooser = policy.chooser
        self.target = self.chooser.make_target()
        # What is kept of a chunk beyond the transition: the choice at the state after it, its
        # episode, whether that was solved or is over, and if it is, the return from the chunk on.
        horizon = policy.config.horizon
        shape = (horizon, policy.spec.action_dim)
        self.buffer = ReplayBuffer(
            c.capacity,
            policy.spec,
            horizon,
            privileged=False,
            device=self.device,
            extra={
                "next_choice": (shape, torch.float32),
                "episode": ((), torch.int64),
                "solved": ((), torch.bool),
                "return": ((), torch.float32),
                "over": ((), torch.bool),
            },
        )
        self.actor_optimizer = GuardedAdam(
            policy.actor_parameters(), c.lr, c.max_grad_norm, "actor"
        )
        self.critic_optimizer = GuardedAdam(
            self.chooser.parameters(), c.critic_lr, c.max_grad_norm, "critics"
        )
        self.demos: Demonstrations | None = None
        self.critic_steps = 0
        self.actor_steps = 0
        self.pending_critic = 0.0  # steps that the chunks collected so far still ask for
        self.pending_actor = 0.0

    # Demonstrations.

    @property
    def wants_demos(self) -> bool:
        """Whether the run's data set is read."""
        return self.config.bc_coef > 0

    def add_demos(self, demos: Demonstrations) -> None:
        """Demonstrations to imitate."""
        self.demos = demos

    # Acting.

    def choose(self, obs: Obs, generator: torch.Generator) -> Tensor:
        """The best of N proposals (B, H, A) at each observation; before warm-up the only one."""
        if not self.chooser.ready:
            return self.policy.propose(obs, 1, generator)[:, 0]
        proposals = self.policy.propose(obs, self.policy.config.proposals, generator)
        if torch.allclose(proposals[:, 0], proposals[:, 1], atol=SAME):
            raise UserError(
                "The policy proposes the same chunk each time, so there is nothing to choose from. "
                "PA-RL needs a policy whose samples differ, such as a flow (policy.velocity other "
                "than gaussian)."
            )
        return self.chooser.best(obs, proposals)

    def act(self, obs: Obs, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See ``rollouts.collect.Act``."""
        choice = self.choose(obs, generator)
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
            if not self.chooser.encoder.normalize_proprio.fitted:
                self._fit_inputs()
            if not self.chooser.ready:
                self._warm_up(generator, stats)
            self.pending_critic += c.critic_utd * len(batch.chunks)
        while self.pending_critic >= 1:
            self.pending_critic -= 1
            self._update_critics(generator, stats)
            # The actor's steps are spread evenly among those of the critics.
            self.pending_actor += c.actor_utd / c.critic_utd
            while self.pending_actor >= 1:
                self.pending_actor -= 1
                self._update_actor(generator, stats)
        return {
            **stats.means(),
            "replay_chunks": float(len(self.buffer)),
            "replay_gib": self.buffer.nbytes / 2**30,
            "gradient_steps": float(self.critic_steps),
            "actor_steps": float(self.actor_steps),
        }

    def _store(self, chunks: Transitions, generator: torch.Generator) -> None:
        """Adds chunks to the buffer, with what was chosen after each, and who ended well."""
        chunks = chunks[slice(max(0, len(chunks) - self.buffer.capacity), None)]
        episode = chunks.episode
        success = chunks.success
        if episode is None or success is None:
            raise UserError(
                "PA-RL imitates own successes, so each chunk must name its episode and say whether "
                "it was solved. Collect with rollouts.collect.collect_transitions."
            )
        rows = self.buffer.add(chunks)
        data = self.buffer.data
        data["next_choice"][rows] = self.choose(chunks.next_obs, generator)
        data["episode"][rows] = episode
        # Own successes: all chunks of the episodes that were solved now, and none of the others.
        data["solved"] |= torch.isin(data["episode"], episode[success].to(self.device))
        for ended in episode[chunks.terminated | chunks.truncated].tolist():
            self._note_returns(ended)

    def _note_returns(self, episode: int) -> None:
        """The Monte Carlo returns of an episode that is over, by those of its chunks still here."""
        data = self.buffer.data
        rows = (data["episode"][: len(self.buffer)] == episode).nonzero().flatten()
        # In the order in which they were played: the oldest row follows the newest.
        age = (rows - self.buffer.position) % self.buffer.capacity
        rows = rows[age.argsort()]
        reward, valid = data["reward"][rows], data["valid"][rows]
        data["return"][rows] = discounted_returns(reward, valid, self.config.gamma)
        data["over"][rows] = True

    def _fit_inputs(self) -> None:
        """Normalises what the critics see, by the first chunks."""
        proprio = self.buffer.data["obs/proprio"][: len(self.buffer)]
        for net in (self.chooser, self.target):
            net.encoder.normalize_proprio.fit(proprio)

    def _warm_up(self, generator: torch.Generator, stats: Means) -> None:
        """The first steps of the critics, which judge the policy as it is."""
        while self.critic_steps < self.config.critic_warmup:
            self._update_critics(generator, stats)
        self.chooser.ready.fill_(True)

    def _return_batch(self, generator: torch.Generator) -> tuple[Transitions, Tensor]:
        """Chunks of episodes that are over, and the discounted return from each on."""
        known = self.buffer.data["over"][: len(self.buffer)].nonzero().flatten()
        if not len(known):
            raise UserError(
                f"No episode ended in the first {len(self.buffer)} chunks, so the critics have no "
                "returns to begin with. Raise algorithm.warmup_chunks, or set algorithm.mc_steps=0."
            )
        pick = torch.randint(len(known), (self.config.batch_size,), generator=generator)
        rows = known[pick.to(self.device)]
        return self.buffer.rows(rows), self.buffer.data["return"][rows]

    def _td_batch(self, generator: torch.Generator) -> tuple[Transitions, Tensor]:
        """Chunks of the replay buffer, and their TD targets."""
        rows = self.buffer.draw(self.config.batch_size, generator)
        batch = self.buffer.rows(rows)
        next_choice = self.buffer.data["next_choice"][rows]
        # The value after each chunk, of what was chosen there.
        with torch.no_grad():
            next_value = self.target(
                shifted(batch.next_obs, self.config.shift, generator), next_choice
            ).mean(0)
        # Nothing comes after a solved episode, nor after one that failed because its time was over.
        over = batch.terminated
        if not self.config.bootstrap_timeouts:
            over = over | batch.truncated
        gamma = self.config.gamma
        return batch, chunk_td_target(batch.reward, batch.valid, next_value, over, gamma)

    def _update_critics(self, generator: torch.Generator, stats: Means) -> None:
        c = self.config
        if self.critic_steps < c.mc_steps:
            batch, target = self._return_batch(generator)
        else:
            batch, target = self._td_batch(generator)
        # Loss, backward pass and optimiser step.
        q = self.chooser(shifted(batch.obs, c.shift, generator), batch.choice)
        loss = td_loss(q, target)
        self.critic_optimizer.zero_grad()
        loss.backward()
        norm = self.critic_optimizer.step(loss)
        # The target nets follow.
        self.target.follow(self.chooser, c.tau)
        self.critic_steps += 1
        stats.add(critic_loss=loss, critic_grad_norm=norm, q=q.mean(), td_target=target.mean())

    def _update_actor(self, generator: torch.Generator, stats: Means) -> None:
        c = self.config
        # States before and after chunks, so that first states are among them.
        rows = torch.randint(len(self.buffer), (c.actor_batch_size,), generator=generator)
        after = torch.rand(len(rows), generator=generator) < 0.5
        rows = rows.to(self.device)
        after = after.to(self.device) & ~self.buffer.data["terminated"][rows]
        states = [self.buffer.rows(rows[~after]).obs, self.buffer.rows(rows[after]).next_obs]
        obs = Obs.cat(states)
        # The best of N proposals. What is chosen after a chunk is kept for the critics.
        proposals = self.policy.propose(obs, self.policy.config.proposals, generator)
        values = self.chooser.values(obs, proposals)
        best = proposals[torch.arange(len(rows), device=self.device), values.argmax(1)]
        self.buffer.data["next_choice"][rows[after]] = best[len(states[0]) :]
        # Imitation of the choice, of own successes, and of demonstrations.
        whole = torch.ones(best.shape[:2], dtype=torch.bool, device=self.device)
        loss = self._imitation(obs, best, whole, generator)
        stats.add(choice_loss=loss, choice_gain=(values.amax(1) - values.mean(1)).mean())
        solved = self.buffer.data["solved"][: len(self.buffer)].nonzero().flatten()
        if c.success_coef and len(solved):
            pick = torch.randint(len(solved), (c.actor_batch_size,), generator=generator)
            own = self.buffer.rows(solved[pick.to(self.device)])
            own_loss = self._imitation(own.obs, own.choice, own.valid, generator)
            loss = loss + c.success_coef * own_loss
            stats.add(success_loss=own_loss)
        if c.bc_coef and self.demos is not None:
            obs, actions, mask = self.demos.batch(self.demos.draw(c.actor_batch_size, generator))
            d = self.device
            bc_loss = self._imitation(obs.to(d), actions.to(d), mask.to(d), generator)
            loss = loss + c.bc_coef * bc_loss
            stats.add(bc_loss=bc_loss)
        # Backward pass and optimiser step.
        self.actor_optimizer.zero_grad()
        loss.backward()
        norm = self.actor_optimizer.step(loss)
        self.actor_steps += 1
        stats.add(actor_grad_norm=norm)

    def _imitation(
        self, obs: Obs, actions: Tensor, mask: Tensor, generator: torch.Generator
    ) -> Tensor:
        obs = shifted(obs, self.config.shift, generator)
        if has_ability(self.policy, Imitates):
            return self.policy.imitation_loss(obs, actions, mask)
        return imitation_loss(self.policy, obs, actions, mask, generator)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Target critics, optimisers, counters and, with ``save_replay``, the buffer."""
        return {
            "target": self.target.state_dict(),
            "optimizers": [self.actor_optimizer.state_dict(), self.critic_optimizer.state_dict()],
            "steps": [self.critic_steps, self.actor_steps],
            "pending": [self.pending_critic, self.pending_actor],
            "replay": self.buffer.state_dict() if self.config.save_replay else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self.target.load_state_dict(state["target"])
        self.actor_optimizer.load_state_dict(state["optimizers"][0])
        self.critic_optimizer.load_state_dict(state["optimizers"][1])
        self.critic_steps, self.actor_steps = (int(x) for x in state["steps"])
        self.pending_critic, self.pending_actor = (float(x) for x in state["pending"])
        if state["replay"] is not None:
            self.buffer.load_state_dict(state["replay"])
