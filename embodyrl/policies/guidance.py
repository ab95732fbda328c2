"""RL guidance: choose at evaluation how far to move from the base policy (arXiv:2508.21016).

Training by RL changes the velocity from v_b of the base policy to v. A guided policy acts with
v_b + w (v - v_b):

    w = 0        the base policy
    0 < w < 1    between the two
    w = 1        the trained policy
    w > 1        further in the direction of training, as in classifier-free guidance

Both networks run in every denoising step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.policies.flow_base import FlowPolicy, Generators
from embodyrl.policies.noise_policy import initial_noise
from embodyrl.policies.sample_path import integrate
from embodyrl.policy import Mode, num_executed
from embodyrl.types import ActionSample, Obs


def _normalized_samples(policy: FlowPolicy) -> Tensor:
    """Two fixed action chunks (2, H, A) in a policy's normalised units.

    Two points determine an affine or tanh normalisation, so policies with the same result use the
    same units.
    """
    actions = torch.tensor([-0.5, 1.0], device=next(policy.parameters()).device)
    return policy.normalize_action(
        actions[:, None, None].expand(2, policy.config.horizon, policy.spec.action_dim)
    )


class GuidedPolicy:
    """Acts with a mixture of the velocities of two policies; see the module's docstring.

    Args:
        policy: the trained one.
        base: the one from which the training started.
        weight: w, at least 0.

    Raises:
        UserError: one is not a flow policy, or their flows differ in shape, steps or units.
    """

    def __init__(self, policy: Any, base: Any, weight: float) -> None:
        for one in (policy, base):
            if not isinstance(one, FlowPolicy):
                raise UserError(
                    f"Guidance mixes the velocities of two flow policies, and {one.config.name} "
                    "is not a flow policy."
                )
        if weight < 0:
            raise UserError(
                f"The guidance is {weight}; it must not be negative. 0 is the base, 1 the trained "
                "policy."
            )
        if getattr(policy, "chooses", False):
            raise UserError(
                "The policy takes the best of several proposals, which were not guided. Set "
                "policy.proposals=1 to guide the policy alone."
            )
        if policy.acts_in_one_step:
            raise UserError(
                "The policy acts by its one-step head, which has no velocity to guide. Set "
                "policy.one_step_width=0 to guide its flow."
            )
        # Velocities can only be mixed if they belong to the same steps, shape and units.
        flow, base_flow = (
            (one.config.num_denoise_steps, num_executed(one.config), *one.flow_shape)
            for one in (policy, base)
        )
        if flow != base_flow or not torch.equal(
            _normalized_samples(policy), _normalized_samples(base)
        ):
            raise UserError(
                "The two policies' flows do not go together: chunk, number of denoising steps and "
                "the normalisation of actions must be the same. Give the checkpoint from which the "
                "training started."
            )
        self.policy = policy
        self.base = base
        self.weight = weight
        self.config = policy.config
        self.spec = policy.spec

    @torch.no_grad()
    def sample(self, obs: Obs, *, generator: Generators, mode: Mode) -> ActionSample:
        """See ``Policy.sample``; only in ``"eval"`` mode.

        Raises:
            UserError: another mode, because the mixture has no likelihood.
        """
        if mode != "eval":
            raise UserError("A guided policy can only be evaluated, not trained.")
        policy = self.policy
        base = self.base
        context = policy.encode(obs)
        base_context = base.encode(obs)

        def mixed(x: Tensor, t: Tensor) -> tuple[Tensor, None]:
            v = policy.step_inputs(context, x, t)[0]
            v_base = base.step_inputs(base_context, x, t)[0]
            return torch.lerp(v_base, v, self.weight), None

        # From here on as FlowPolicy.sample, with the mixed velocity.
        features = policy.features(context)
        noise = initial_noise(policy, features, generator, mode)
        end = integrate(mixed, policy.transition, noise)
        return ActionSample(policy.normalize_action.inverse(policy.executed(end)).clamp(-1.0, 1.0))
