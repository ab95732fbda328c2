"""What holds a policy while RL changes it: demonstrations, and the policy that training began with.

PPO, GRPO, FPO and NFT add two terms to the actor's loss:

    bc_coef w FM(demonstrations) + reference_coef E |v(x_t, t) - v_0(x_t, t)|^2

FM is the loss of imitation (flow matching, or the policy's own), on as many chunks of ``data.path``
as the gradient step has of the rollout. v_0 is the velocity of the policy before the first update,
at points x_t = (1 - t) a + t e of the flow towards the executed chunks a. Two policies with one
velocity field are one policy, so this distance takes the place of the KL to a reference (KDRL,
arXiv:2506.02208; Flow-GRPO, arXiv:2505.05470), also where no step has a density.

w is 1, or with ``bc_schedule=success`` 1 - p for the recent success rate p of training episodes.
HPT (arXiv:2509.04419) switches from imitation to RL where p passes a threshold, and SASR
(arXiv:2505.13026) by the norm of imitation's gradient; this is the smooth rule between the two ends.

With ``bc_schedule=unsolved`` each chunk of the demonstrations has a w of its own: 1 where the last
``TRIES`` training episodes with the same instruction all failed, and 0 elsewhere. So imitation
teaches what RL never does, as in ReLIFT (arXiv:2506.07527), which imitates the questions whose eight
answers are all wrong. An instruction with the success rate p is imitated in a share (1 - p)^TRIES of
the updates.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor

from embodyrl.algorithms.imitation import drawn_imitation, shortcut_steps
from embodyrl.algorithms.optim import Figures, Microbatches
from embodyrl.errors import UserError, refuse_unread
from embodyrl.functional.flow import flow_matching_pair, randn, sample_training_time
from embodyrl.functional.losses import flow_matching_loss
from embodyrl.policy import HasFlow, Imitates, has_ability, imitated_rows, num_executed
from embodyrl.ranges import Choice, NotNegative
from embodyrl.rollouts.batches import Episode, by_policy
from embodyrl.types import Obs

if TYPE_CHECKING:
    from embodyrl.data.demonstrations import Demonstrations

MEMORY = 64
"""Training episodes after which an older one counts 1/e as much in p."""
TRIES = 8
"""Failures in a row after which an instruction counts as unsolved."""
SCHEDULES = ("constant", "success", "unsolved")


@dataclass(frozen=True)
class AnchorConfig:
    """Settings of what holds the policy.

    Attributes:
        bc_coef: weight of the loss of imitation on ``data.path`` in the actor's loss.
        bc_schedule: ``constant``, or ``success``: the weight is multiplied by 1 - p, where p is the
            success rate of the last 64 training episodes or so; or ``unsolved``: only
            demonstrations are imitated whose instruction failed in its last 8 training episodes.
        reference_coef: weight of the squared distance between the velocities of the policy and of
            the one that training began with.
    """

    bc_coef: NotNegative = 0.0
    bc_schedule: Annotated[str, Choice(*SCHEDULES)] = "constant"
    reference_coef: NotNegative = 0.0

    def __post_init__(self) -> None:
        if not self.bc_coef:
            refuse_unread(self, "algorithm", ("bc_schedule",), "bc_coef=0 imitates nothing")


@dataclass
class ReferencePoints:
    """Points of the flow towards B chunks, and the velocity of the reference there.

    Attributes:
        noisy: (B, C, D).
        t: (B,) times.
        velocity: (B, C, D); NaN for chunks that do not count.
    """

    noisy: Tensor
    t: Tensor
    velocity: Tensor


class Anchors:
    """See the module's docstring.

    Attributes:
        demos: given by ``add_demos`` where ``bc_coef`` asks for some.
        failures: with ``bc_schedule=unsolved``: instruction -> failures in a row by now.
        reference: a frozen copy of the policy; None with ``reference_coef=0``.
    """

    def __init__(self, config: Any, policy: Any) -> None:
        self.config = config
        self.policy = policy
        self.demos: Demonstrations | None = None
        self.solved = 0.0
        self.played = 0.0
        self.failures: dict[str, int] = {}
        name = type(policy).__name__
        if config.bc_coef and not any(has_ability(policy, a) for a in (HasFlow, Imitates)):
            raise UserError(
                f"algorithm.bc_coef is {config.bc_coef}, but {name} has neither a flow nor an "
                "imitation loss of its own. Set it to 0."
            )
        if config.reference_coef and not has_ability(policy, HasFlow):
            raise UserError(
                f"algorithm.reference_coef is {config.reference_coef}, but {name} has no flow whose "
                "velocities could be compared. Set it to 0."
            )
        self.reference: Any = None
        if config.reference_coef:
            self.reference = copy.deepcopy(policy).requires_grad_(False)

    # Imitation.

    @property
    def weight(self) -> float:
        """Of the loss of imitation: ``bc_coef``, or ``bc_coef`` (1 - p).

        With ``bc_schedule=unsolved`` that of each chunk whose instruction is unsolved.
        """
        c = self.config
        if c.bc_schedule != "success":
            return c.bc_coef
        success = self.solved / self.played if self.played else 0.0
        return c.bc_coef * (1.0 - success)

    def note(self, episodes: Sequence[Episode]) -> None:
        """Follows the success of training episodes.

        The rate is that of an even draw; a row of failures is counted as it was played.
        """
        if self.config.bc_schedule == "constant":
            return
        keep = 1.0 - 1.0 / MEMORY
        for episode in by_policy(episodes):
            self.solved = keep * self.solved + episode.weight * episode.success
            self.played = keep * self.played + episode.weight
            before = self.failures.get(episode.instruction, 0)
            self.failures[episode.instruction] = 0 if episode.success else min(before + 1, TRIES)

    def _imitated(self, instructions: Sequence[str]) -> Tensor:
        """(B,) bool, whether a chunk with each instruction is imitated."""
        if self.config.bc_schedule != "unsolved":
            return torch.ones(len(instructions), dtype=torch.bool)
        return torch.tensor([self.failures.get(said, 0) >= TRIES for said in instructions])

    def imitation(
        self, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Figures]]]:
        """A batch of demonstrations: its rows, and what some of them add to the weighted loss.

        All that is random is drawn here. There may be no row, with ``bc_schedule=unsolved``.
        """
        # Draw chunks of demonstrations.
        assert self.demos is not None, "the runner adds them where bc_coef asks for some"
        policy = self.policy
        before, without_last = imitated_rows(policy)
        frames = self.demos.draw(count, generator, without_last=without_last)
        obs, actions, mask = self.demos.batch(frames, before=before)
        device = next(policy.parameters()).device
        obs = obs.to(device)
        # Draw what is random in their loss.
        loss, given, mask, noise = drawn_imitation(
            policy, actions.to(device), mask.to(device), generator
        )
        # Some rows add their share of the mean over all actions that count, of those chunks too
        # that are not imitated.
        total = mask.sum()
        weight = self.weight
        rows = self._imitated(obs.instruction).nonzero().flatten()

        def share(i: Tensor) -> tuple[Tensor, Figures]:
            own = loss(obs[i], *(x[i] for x in given), mask[i], *(x[i] for x in noise))
            return weight * own * (mask[i].sum() / total), {"bc_loss": own.detach()}

        return rows.to(device), share

    def imitation_gradient(
        self, count: int, microbatches: Microbatches, generator: torch.Generator
    ) -> tuple[list[Tensor | None], Figures]:
        """The gradient of the weighted loss for each parameter, and figures."""
        rows, share = self.imitation(count, generator)
        figures: Figures = {"bc_weight": self.weight * len(rows) / count}
        if not len(rows):
            return [None] * len(microbatches.parameters), figures
        _, found = microbatches.backward(rows, share)
        gradient = [p.grad for p in microbatches.parameters]
        return gradient, {**found, **figures}

    # The reference.

    @torch.no_grad()
    def reference_points(
        self,
        obs: Obs,
        chunks: Tensor,
        rows: Tensor,
        microbatches: Microbatches,
        size: int,
        generator: torch.Generator,
    ) -> ReferencePoints:
        """A point of the flow towards each of B chunks, for all epochs of an update.

        Args:
            obs: B observations.
            chunks: (B, C, D) that were executed, in the policy's units.
            rows: those that count.
            microbatches: compute in pieces that fit the memory.
            size: rows of a piece, at most.
            generator: of times and noise.
        """
        # A time and a noisy chunk each.
        t = sample_training_time(len(chunks), generator, device=chunks.device)
        if shortcut_steps(self.policy):
            # Only at these times does such a policy take a step.
            steps = self.policy.config.num_denoise_steps
            t = (t * steps).ceil() / steps
        noisy, _ = flow_matching_pair(chunks, t, randn(chunks.shape, generator, chunks.device))
        # The reference's velocity there, of the rows that count.
        velocity = torch.full_like(noisy, torch.nan)
        velocity[rows] = microbatches.forward(
            rows, lambda i: _velocity(self.reference, obs[i], noisy[i], t[i]), size
        )
        return ReferencePoints(noisy, t, velocity)

    def distance(self, obs: Obs, points: ReferencePoints, i: Tensor) -> Tensor:
        """Mean squared difference of the velocities over the executed actions of the rows ``i``."""
        policy = self.policy
        new = _velocity(policy, obs[i], points.noisy[i], points.t[i])
        h = num_executed(policy.config)
        a = policy.spec.action_dim
        return flow_matching_loss(new[:, :h, :a], points.velocity[i][:, :h, :a])

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """The success rate that is followed, and the reference; nothing where neither is used."""
        c = self.config
        if not (c.bc_coef or c.reference_coef):
            return {}
        reference = None if self.reference is None else self.reference.state_dict()
        state = {"success": [self.solved, self.played], "reference": reference}
        if c.bc_schedule == "unsolved":
            state["failures"] = [list(self.failures), list(self.failures.values())]
        return {"anchors": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``, within an algorithm's whole state."""
        if not self.state_dict():
            return
        self.solved, self.played = map(float, state["anchors"]["success"])
        if self.config.bc_schedule == "unsolved":
            self.failures = dict(zip(*state["anchors"]["failures"], strict=True))
        if self.reference is not None:
            self.reference.load_state_dict(state["anchors"]["reference"])


def _velocity(policy: Any, obs: Obs, noisy: Tensor, t: Tensor) -> Tensor:
    return policy.velocity(policy.encode(obs), noisy[:, None], t[:, None])[:, 0]


def add_gradient(parameters: Sequence[Any], gradient: Sequence[Tensor | None]) -> None:
    """Adds to the gradient that the parameters have."""
    for p, more in zip(parameters, gradient, strict=True):
        if more is not None:
            p.grad = more if p.grad is None else p.grad + more
