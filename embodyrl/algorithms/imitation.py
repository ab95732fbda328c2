"""The loss of imitation, for every algorithm that learns from demonstrations.

Of a policy with a flow it is flow matching (arXiv:2210.02747); another policy brings its own. A
shortcut policy also learns that one long step is two short ones (arXiv:2410.12557, eq. 5). A policy
that thinks first learns when to stop thinking, too (PonderNet, arXiv:2107.05407).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.functional.flow import flow_matching_pair, randn, sample_training_time
from embodyrl.functional.losses import flow_matching_loss, masked_mean
from embodyrl.functional.shortcut import draw_shortcut_steps, shortcut_target
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
    """The loss of imitating actions (B, H, A), those with ``mask`` (B, H).

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
            # A shortcut policy is told that the step is the whole way.
            size = (start,) if shortcut_steps(policy) else ()
            plan = noise - policy.velocity(context, noise[:, None], start, *size)[:, 0]
    given = drawn_points(policy, actions, generator, time, plan)
    noise = imitation_noise(policy, actions, generator)
    return context_loss(policy)(context, *given, mask, *noise)


def drawn_points(
    policy: FlowPolicyProtocol,
    actions: Tensor,
    generator: torch.Generator,
    time: str,
    plan: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """What ``context_loss`` takes between context and mask; for the arguments see ``noisy_pair``.

    For a shortcut policy it is the result of ``noisy_pair``, and noisy chunks (B, C, D), times (B,)
    and sizes (B,) of the steps that learn self-consistency.
    """
    pair = noisy_pair(policy, actions, generator, time, plan)
    most = shortcut_steps(policy)
    if not most:
        return pair
    # Where steps begin: points of the flow, at the times of sampling.
    clean = _clean(policy, actions, plan)
    t, d = draw_shortcut_steps(len(clean), most, generator, clean.device)
    x, _ = flow_matching_pair(clean, t, randn(tuple(clean.shape), generator, clean.device))
    return *pair, x, t, d


def shortcut_steps(policy: Any) -> int:
    """The most steps that a shortcut policy learns to act in; 0 for any other policy."""
    return getattr(policy.config, "shortcut_steps", 0)


def refuse_shortcut(policy: Any, name: str) -> None:
    """Refuses a shortcut policy for an algorithm that trains the velocity at points of the flow.

    Raises:
        UserError: saying so.
    """
    if most := shortcut_steps(policy):
        raise UserError(
            f"{name} trains the velocity at points of the flow, but a policy with "
            f"policy.shortcut_steps={most} acts by mean velocities over whole steps, which nothing "
            "would train. Use ppo, grpo, pa_rl or sac_flow, or a policy without shortcut_steps."
        )


def refuse_thoughts(policy: Any, name: str) -> None:
    """Refuses a policy that thinks for an algorithm that would not know what was thought.

    Raises:
        UserError: saying so.
    """
    if most := getattr(policy.config, "thoughts", 0):
        raise UserError(
            f"{name} learns from chunks alone, but with policy.thoughts={most} they were chosen "
            "after thoughts, whose probability it does not know. Use ppo or grpo, or set "
            "policy.thoughts=0."
        )


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
    clean = _clean(policy, actions, plan)
    noise = randn(tuple(clean.shape), generator, clean.device)
    t = sample_training_time(len(clean), generator, time, clean.device)
    noisy, target = flow_matching_pair(clean, t, noise)
    # A pretrained model's chunk may be longer and wider than the actions.
    return noisy, t, target[:, :h, :a]


def _clean(policy: FlowPolicyProtocol, actions: Tensor, plan: Tensor | None) -> Tensor:
    """The chunks (B, C, D) that the flow shall lead to."""
    h = actions.shape[1]
    clean = pad(policy.normalize_action(actions), policy.flow_shape)
    return clean if plan is None else torch.cat([clean[:, :h], plan[:, h:]], dim=1)


def drawn_loss(policy: FlowPolicyProtocol, obs: Obs, *given: Tensor) -> Tensor:
    """The loss of what ``drawn_points`` drew, a mask (B, H), and noise where the policy thinks."""
    return context_loss(policy)(policy.encode(obs), *given)


def context_loss(policy: FlowPolicyProtocol) -> Callable[..., Tensor]:
    """The same, of observations that are encoded already."""
    if getattr(policy.config, "thoughts", 0):
        return partial(pondered_loss, policy)
    return partial(shortcut_loss if shortcut_steps(policy) else velocity_loss, policy)


def velocity_loss(
    policy: FlowPolicyProtocol,
    context: Any,
    noisy: Tensor,
    t: Tensor,
    target: Tensor,
    mask: Tensor,
) -> Tensor:
    """The flow matching loss of what ``noisy_pair`` drew, with a mask (B, H)."""
    velocity = policy.velocity(context, noisy[:, None], t[:, None])[:, 0]
    h, a = target.shape[1:]
    return flow_matching_loss(velocity[:, :h, :a], target, mask)


def pondered_loss(
    policy: Any,
    context: Any,
    noisy: Tensor,
    t: Tensor,
    target: Tensor,
    mask: Tensor,
    noise: Tensor,
) -> Tensor:
    """The flow matching loss after thoughts, its exact mean over their number, and their cost.

    Args:
        policy: that thinks at most K times.
        context: of B observations.
        noisy: (B, C, D) where flow matching is learned.
        t: (B,) when, or (B, C).
        target: (B, H, A) the velocity there.
        mask: (B, H) actions that count.
        noise: (B, M) of the thoughts.
    """
    # One pass for all K + 1 places where thinking may end, and how likely each is.
    ends, chance, cost = policy.thinker.every_end(context.seen, noise)
    count = chance.shape[1]
    points = noisy[:, None].expand(-1, count, -1, -1)
    times = t[:, None].expand(-1, count, *t.shape[1:])
    h, a = target.shape[1:]
    velocity = policy.velocity(policy.after_thought(context, ends), points, times)[..., :h, :a]
    # Padding may hold NaN, which must not reach the gradient.
    target = torch.where(mask[..., None], target, 0.0)
    error = (chance[..., None, None] * (velocity - target[:, None]).square()).sum(1)
    # The mean over actions that count, as of the error, so that rows may be taken in pieces.
    matching = masked_mean(error, mask[..., None])
    paid = masked_mean(cost[:, None].expand(mask.shape), mask)
    return matching + policy.config.thought_cost * paid


def shortcut_loss(
    policy: Any,
    context: Any,
    noisy: Tensor,
    t: Tensor,
    target: Tensor,
    x: Tensor,
    start: Tensor,
    size: Tensor,
    mask: Tensor,
) -> Tensor:
    """Flow matching with steps of size 0, and self-consistency of longer ones: their sum.

    Args:
        policy: told the size of its step.
        context: of B observations.
        noisy: (B, C, D) where flow matching is learned.
        t: (B,) when.
        target: (B, H, A) the velocity there.
        x: (B, C, D) where steps begin.
        start: (B,) when.
        size: (B,) how long they are.
        mask: (B, H) actions that count.
    """

    def mean_velocity(x: Tensor, t: Tensor, d: Tensor) -> Tensor:
        return policy.velocity(context, x[:, None], t[:, None], d[:, None])[:, 0]

    # Two half steps of the policy itself are the target of the whole one.
    finest = size * shortcut_steps(policy) < 1.5
    whole = shortcut_target(mean_velocity, x, start, size, finest)
    # One pass for both points of each observation.
    points = torch.stack([noisy, x], dim=1)
    sizes = torch.stack([torch.zeros_like(size), size], dim=1)
    found = policy.velocity(context, points, torch.stack([t, start], dim=1), sizes)
    # The first point learns the velocity of the data, the second agreement with itself.
    h, a = target.shape[1:]
    matching = flow_matching_loss(found[:, 0, :h, :a], target, mask)
    return matching + flow_matching_loss(found[:, 1, :h, :a], whole[:, :h, :a], mask)


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
        loss = cast("Callable[..., Tensor]", partial(drawn_loss, policy))
        given = drawn_points(policy, actions, generator, time)
        if most := getattr(policy.config, "max_prefix", 0):
            # The first actions of some chunks are given, so they are not asked for.
            count = torch.randint(most + 1, (len(mask),), generator=generator).to(mask.device)
            noisy, t, target = given
            noisy, t = given_prefix(noisy, t, _clean(policy, actions, None), count)
            mask = mask & (t > 0)
            given = (noisy, t, target)
    return loss, given, mask, imitation_noise(policy, actions, generator)


def flow_loss_of_shapes(policy: Any, obs: Obs, trace: DenoisingTrace) -> Tensor:
    """The loss of imitation of tensors of the right shapes."""
    noisy = trace.x[:, 0]
    actions = noisy[:, :, : policy.spec.action_dim]
    t = noisy[:, 0, 0]
    steps = (noisy, t, t) if shortcut_steps(policy) else ()
    noise = imitation_noise(policy, actions, torch.Generator())
    return drawn_loss(policy, obs, noisy, t, actions, *steps, actions[..., 0] > 0, *noise)
