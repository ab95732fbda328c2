"""``check_policy``: can a policy be trained by every algorithm that its abilities allow?"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, nn

from embodyrl.checks.error import CheckError, require
from embodyrl.errors import UserError
from embodyrl.functional.flow import complete_noise, randn
from embodyrl.policy import (
    ActsInOneStep,
    Chooses,
    HasFeatures,
    HasFlow,
    HasValue,
    Imitates,
    Policy,
    ScoresPaths,
    Steerable,
    Steps,
    imitated_rows,
    imitation_noise,
    missing_methods,
    num_executed,
)
from embodyrl.types import EnvSpec, Obs

ABILITIES = (ScoresPaths, HasValue, HasFlow, HasFeatures, Steerable, Chooses, Imitates)


def check_policy(policy: Any, obs: Obs, spec: EnvSpec, *, tolerance: float = 1e-3) -> list[str]:
    """Tries all that an algorithm or the runner may ask of a policy; returns if all is well.

    The policy itself is left as it was.

    Args:
        policy: to check.
        obs: of the env that ``spec`` describes, two rows or more.
        spec: what the policy was built for.
        tolerance: allowed difference of log-probabilities and values that should be equal.

    Returns:
        The names of its abilities (see ``embodyrl.policy``).

    Raises:
        CheckError: says in words which promise is broken.
    """
    _check_module(policy, spec)
    policy = copy.deepcopy(policy)
    _check_acting(policy, obs, spec)
    found = [ability for ability in ABILITIES if not missing_methods(policy, ability)]
    for ability in found:
        CHECKS[ability](policy, obs, spec, tolerance)
    _check_fitting(policy, obs, spec)
    _check_checkpoint(policy, obs)
    return [ability.__name__ for ability in found]


def _check_module(policy: Any, spec: EnvSpec) -> None:
    name = type(policy).__name__
    missing = missing_methods(policy, Policy)
    require(not missing, f"{name} lacks {', '.join(missing)}, which every policy has.")
    if hasattr(policy, "transition"):
        lacking = missing_methods(policy.transition, Steps)
        require(not lacking, f"transition lacks {', '.join(lacking)} (see embodyrl.policy.Steps).")
    require(isinstance(policy, nn.Module), f"{name} is no torch.nn.Module.")
    horizon = getattr(policy.config, "horizon", None)
    require(isinstance(horizon, int) and horizon > 0, "config.horizon is no positive integer.")
    require(
        0 < num_executed(policy.config) <= policy.config.horizon,
        f"config.execute is {num_executed(policy.config)}, but a chunk has {horizon} actions.",
    )
    require(hasattr(policy.config, "name"), "config has no name.")
    require(policy.spec == spec, "policy.spec is not the spec that it was built for.")
    actor = policy.actor_parameters()
    require(len(actor) > 0, "actor_parameters() is empty, so nothing could be trained.")
    known = {id(p) for p in policy.parameters()}
    require(
        all(id(p) in known for p in actor),
        "actor_parameters() holds a tensor that parameters() does not.",
    )


def _seeds(n: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(k) for k in range(n)]


def _check_acting(policy: Any, obs: Obs, spec: EnvSpec) -> None:
    n = len(obs)
    expected = (n, num_executed(policy.config), spec.action_dim)
    noise_free = policy.sample(obs, generator=_seeds(n), mode="eval").actions
    require(
        tuple(noise_free.shape) == expected,
        f"sample(mode='eval'): actions are {tuple(noise_free.shape)}, not (N, H, A) = {expected}.",
    )
    require(bool((noise_free.abs() <= 1).all()), "actions leave [-1, 1], or are not finite.")
    again = policy.sample(obs, generator=_seeds(n), mode="eval").actions
    require(torch.equal(noise_free, again), "The same generators gave other actions.")
    alone = policy.sample(obs[:1], generator=_seeds(n)[:1], mode="eval").actions
    gap = float((alone[0] - noise_free[0]).abs().max())
    require(gap <= 1e-4, f"A row's actions depend on the other rows of the batch (by {gap:.2g}).")
    explored = policy.sample(obs, generator=torch.Generator().manual_seed(0), mode="train").actions
    require(
        tuple(explored.shape) == expected and bool((explored.abs() <= 1).all()),
        "sample(mode='train') with one generator for all rows: actions are not (N, H, A) in "
        "[-1, 1].",
    )


def _check_scores(policy: Any, obs: Obs, spec: EnvSpec, tolerance: float) -> None:
    n = len(obs)
    sample = policy.sample(obs, generator=_seeds(n), mode="train")
    if sample.trace is None or sample.logprob is None:
        raise CheckError("sample(mode='train') returned no trace or no logprob.")
    require(
        sample.trace.x.shape[0] == n
        and all(
            x >= a for x, a in zip(sample.trace.x.shape[2:], sample.actions.shape[1:], strict=True)
        ),
        "trace.x is not (N, K+1, H, A), nor larger in H and A (what lies beyond the actions is not "
        "executed).",
    )
    steps = policy.transition.num_steps
    thoughts = 0 if sample.trace.thoughts is None else sample.trace.thoughts.shape[1]
    require(
        tuple(sample.logprob.shape) == (n, steps + thoughts),
        f"logprob is {tuple(sample.logprob.shape)}, not (N, K + J) with K = {steps} steps and "
        f"J = {thoughts} thoughts.",
    )
    scored = policy.evaluate(obs, sample.trace)
    gap = _gap(scored.logprob, sample.logprob)
    require(
        gap <= tolerance,
        f"evaluate's log-probability differs from sample's by {gap:.2g}: the first ratio would "
        "not be 1.",
    )
    require(scored.logprob.requires_grad, "evaluate's logprob carries no gradient.")
    require(tuple(scored.entropy.shape) == (n,), "evaluate's entropy is not (N,).")
    part = policy.evaluate(obs[:1], sample.trace[:1])
    gap = _gap(part.logprob, scored.logprob[:1])
    require(gap <= tolerance, f"A row's score depends on the other rows (by {gap:.2g}).")


def _check_value(policy: Any, obs: Obs, spec: EnvSpec, tolerance: float) -> None:
    n = len(obs)
    critic = {id(p) for p in policy.critic_parameters()}
    actor = {id(p) for p in policy.actor_parameters()}
    require(len(critic) > 0, "critic_parameters() is empty.")
    require(not critic & actor, "A parameter is in actor_parameters() and critic_parameters().")
    policy.fit_critic_inputs(obs)
    value = policy.value(obs)
    require(tuple(value.shape) == (n,), f"value is {tuple(value.shape)}, not (N,).")
    gap = _gap(policy.value_of(policy.critic_features(obs)), value)
    require(gap <= tolerance, f"value_of(critic_features(obs)) differs from value by {gap:.2g}.")
    policy.zero_grad()
    value.sum().backward()
    reached = [p for p in policy.actor_parameters() if p.grad is not None and p.grad.any()]
    require(not reached, "The value's gradient reaches the actor.")
    sample = policy.sample(obs, generator=_seeds(n), mode="train")
    require(sample.value is not None, "sample(mode='train') returned no value.")
    require(_gap(sample.value, value) <= tolerance, "sample's value differs from value(obs).")


def _check_flow(policy: Any, obs: Obs, spec: EnvSpec, tolerance: float) -> None:
    n = len(obs)
    steps = policy.transition.num_steps
    shape = (n, 2, *policy.flow_shape)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(obs.proprio.device)
    t = torch.full((n, 2), 1.0 - 1.0 / steps if steps > 1 else 1.0, device=x.device)
    context = policy.encode(obs)
    velocity = policy.velocity(context, x, t)
    require(
        tuple(velocity.shape) == shape,
        f"velocity is {tuple(velocity.shape)}, not of x's shape {shape}.",
    )
    require(velocity.requires_grad, "velocity carries no gradient.")
    stepped, log_std = policy.step_inputs(context, x, t)
    require(_gap(stepped, velocity) <= tolerance, "step_inputs gives another velocity.")
    require(
        log_std is None or log_std.shape == velocity.shape,
        "step_inputs: log_std is not of the velocity's shape.",
    )
    actions = torch.zeros(n, num_executed(policy.config), spec.action_dim, device=x.device)
    gap = _gap(policy.normalize_action.inverse(policy.normalize_action(actions)), actions)
    require(gap <= 1e-3, f"normalize_action.inverse does not undo normalize_action (by {gap:.2g}).")


def _check_features(policy: Any, obs: Obs, spec: EnvSpec, tolerance: float) -> None:
    n = len(obs)
    features = policy.features(policy.encode(obs))
    require(
        tuple(features.shape) == (n, policy.features_dim),
        f"features is {tuple(features.shape)}, not (N, features_dim={policy.features_dim}).",
    )
    require(not features.requires_grad, "features carries a gradient into the actor.")
    policy.fit_critic_inputs(obs)
    seen = policy.critic_features(obs)
    require(
        tuple(seen.shape) == (n, policy.critic_features_dim),
        f"critic_features is {tuple(seen.shape)}, not (N, critic_features_dim="
        f"{policy.critic_features_dim}).",
    )


def _check_steering(policy: Any, obs: Obs, spec: EnvSpec, tolerance: float) -> None:
    if policy.steer is None:
        return
    context = policy.encode(obs)
    noise, logprob = policy.steer.sample(policy.features(context), torch.Generator())
    require(tuple(logprob.shape) == (len(obs),), "steer.sample's log-density is not (N,).")
    start = complete_noise(noise, policy.flow_shape, torch.Generator())
    actions = policy.decode(context, start)
    require(
        tuple(actions.shape) == (len(obs), num_executed(policy.config), spec.action_dim),
        "decode does not give actions (N, H, A).",
    )


def _check_one_step(policy: Any, obs: Obs, spec: EnvSpec, tolerance: float) -> None:
    if policy.one_step is None:
        return
    context = policy.encode(obs)
    noise = randn((len(obs), *policy.flow_shape), torch.Generator(), obs.proprio.device)
    actions = policy.one_step_actions(policy.features(context), noise)
    expected = tuple(policy.decode(context, noise).shape)
    require(
        tuple(actions.shape) == expected,
        f"one_step_actions are {tuple(actions.shape)}, and those of decode {expected}.",
    )
    require(actions.requires_grad, "one_step_actions carry no gradient into the head.")


def _check_choosing(policy: Any, obs: Obs, spec: EnvSpec, tolerance: float) -> None:
    n = len(obs)
    proposals = policy.propose(obs, 3, torch.Generator().manual_seed(0))
    expected = (n, 3, num_executed(policy.config), spec.action_dim)
    require(
        tuple(proposals.shape) == expected and bool((proposals.abs() <= 1).all()),
        f"propose: chunks are {tuple(proposals.shape)}, not (N, count, H, A) = {expected} in "
        "[-1, 1].",
    )
    if policy.chooser is not None:
        require(
            _gap(proposals[:, 0], proposals[:, 1]) > 1e-5,
            "propose: all chunks of an observation are equal, so there is nothing to choose from.",
        )
        values = policy.chooser.values_of(policy.chooser.encoder(obs), proposals)
        require(tuple(values.shape) == (n, 3), "chooser.values_of are not (N, count).")


def _check_imitation(policy: Any, obs: Obs, spec: EnvSpec, tolerance: float) -> None:
    # Chunks from the observation on, and with the actions before it.
    before, _ = imitated_rows(policy)
    for early in sorted({0, before}):
        actions = torch.zeros(len(obs), early + policy.config.horizon, spec.action_dim)
        actions = actions.to(obs.proprio.device)
        mask = torch.ones_like(actions[..., 0], dtype=torch.bool)
        noise = imitation_noise(policy, actions, torch.Generator().manual_seed(0))
        loss = policy.imitation_loss(obs, actions, mask, *noise)
        finite = loss.ndim == 0 and bool(torch.isfinite(loss))
        require(finite, "imitation_loss is no finite scalar.")
        require(loss.requires_grad, "imitation_loss carries no gradient.")


def _check_fitting(policy: Any, obs: Obs, spec: EnvSpec) -> None:
    """Imitation fits the inputs before it learns."""
    generator = torch.Generator().manual_seed(0)
    actions = torch.rand(32, spec.action_dim, generator=generator) * 2 - 1
    proprio = obs.proprio.cpu().repeat(32, 1)[:32]
    # A policy may refuse, in words: a pretrained one that imitates whole chunks alone.
    with contextlib.suppress(UserError):
        policy.fit_inputs(proprio.to(obs.proprio.device), actions.to(obs.proprio.device))


def _check_checkpoint(policy: Any, obs: Obs) -> None:
    """What is saved and loaded acts the same."""
    n = len(obs)
    before = policy.sample(obs, generator=_seeds(n), mode="eval").actions
    state = copy.deepcopy(policy.state_dict())
    for p in policy.actor_parameters():
        nn.init.normal_(p)
    policy.load_state_dict(state)
    after = policy.sample(obs, generator=_seeds(n), mode="eval").actions
    require(torch.equal(before, after), "load_state_dict does not bring back what acts.")


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max().detach())


CHECKS = {
    ScoresPaths: _check_scores,
    HasValue: _check_value,
    HasFlow: _check_flow,
    HasFeatures: _check_features,
    Steerable: _check_steering,
    ActsInOneStep: _check_one_step,
    Chooses: _check_choosing,
    Imitates: _check_imitation,
}
