"""The settings of SAC-Flow, which RLPD, WSRL and DSRL share with other defaults."""

from __future__ import annotations

from dataclasses import dataclass

from embodyrl.algorithms.critics import NORMS
from embodyrl.errors import UserError, did_you_mean, refuse_unread

ENTROPIES = ("action", "path")


@dataclass(frozen=True)
class SACFlowConfig:
    """Settings of SAC-Flow.

    Attributes:
        name: registry name.
        num_chunks: T, chunks per env and iteration.
        capacity: chunks in the replay buffer, allocated at the start.
        save_replay: whether checkpoints hold the buffer; without it a resumed run collects
            ``warmup_chunks`` anew.
        warmup_chunks: collected before the first gradient step.
        random_warmup: those are uniformly random actions, for a policy that starts from nothing,
            not the policy's own.
        critic_warmup: gradient steps, the first ones, in which only the critics learn; for a policy
            worth keeping.
        utd: update-to-data ratio: gradient steps of the critics per chunk collected.
        policy_delay: critic steps per step of the actor and the temperature.
        batch_size: chunks per gradient step.
        gamma: discount per action.
        lr: of the actor (Adam).
        critic_lr: of the critics (Adam).
        alpha_lr: of the temperature (Adam).
        alpha: the temperature at the start; it stays there if ``alpha_lr`` is 0.
        entropy: whose the temperature holds, of the ``action`` or of the joint ``path``; see the
            module.
        target_entropy: at how many nats per action dim, for the path also per denoising step;
            negative. In all that is target_entropy * H * A, or target_entropy * K * H * A, in the
            units of actions.
        entropy_backup: whether TD targets hold the entropy bonus of the next decision.
        bc_coef: weight of the flow matching loss on ``data.path`` in the actor's loss
            (offline-to-online).
        num_critics: E; a target is the smaller value of two of them, drawn for every step (REDQ,
            arXiv:2101.05982).
        shared_critic: critics see the actor's features, also where ``policy.critic`` is privileged.
        own_encoder: critics see the features of an encoder of their own instead, whatever
            ``policy.critic`` is: a copy of the actor's that their loss trains further.
        critic_shift: pixels, at most, by which pictures are shifted at random before it sees them
            (DrQ, arXiv: 2004.13649).
        critic_width: of their hidden layers.
        critic_layers: hidden layers.
        critic_norm: ``none``, ``layer`` (LayerNorm), or ``batch``: CrossQ, which has no target
            nets.
        tau: share by which target nets follow at each step; not read by CrossQ.
        max_grad_norm: of the actor and of the critics, each; 0 means no bound. The critics' norms
            grow with returns, and a bound that always binds makes all batches weigh the same.
    """

    name: str = "sac_flow"
    num_chunks: int = 1
    capacity: int = 200_000
    save_replay: bool = True
    warmup_chunks: int = 5_000
    random_warmup: bool = True
    critic_warmup: int = 0
    utd: float = 1.0
    policy_delay: int = 2
    batch_size: int = 256
    gamma: float = 0.99
    lr: float = 3e-4
    critic_lr: float = 1e-3
    alpha_lr: float = 1e-3
    alpha: float = 0.2
    entropy: str = "action"
    target_entropy: float = -1.0
    entropy_backup: bool = True
    bc_coef: float = 0.0
    num_critics: int = 2
    shared_critic: bool = False
    own_encoder: bool = False
    critic_shift: int = 4
    critic_width: int = 256
    critic_layers: int = 2
    critic_norm: str = "none"
    tau: float = 0.005
    max_grad_norm: float = 0.0

    def __post_init__(self) -> None:
        if self.utd <= 0:
            raise UserError(
                f"algorithm.utd is {self.utd}, so nothing would be learned: it is the number of "
                "gradient steps per chunk collected and must be above 0."
            )
        if self.target_entropy >= 0:
            raise UserError(
                f"algorithm.target_entropy is {self.target_entropy}; the entropy of actions in "
                "[-1, 1] is a negative number of nats per dim for all but near-uniform noise. "
                "SAC's usual target is -1."
            )
        if self.entropy not in ENTROPIES:
            raise UserError(
                f"There is no entropy of {self.entropy!r}. {did_you_mean(self.entropy, ENTROPIES)}"
            )
        if self.critic_norm not in NORMS:
            raise UserError(
                f"There is no critic_norm {self.critic_norm!r}. "
                f"{did_you_mean(self.critic_norm, NORMS)}"
            )
        if not self.own_encoder:
            refuse_unread(
                self, "algorithm", ("critic_shift",), "own_encoder=false shifts no pictures"
            )
        if self.critic_norm == "batch":
            refuse_unread(
                self, "algorithm", ("tau",), "critic_norm=batch (CrossQ) has no target nets"
            )
        if not self.alpha_lr:
            refuse_unread(
                self, "algorithm", ("target_entropy",), "alpha_lr=0 leaves the temperature as it is"
            )
        if not 0 < self.gamma <= 1 or not 0 < self.tau <= 1:
            raise UserError("algorithm.gamma and algorithm.tau must lie in (0, 1].")
        if self.critic_shift < 0:
            raise UserError(
                f"algorithm.critic_shift is {self.critic_shift}; it is a number of pixels, 0 for "
                "none."
            )
        if self.num_critics < 2:
            raise UserError(
                f"algorithm.num_critics is {self.num_critics}; the smaller value of two needs at "
                "least 2."
            )
        for key in ("num_chunks", "policy_delay", "batch_size"):
            if getattr(self, key) < 1:
                raise UserError(f"algorithm.{key} is {getattr(self, key)}; it must be at least 1.")
        if self.alpha <= 0 or self.warmup_chunks < 0 or self.critic_warmup < 0 or self.bc_coef < 0:
            raise UserError(
                "algorithm.alpha must be above 0, and warmup_chunks, critic_warmup and bc_coef "
                "not below it."
            )
