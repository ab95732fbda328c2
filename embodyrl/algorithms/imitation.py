"""The loss of imitation, for every algorithm that learns from demonstrations.

Of a policy with a flow it is flow matching (arXiv:2210.02747); another policy brings its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from embodyrl.functional.flow import flow_matching_pair, randn, sample_training_time
from embodyrl.functional.losses import flow_matching_loss
from embodyrl.policies.flow_base import pad
from embodyrl.policies.sample_path import given_prefix
from embodyrl.policy import FlowPolicyProtocol, Imitates, has_ability, imitation_noise
from embodyrl.types import DenoisingTrace, Obs


def imitation_loss(
    policy: FlowPolicyProtocol,
    obs: Obs,
    actions: Tensor,
    mask: Tensor,
    generator: torch.Generator,
    time: str = "uniform",
) -> Tensor:
    """The flow matching loss of actions (B, H, A), those with ``mask`` (B, H).

    Times and noise are drawn at random. Where the policy plans further than H, nobody knows the
    rest, so it is the policy's own plan in one step; it has no loss.
    """
    # A longer plan: one step from noise to actions.
    context = policy.encode(obs)
    plan = None
    if policy.flow_shape[0] > actions.shape[1]:
        noise = randn((len(actions), *policy.flow_shape), generator, actions.device)
        with torch.no_grad():
            start = torch.ones(len(actions), 1, device=noise.device)
            plan = noise - policy.velocity(context, noise[:, None], start)[:, 0]
    noisy, t, target = noisy_pair(policy, actions, generator, time, plan)
    return velocity_loss(policy, context, noisy, t, target, mask)


def noisy_pair(
    policy: FlowPolicyProtocol,
    actions: Tensor,
    generator: torch.Generator,
    time: str,
    plan: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws a point of the flow towards each chunk of actions (B, H, A).

    Args:
        policy: whose flow it is.
        actions: in the env's units.
        generator: of times and noise.
        time: how times are drawn; see ``SFTConfig``.
        plan: chunks (B, C, D) whose part beyond H is taken; None takes zeros.

    Returns:
        Noisy chunks (B, C, D), their times (B,), and the velocity (B, H, A) at them.
    """
    h, a = actions.shape[1:]
    clean = pad(policy.normalize_action(actions), policy.flow_shape)
    if plan is not None:
        clean = torch.cat([clean[:, :h], plan[:, h:]], dim=1)
    noise = randn(tuple(clean.shape), generator, clean.device)
    t = sample_training_time(len(clean), generator, time, clean.device)
    noisy, target = flow_matching_pair(clean, t, noise)
    # A pretrained model's chunk may be longer and wider than the actions.
    return noisy, t, target[:, :h, :a]


def pair_loss(
    policy: FlowPolicyProtocol, obs: Obs, noisy: Tensor, t: Tensor, target: Tensor, mask: Tensor
) -> Tensor:
    """The flow matching loss of what ``noisy_pair`` drew."""
    return velocity_loss(policy, policy.encode(obs), noisy, t, target, mask)


def velocity_loss(
    policy: FlowPolicyProtocol,
    context: Any,
    noisy: Tensor,
    t: Tensor,
    target: Tensor,
    mask: Tensor,
) -> Tensor:
    """The same, of observations that are encoded already."""
    velocity = policy.velocity(context, noisy[:, None], t[:, None])[:, 0]
    h, a = target.shape[1:]
    return flow_matching_loss(velocity[:, :h, :a], target, mask)


def drawn_imitation(
    policy: Any, actions: Tensor, mask: Tensor, generator: torch.Generator, time: str = "uniform"
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...], Tensor, tuple[Tensor, ...]]:
    """The loss of imitation of any policy, with all that is random in it drawn.

    Args:
        policy: with a flow, or with an imitation loss of its own.
        actions: (B, H, A).
        mask: (B, H), those that count.
        generator: of times and noise.
        time: how times are drawn; see ``SFTConfig``.

    Returns:
        A function, what it is given beside observations, the mask, and noise; the loss is
        ``function(obs, *given, mask, *noise)``, also of some rows of all of them.
    """
    given: tuple[Tensor, ...] = (actions,)
    loss: Callable[..., Tensor]
    if has_ability(policy, Imitates):
        loss = cast("Callable[..., Tensor]", policy.imitation_loss)
    else:
        loss = cast("Callable[..., Tensor]", partial(pair_loss, policy))
        noisy, t, target = noisy_pair(policy, actions, generator, time)
        if most := getattr(policy.config, "max_prefix", 0):
            # The first actions of some chunks are given, so they are not asked for.
            count = torch.randint(most + 1, (len(t),), generator=generator).to(t.device)
            clean = pad(policy.normalize_action(actions), (noisy.shape[1], noisy.shape[2]))
            noisy, t = given_prefix(noisy, t, clean, count)
            mask = mask & (t > 0)
        given = (noisy, t, target)
    return loss, given, mask, imitation_noise(policy, actions, generator)


def flow_loss_of_shapes(policy: Any, obs: Obs, trace: DenoisingTrace) -> Tensor:
    """The flow matching loss of tensors of the right shapes."""
    noisy = trace.x[:, 0]
    actions = noisy[:, :, : policy.spec.action_dim]
    return pair_loss(policy, obs, noisy, noisy[:, 0, 0], actions, actions[..., 0] > 0)
