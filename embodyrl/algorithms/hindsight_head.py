"""``HindsightHead``: features of an observation must tell where its episode leads.

    obs --policy.encode, policy.summary--> (B, F) --head--> J places (B, J, P)

An auxiliary loss beside imitation. Where the robot itself was later in a demonstration labels what
it saw before, as it does for ``policies.localiser``. A few demonstrations say little about what
matters in a picture if actions alone are to be told: the next ones mostly continue the last ones.
Where the hand will grasp depends on where the object is. The head is not a part of the policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from embodyrl.algorithm import Peers
from embodyrl.algorithms.optim import GuardedAdam
from embodyrl.errors import UserError
from embodyrl.policies.localiser import ENDS, HIDDEN, LOCALISER_LR, ON_THE_WAY, PLACES, SMALL_ERROR
from embodyrl.policies.normalize import Normalizer
from embodyrl.policy import Summarises, has_ability

if TYPE_CHECKING:
    from embodyrl.data.demonstrations import Demonstrations


class HindsightHead(nn.Module):
    """The head and its optimiser; the policy's own optimiser trains what it reads.

    Args:
        policy: with the ability ``Summarises``, and pictures to look at.

    Raises:
        UserError: the policy cannot be taught so.
    """

    def __init__(self, policy: Any) -> None:
        super().__init__()
        why = ""
        if not has_ability(policy, Summarises):
            why = f"{type(policy).__name__} gives no summary of an observation (Summarises)"
        elif not policy.spec.cameras:
            why = f"{policy.spec.name} has no pictures"
        if why:
            raise UserError(
                f"algorithm.hindsight_coef teaches a policy to see where episodes lead, but {why}. "
                "Set algorithm.hindsight_coef=0."
            )
        dim = policy.spec.proprio_dim
        self.normalize = Normalizer(dim)
        self.net = nn.Sequential(
            nn.Linear(policy.features_dim, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, PLACES * dim)
        )
        self.to(next(policy.parameters()).device)
        self.optimizer = GuardedAdam(self.net.parameters(), LOCALISER_LR, 1.0, "hindsight head")

    def fit_inputs(self, demos: Demonstrations) -> None:
        """Normalises places by the proprioception of demonstrations.

        Raises:
            UserError: none of them was solved.
        """
        if not bool(demos.success.any()):
            raise UserError(
                "No demonstration was solved, so nothing says where the task leads. Set "
                "algorithm.hindsight_coef=0, or give demonstrations that succeed."
            )
        self.normalize.fit(demos.proprio.to(self.normalize.mean.device))

    def labels(self, demos: Demonstrations, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Where the episodes of frames (B,) led, (B, J, P), and whether they were solved (B,)."""
        places, solved = demos.later_proprio(frames, ENDS, ON_THE_WAY)
        device = self.normalize.mean.device
        return self.normalize(places.to(device)), solved.to(device)

    def loss(
        self,
        summary: Float[Tensor, "b f"],
        places: Float[Tensor, "b j p"],
        solved: Bool[Tensor, " b"],
    ) -> Tensor:
        """The sum over solved episodes of the Huber loss of their places.

        Raises:
            UserError: nothing that is trained computes the summary.
        """
        if torch.is_grad_enabled() and not summary.requires_grad:
            raise UserError(
                "The features of this policy are frozen, so algorithm.hindsight_coef cannot teach "
                "them. Set algorithm.hindsight_coef=0, or train the backbone (policy.train)."
            )
        told = self.net(summary.float()).view(places.shape)
        error = F.smooth_l1_loss(told, places, beta=SMALL_ERROR, reduction="none")
        return (error.mean((1, 2)) * solved).sum()

    def step(self, loss: Tensor, peers: Peers | None = None) -> None:
        """One gradient step of the head itself.

        Args:
            loss: whose gradient was computed.
            peers: other processes that computed a share of it; None for this one alone.
        """
        if peers is not None:
            for p in self.net.parameters():
                assert p.grad is not None
                p.grad = peers.gather(p.grad[None]).sum(0)
        self.optimizer.step(loss)
        self.optimizer.zero_grad()

    def whole_state(self) -> dict[str, Any]:
        """Weights and optimiser."""
        return {"weights": self.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_whole_state(self, state: dict[str, Any]) -> None:
        """The inverse of ``whole_state``."""
        self.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
