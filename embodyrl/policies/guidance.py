"""RL guidance: how far a policy goes from its base is chosen when it acts (arXiv:2508.21016).

Training by RL moves the velocity from that of the base policy, v_b, to v. Acting with v_b + w (v -
v_b) is the base for w = 0 and the trained policy for w = 1; above 1 it goes further the way that
training went, as classifier-free guidance does, and in between it keeps more of the base. It costs
a second pass per step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.policies.flow_base import FlowPolicy, Generators, pad
from embodyrl.policies.noise_policy import initial_noise
from embodyrl.policies.sample_path import integrate
from embodyrl.policy import Mode
from embodyrl.types import ActionSample, Obs


def _units(policy: FlowPolicy) -> Tensor:
    """What two actions are in the units of a policy's flow."""
    actions = torch.tensor([-0.5, 1.0], device=next(policy.parameters()).device)
    return policy.normalize_action(
        actions[:, None, None].expand(2, policy.config.horizon, policy.spec.action_dim)
    )


class GuidedPolicy:
    """Acts, noise-free, with the velocities of two policies mixed; see the module.

    Args:
        policy: the trained one.
        base: the one that it started from.
        weight: w, at least 0.

    Raises:
        UserError: they are no flow policies, or their flows mean different things.
    """

    def __init__(self, policy: Any, base: Any, weight: float) -> None:
        for one in (policy, base):
            if not isinstance(one, FlowPolicy):
                raise UserError(
                    f"Guidance mixes the flows of two VLAs, and {one.config.name} is none."
                )
        if weight < 0:
            raise UserError(
                f"The guidance is {weight}; it must not be negative. 0 is the base, 1 the trained "
                "policy."
            )
        flows = [
            (one.config.num_denoise_steps, one.config.horizon, *one.flow_shape)
            for one in (policy, base)
        ]
        if flows[0] != flows[1] or not torch.equal(_units(policy), _units(base)):
            raise UserError(
                "The two policies' flows do not go together: chunk, number of denoising steps and "
                "the normalisation of actions must be the same. Give the checkpoint that the "
                "training started from."
            )
        self.policy = policy
        self.base = base
        self.weight = weight
        self.config = policy.config
        self.spec = policy.spec

    @torch.no_grad()
    def sample(self, obs: Obs, *, generator: Generators, mode: Mode) -> ActionSample:
        """See ``Policy.sample``; only in ``"eval"`` mode, for the mixture has no likelihood of its own."""
        if mode != "eval":
            raise UserError("A guided policy only acts: there is nothing to train in it.")
        policy = self.policy
        base = self.base
        context = policy.encode(obs)
        before = base.encode(obs)

        def mixed(x: Tensor, t: Tensor) -> tuple[Tensor, None]:
            v = policy.step_inputs(context, x, t)[0]
            v_base = base.step_inputs(before, x, t)[0]
            return torch.lerp(v_base, v, self.weight), None

        shape = (len(obs), *policy.flow_shape)
        noise = initial_noise(policy.steer, policy.features(context), shape, generator, mode)
        end = integrate(mixed, policy.config.num_denoise_steps, pad(noise, policy.flow_shape))
        return ActionSample(policy.normalize_action.inverse(policy.executed(end)).clamp(-1.0, 1.0))
