"""WSRL: fine-tunes a pretrained policy without keeping its data (arXiv:2412.07762).

What ruins a pretrained policy at the start of online learning is that the critics know nothing of
its own states. WSRL first lets the frozen policy act (``warmup_chunks``), then lets the critics
learn from that alone (``critic_warmup``), and then goes on as RLPD without demonstrations:
LayerNorm, an ensemble, a high update-to-data ratio. WSRL's critics come from offline RL; ours,
after imitation, start from nothing, which is what ``critic_warmup`` makes up for.
"""

from __future__ import annotations

from dataclasses import dataclass

from embodyrl.algorithms.sac_flow import SACFlow, SACFlowConfig
from embodyrl.errors import UserError


@dataclass(frozen=True)
class WSRLConfig(SACFlowConfig):
    """Settings of WSRL: those of ``SACFlowConfig`` with other defaults."""

    name: str = "wsrl"
    warmup_chunks: int = 2_000
    random_warmup: bool = False
    critic_warmup: int = 1_000
    utd: float = 4.0
    policy_delay: int = 4
    critic_lr: float = 3e-4
    num_critics: int = 10
    critic_norm: str = "layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.random_warmup or self.warmup_chunks == 0:
            raise UserError(
                "WSRL warms up with the pretrained policy's own rollouts: algorithm.random_warmup "
                "must be false and algorithm.warmup_chunks above 0. To start from nothing use "
                "algorithm.name=sac_flow."
            )
        if self.bc_coef:
            raise UserError(
                "WSRL keeps no offline data, so algorithm.bc_coef must be 0; sac_flow and rlpd "
                "read it."
            )


class WSRL(SACFlow):
    """See the module's docstring."""

    Config = WSRLConfig
