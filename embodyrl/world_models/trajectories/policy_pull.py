"""``PolicyPull``: the Gaussian by which a policy guides a trajectory model."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from embodyrl.policy import num_executed
from embodyrl.types import Obs
from embodyrl.world_models.trajectories.trajectory_model import TrajectoryModel

LEAST_STD = 0.1
"""Of a policy's actions, in standard deviations of the data: a policy that is always sure would
leave nothing of what the model knows to be possible."""


class PolicyPull:
    """Mean and std of what a policy would do in the states of estimated pieces.

    A Gaussian policy is that Gaussian, up to the error of ``proposals`` draws, and the guidance is
    the gradient of its log-probability. A flow policy has no such gradient that is cheap: its
    likelihood needs the divergence along the whole path. The Gaussian of its proposals stands in for
    it. Where it proposes several different things, the Gaussian is wide, and it pulls little. It is
    the policy as it acts: with its critics' choice, or its one-step head.

    A policy decides at rows 0, H, 2H, ... of a piece, for the H rows from there on.

    Args:
        policy: with ``sample`` and ``config``.
        model: whose units the Gaussian is in.
        told: (B,) instructions of the pieces.
        generator: of the proposals.
        proposals: chunks per decision.
    """

    def __init__(
        self,
        policy: Any,
        model: TrajectoryModel,
        told: Tensor,
        generator: torch.Generator,
        proposals: int = 8,
    ) -> None:
        self.policy = policy
        self.model = model
        self.sentences = [model.sentences[i] for i in told.tolist()]
        self.generator = generator
        self.proposals = proposals

    @torch.no_grad()
    def __call__(
        self, rows: Float[Tensor, "b l d"]
    ) -> tuple[Float[Tensor, "b l a"], Float[Tensor, "b l a"]]:
        """See ``functional.guided_diffusion.Pull``."""
        model = self.model
        horizon = num_executed(self.policy.config)
        state = model.spec.proprio_dim
        # The states of all decisions, in the env's units.
        decisions = rows[:, ::horizon, :state] * model.std[:state] + model.mean[:state]
        count = decisions.shape[1]
        # What the policy would do there, several times.
        obs = Obs(
            images={},
            proprio=decisions.flatten(0, 1),
            instruction=[s for s in self.sentences for _ in range(count)],
        )
        chunks = torch.stack(
            [
                self.policy.sample(obs, generator=self.generator, mode="eval").actions
                for _ in range(self.proposals)
            ]
        )
        # (proposals, B, rows, A) in the model's units; the last chunk may reach beyond the piece.
        chunks = chunks.unflatten(1, (len(rows), count)).flatten(2, 3)[:, :, : rows.shape[1]]
        chunks = (chunks - model.mean[model.actions]) / model.std[model.actions]
        return chunks.mean(0), chunks.std(0).clamp_min(LEAST_STD)
