"""DSRL: SAC over the noise that a frozen flow policy starts from (arXiv:2506.15799).

The flow maps noise w and observation to an action chunk by its noise-free ODE. Seen from outside, w
is the action: a small Gaussian policy chooses it, the critics judge (observation, w), and nothing
is propagated through the flow, which may be as large as it likes, or sit behind an API. With w ~
N(0, I), as in the warm-up, it is the base policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embodyrl.algorithms.sac_flow import Following, SACFlow, SACFlowConfig
from embodyrl.errors import UserError, refuse_unread
from embodyrl.functional.flow import complete_noise, randn
from embodyrl.policy import HasFeatures, Steerable, num_executed
from embodyrl.types import Obs


@dataclass(frozen=True)
class DSRLConfig(SACFlowConfig):
    """Settings of DSRL: those of ``SACFlowConfig`` with other defaults.

    ``target_entropy`` is per dim of the noise.
    """

    name: str = "dsrl"
    warmup_chunks: int = 1_000
    random_warmup: bool = False
    utd: float = 2.0
    critic_norm: str = "layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.random_warmup:
            raise UserError(
                "DSRL warms up with its base policy: algorithm.random_warmup must be false."
            )
        if self.bc_coef:
            raise UserError(
                "DSRL leaves the flow as it is, so nothing would read algorithm.bc_coef; it must "
                "be 0."
            )
        refuse_unread(self, "algorithm", ("entropy",), "DSRL's action is the noise that it chooses")


class DSRL(SACFlow):
    """See the module's docstring."""

    Config = DSRLConfig
    needs = (HasFeatures, Steerable)
    max_choice = 10.0  # noise: N(0, I) while it warms up, and bounded after that

    def _check_actor(self) -> None:
        if self.policy.steer is None:
            raise UserError(
                "DSRL trains a policy over the flow's initial noise, and this policy has none. "
                "Set policy.steer_width (128 is plenty), and run.init_checkpoint to the policy "
                "that is to be steered."
            )

    def _decision_size(self) -> int:
        return num_executed(self.policy.config) * self.policy.spec.action_dim

    def _actor_parameters(self) -> list[nn.Parameter]:
        return list(self.policy.steer.parameters())

    def _sample_choice(
        self, obs: Obs, generator: torch.Generator, seen: Tensor | None = None
    ) -> Following:
        # The choice is the noise; no gradient goes through the flow.
        with torch.no_grad():
            context = self.policy.encode(obs)
        noise, logprob = self.policy.steer.sample(self.policy.features(context), generator)
        return noise, logprob, self._seen(obs, context, seen)

    def act(self, obs: Obs, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See ``rollouts.collect.Act``: it chooses the noise, and the flow makes actions of it."""
        context = self.policy.encode(obs)
        if self.collected < self.config.warmup_chunks:
            shape = (len(obs), num_executed(self.policy.config), self.policy.spec.action_dim)
            noise = randn(shape, generator, self.device)
        else:
            noise, _ = self.policy.steer.sample(self.policy.features(context), generator)
        start = complete_noise(noise, self.policy.flow_shape, generator)
        return self.policy.decode(context, start), noise
