"""``EditActor``: trains the small actor that edits what a policy proposes (``chooser.Editor``).

    reference   r, one proposal of the policy at each state of the replay buffer
    edited      a = editor(s, m r), where m is 0 for a share of the rows (reference dropout), else 1
    loss        -mean_e Q_e(s, a) + beta mean (a - r)^2

Without dropout and beta it is the edit policy of EXPO (arXiv:2507.07986) or a residual policy
(ResFiT, arXiv:2509.19301), without their noise. Both together are the actor's loss of RLT
(arXiv:2604.23073): dropout keeps the actor from copying its reference, and beta keeps it near.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from embodyrl.algorithms.episode_buffer import EpisodeBuffer, without
from embodyrl.algorithms.optim import GuardedAdam, Means
from embodyrl.errors import UserError, refuse_unread
from embodyrl.ranges import NotNegative, Range
from embodyrl.types import EnvSpec, Obs

REFERENCES = ("reference", "next_reference")
"""Columns of the buffer: a proposal before and after each chunk."""
PROPOSED_AT_ONCE = 64


@dataclass(frozen=True)
class EditConfig:
    """How the editor of ``policy.edit_scale`` is trained.

    Attributes:
        edit_bc_coef: weight of the mean squared distance of edited actions from the proposal, in
            units of the value (RLT).
        edit_dropout: share of the rows in which the editor is not told the proposal (RLT). It must
            find the chunk by itself there, so ``policy.edit_scale`` must be 1 or more.
    """

    edit_bc_coef: NotNegative = 0.0
    edit_dropout: Annotated[float, Range(0, 1, open_high=True)] = 0.0


def check_edit(config: Any, policy: Any) -> None:
    """Refuses settings of the editor that nothing would read, or that do not go together.

    Raises:
        UserError: a setting without an editor, or dropout with an editor that cannot go far.
    """
    scale = policy.config.edit_scale
    if not scale:
        names = ("edit_bc_coef", "edit_dropout")
        refuse_unread(config, "algorithm", names, "policy.edit_scale=0 edits nothing")
    elif config.edit_dropout and scale < 1:
        raise UserError(
            f"algorithm.edit_dropout is {config.edit_dropout}, but policy.edit_scale={scale} keeps "
            "an action near its proposal, and a dropped proposal is 0. Set policy.edit_scale=2, or "
            "leave the dropout out."
        )


def reference_columns(spec: EnvSpec, horizon: int) -> dict[str, Any]:
    """The columns that ``EditActor`` needs in a buffer."""
    return {name: ((horizon, spec.action_dim), torch.float32) for name in REFERENCES}


class EditActor:
    """See the module's docstring.

    Args:
        config: of PA-RL, online or offline.
        policy: whose chooser has an editor.
        buffer: with the columns ``REFERENCES``.
    """

    def __init__(self, config: Any, policy: Any, buffer: EpisodeBuffer) -> None:
        self.config = config
        self.policy = policy
        self.buffer = buffer
        self.editor = policy.chooser.editor
        self.optimizer = GuardedAdam(
            self.editor.parameters(), config.critic_lr, config.max_grad_norm, "editor"
        )

    def note_references(self, rows: Tensor, generator: torch.Generator) -> None:
        """Draws a proposal before and after the chunks at those places, which were played in turn.

        What was executed is no reference: it is edited itself, or a person's.
        """
        data = self.buffer.data
        for part in rows.split(PROPOSED_AT_ONCE):
            data["reference"][part] = self._propose(self.buffer.rows(part).obs, generator)
        # The state after a chunk is mostly the one before the next.
        before, after = self.buffer.next_ones(rows)
        data["next_reference"][before] = data["reference"][after]
        for part in without(rows, before).split(PROPOSED_AT_ONCE):
            data["next_reference"][part] = self._propose(self.buffer.rows(part).next_obs, generator)

    def step(self, rows: Tensor, generator: torch.Generator, stats: Means) -> None:
        """One gradient step at the states of the chunks at those places."""
        c = self.config
        features = self.buffer.data["features"][rows]
        reference = self.buffer.data["reference"][rows]
        # Reference dropout: a whole chunk is told or not.
        kept = torch.ones(len(rows))
        if c.edit_dropout:
            kept = torch.rand(len(rows), generator=generator) >= c.edit_dropout
        kept = kept.to(reference)
        told = reference * kept[:, None, None]
        # What is edited is to be worth more, and stay near the reference.
        edited = self.editor(features, told)
        distance = (edited - reference).square().mean()
        value = self.policy.chooser.critics(features, edited).mean()
        loss = c.edit_bc_coef * distance - value
        # The gradient goes through the critics, and not into them.
        self.optimizer.zero_grad()
        loss.backward(inputs=self.optimizer.parameters)
        self.optimizer.step(loss)
        # How far it goes where it knows the reference, as in an episode.
        change = (edited.detach() - reference).abs().mean((1, 2))
        stats.add(edit=(change * kept).sum() / kept.sum().clamp_min(1))

    def _propose(self, obs: Obs, generator: torch.Generator) -> Tensor:
        return self.policy.propose(obs, 1, generator)[:, 0]
