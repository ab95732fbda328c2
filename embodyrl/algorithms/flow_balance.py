"""``FlowBalanceActor``: match the distribution of rewards in place of maximising them (FlowRL).

The clipped surrogate pushes towards whatever is worth most. FlowRL (arXiv:2509.15207) asks for a
policy that does what is worth more as much more often as the temperature says, and so keeps several
ways to succeed:

    pi(a|s) = pi_ref(a|s) exp(beta A) / Z(s)

The loss is the squared error of that balance in logarithms (trajectory balance of GFlowNets), with
the partition function Z(s) learned beside:

    w (log Z(s) + [log pi(a|s) - log pi_ref(a|s)] / L - beta A)^2,    w = clip(pi / pi_old)

w has no gradient. L is what ``algorithm.ratio`` divides log-probabilities by: the length
normalisation of FlowRL is ``per_step`` or ``per_dim``. pi_ref is the policy that training began with,
and the value head, which GRPO does not need, says log Z(s). FlowRL balances whole answers; here each
chunk is balanced with the advantage of its episode, so what is matched is the mean advantage given
the chunk. At the first step, where log Z = 0 and pi = pi_ref, the gradient is 2 beta times that of
the policy gradient.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from embodyrl.algorithms.clipped_actor import ClippedActor
from embodyrl.algorithms.optim import Figures
from embodyrl.errors import UserError
from embodyrl.functional.losses import flow_balance_loss
from embodyrl.policy import HasValue, has_ability
from embodyrl.types import Obs, PolicyEval


class FlowBalanceActor(ClippedActor):
    """See the module's docstring.

    Attributes:
        reference: a frozen copy of the policy that training began with.
    """

    config: Any

    def __init__(self, config: Any, policy: Any) -> None:
        super().__init__(config, policy)
        self.reference = copy.deepcopy(policy).requires_grad_(False)
        self.reference_logprob = torch.empty(0)

    def _check(self) -> None:
        """Refuses a policy without a value head as well, or with one that sees nothing yet."""
        super()._check()
        why = ""
        if not has_ability(self.policy, HasValue):
            why = f"{type(self.policy).__name__} has none"
        elif getattr(self.policy, "found", None) is not None:
            why = "that of policy.critic=found needs lessons in seeing, which only ppo gives"
        if why:
            raise UserError(
                "algorithm.objective=flow_balance learns the partition function by a value head, and "
                f"{why}. Set algorithm.objective=clipped, or use another policy or critic."
            )

    def _trained(self) -> list[nn.Parameter]:
        """The value head as well: it says log Z."""
        return [*self.policy.actor_parameters(), *self.policy.critic_parameters()]

    def update(
        self, obs: Obs, trace: Any, logprob: Tensor, advantage: Tensor, rows: Tensor, **given: Any
    ) -> dict[str, float]:
        """As ``ClippedActor.update``; the reference scores what was done first."""
        if self.iteration == 0:
            self.policy.fit_critic_inputs(obs)
        scored = torch.full_like(logprob, math.nan)
        if len(rows):
            scored[rows] = self.microbatches.forward(
                rows,
                lambda i: self.reference.evaluate(obs[i], trace[i]).logprob,
                self.microbatches.size or self.config.minibatch_size,
            )
        self.reference_logprob = self._decision_logprob(scored, trace)
        return super().update(obs, trace, logprob, advantage, rows, **given)

    def _policy_loss(
        self,
        new: PolicyEval,
        trace: Any,
        i: Tensor,
        old: Tensor,
        advantage: Tensor,
        weight: Tensor,
    ) -> tuple[Tensor, Figures]:
        c = self.config
        assert new.value is not None
        loss, figures = flow_balance_loss(
            self._decision_logprob(new.logprob, trace),
            old[i],
            self.reference_logprob[i],
            new.value,
            advantage[i],
            c.balance_beta,
            c.clip_range,
            c.clip_range_high or c.clip_range,
            weight[i],
        )
        return loss, {**figures}

    def state_dict(self) -> dict[str, Any]:
        """As ``ClippedActor.state_dict``, and the reference."""
        return {**super().state_dict(), "reference": self.reference.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        super().load_state_dict(state)
        self.reference.load_state_dict(state["reference"])
