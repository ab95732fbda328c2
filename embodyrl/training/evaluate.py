"""Scores a checkpoint in its env, and says the result in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from embodyrl.build import (
    described_by,
    limit_num_envs,
    load_config,
    load_policy,
    make_env,
)
from embodyrl.devices import use_device
from embodyrl.functional.intervals import format_rate, format_return, mean_interval, wilson
from embodyrl.policies.guidance import GuidedPolicy
from embodyrl.policy import Actor, Policy
from embodyrl.rollouts.batches import Episode
from embodyrl.rollouts.evaluation import evaluate
from embodyrl.types import EnvSpec


def evaluate_checkpoint(
    path: str,
    overrides: Sequence[str] = (),
    *,
    episodes: int = 0,
    seed: int = 0,
    base: str = "",
    guidance: float = 1.0,
) -> dict[str, Any]:
    """Scores a checkpoint in the env it was trained for.

    The split is the run's evaluation split, unless ``env.split`` is overridden.

    Args:
        path: a checkpoint, or a run's folder (its newest).
        overrides: of the config that it was trained with.
        episodes: initial states; 0 means as in training.
        seed: of the policy's noise.
        base: a checkpoint whose velocity is mixed in (``policies.guidance``); none by default.
        guidance: 0 acts as ``base``, 1 as the checkpoint itself, more goes further.

    Returns:
        ``env``, ``split``, ``reports_success``, ``episodes``, ``successes``, ``success_rate``,
        ``interval`` (95% Wilson), ``return_mean``, ``return_interval`` (95% Student's t, None for
        one episode) and ``tasks``, the same per task; ``results`` lists every episode.
    """
    config = load_config(path, overrides)
    if not any(o.startswith("env.split=") for o in overrides):
        config = dataclasses.replace(config, env=config.env.for_evaluation(config.run.eval_split))
    device = use_device(config.run.device)
    episodes = episodes or config.run.eval_episodes
    with described_by(path):
        env = make_env(limit_num_envs(config.env, episodes), config.run.device)
    try:
        policy: Actor = load_policy(path, config.policy, env.spec, config.run.seed, device)
        if base:
            policy = GuidedPolicy(policy, _base_policy(base, env.spec, device), guidance)
        inits = first_inits(env.spec, episodes)
        result = evaluate(env, policy, inits, seed=seed, device=device)
    finally:
        env.close()
    tasks = {name: [e for e in result.episodes if e.task == name] for name in env.spec.tasks}
    return {
        "checkpoint": str(path),
        "env": env.spec.name,
        "split": config.env.split,
        "reports_success": env.spec.reports_success,
        **_summary(result.episodes),
        "tasks": {name: _summary(part) for name, part in tasks.items() if part},
        "results": [dataclasses.asdict(e) for e in result.episodes],
    }


def _base_policy(path: str, spec: EnvSpec, device: torch.device) -> Policy:
    config = load_config(path)
    return load_policy(path, config.policy, spec, config.run.seed, device)


def first_inits(spec: EnvSpec, count: int) -> list[int]:
    """The initial states of an evaluation: always the first ``count``, tasks in turn."""
    return list(range(count if spec.num_init_states is None else min(count, spec.num_init_states)))


def score_text(episodes: Sequence[Episode], reports_success: bool) -> str:
    """The success rate of some episodes as text, or their mean return without successes."""
    if reports_success:
        return format_rate(sum(e.success for e in episodes), len(episodes))
    return f"return {format_return([e.reward for e in episodes])}" if episodes else "no episodes"


def _summary(episodes: list[Episode]) -> dict[str, Any]:
    solved = sum(e.success for e in episodes)
    rate = solved / len(episodes)
    mean, low, high = mean_interval([e.reward for e in episodes])
    return {
        "episodes": len(episodes),
        "successes": solved,
        "success_rate": rate,
        "interval": wilson(solved, len(episodes)),
        "return_mean": mean,
        "return_interval": (low, high) if len(episodes) > 1 else None,
    }


def print_evaluation(result: dict[str, Any]) -> None:
    """The figures of ``evaluate_checkpoint`` as text."""
    episodes = [Episode(**row) for row in result["results"]]
    reports = result["reports_success"]
    print(f"{result['env']}, split {result['split']}: {score_text(episodes, reports)}")
    if len(result["tasks"]) > 1:
        for name in result["tasks"]:
            print(f"  {name}: {score_text([e for e in episodes if e.task == name], reports)}")
