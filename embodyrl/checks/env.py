"""``check_env``: does an env keep the promises that everything else relies on?"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor

from embodyrl.checks.error import CheckError, require
from embodyrl.env import InvalidActionError, VecEnv
from embodyrl.rollouts.contract import not_finite, obs_defect, step_defect
from embodyrl.rollouts.fault_watch import GuardedEnv
from embodyrl.types import EnvSpec, Obs, Step


def check_env(env: VecEnv, *, horizon: int = 4, chunks: int = 3) -> None:
    """Runs a VecEnv through its interface with random actions; returns if all is well.

    Raises:
        CheckError: says in words which promise is broken.
    """
    if isinstance(env, GuardedEnv):
        env = env.env  # without the guard, which would bear its faults
    spec = env.spec
    n = spec.num_envs
    generator = torch.Generator().manual_seed(0)
    actions = [
        torch.rand(n, horizon, spec.action_dim, generator=generator) * 2 - 1 for _ in range(chunks)
    ]

    obs = env.reset(seed=3)
    _check_obs(obs, spec, "reset")
    try:
        env.step(torch.full((n, horizon, spec.action_dim), float("nan")))
    except InvalidActionError:
        pass
    else:
        raise CheckError(
            "step accepted NaN actions; it must raise InvalidActionError before it steps any env."
        )
    try:
        env.step(torch.zeros(n, horizon, spec.action_dim + 1))
    except InvalidActionError:
        pass
    else:
        raise CheckError(
            "step accepted actions of the wrong shape; it must raise InvalidActionError."
        )

    try:
        first = _run(env, actions, seed=3)
    except CheckError:
        raise
    except Exception as error:
        raise CheckError(
            f"step raised {type(error).__name__}: {error}. (All fields of Tick and Obs must be torch "
            "tensors: reward float32, the flags bool.)"
        ) from error
    for step in first:
        _check_step(step, spec, horizon)
    again = _run(env, actions, seed=3)
    for k, (a, b) in enumerate(zip(first, again, strict=True)):
        require(
            _same(a, b),
            f"The same seed and actions gave another chunk {k}: an episode must repeat exactly.",
        )

    # One env's reset must leave the others as they are. Running envs alone can show that.
    obs_before = env.reset(init=_some_inits(spec))
    step = env.step(actions[0])
    others = ~step.done
    others[0] = False
    if n > 1 and others.any():
        after = env.reset([0], init=[_some_inits(spec)[0]])
        require(
            torch.equal(after.proprio[others], step.obs.proprio[others]),
            "reset([0]) changed the observation of another env.",
        )
        require(
            torch.equal(after.proprio[0], obs_before.proprio[0]),
            (
                "reset(init=i) did not restore initial state i: the same number must always give "
                "the same state."
            ),
        )

    _check_splits(env)

    # An ended env stays masked and as it is until it is reset.
    last = env.reset(seed=5).proprio.clone()
    ended = torch.zeros(n, dtype=torch.bool, device=step.done.device)
    for _ in range(-(-spec.max_episode_steps // horizon)):
        step = env.step(actions[0])
        require(
            not step.valid[ended].any(),
            "An env that had ended executed actions; it must stay masked until reset.",
        )
        require(
            not step.done[ended].any(),
            "An env that had ended reported its end again; it must do so once.",
        )
        require(
            torch.equal(step.obs.proprio[ended], last[ended]),
            "The observation of an env that had ended changed: _step must leave envs alone that are "
            "not active.",
        )
        ended |= step.done
        last = step.obs.proprio.clone()
    require(
        bool(ended.all()),
        f"Some env still runs after max_episode_steps={spec.max_episode_steps} actions.",
    )


def _check_obs(obs: Obs, spec: EnvSpec, where: str) -> None:
    """Names, shapes, types and finite numbers, and pictures and words that say something."""
    defect = obs_defect(obs, spec)
    require(not defect, f"{where}: {defect}.")
    for k, what in not_finite(obs).items():
        raise CheckError(f"{where}: {what} in env {k}.")
    for name, image in obs.images.items():
        require(
            bool((image.float().std(dim=(1, 2, 3)) > 0).all()),
            f"{where}: an image of camera {name!r} is one flat colour.",
        )
    require(all(obs.instruction), f"{where}: an instruction is empty.")


def _check_step(step: Step, spec: EnvSpec, horizon: int) -> None:
    """Fields and logic of what a chunk returned."""
    defect = step_defect(step, spec, horizon)
    require(not defect, f"step: {defect}.")
    _check_obs(step.obs, spec, "step")
    require(bool(torch.isfinite(step.reward).all()), "step.reward is not finite.")
    require(
        not (step.terminated & step.truncated).any(),
        "An env was terminated and truncated at once; terminated wins.",
    )
    require(
        bool((step.reward[~step.valid] == 0).all()),
        "step.reward is not zero where step.valid is False.",
    )
    running_after_gap = step.valid[:, 1:] & ~step.valid[:, :-1]
    require(
        not running_after_gap.any(),
        "step.valid has a gap: once an env ended, later actions of the chunk are invalid.",
    )


def _check_splits(env: VecEnv) -> None:
    """The same initial states of another split are other states."""
    config: Any = getattr(env, "config", None)
    other = {"train": "eval", "eval": "train"}.get(getattr(config, "split", ""))
    if other is None or env.spec.num_init_states is not None or not hasattr(type(env), "Config"):
        return
    if list(inspect.signature(type(env)).parameters) != ["config"]:  # not built by its config alone
        return
    if getattr(env, "supervised", False):  # there is one robot
        return
    build: Any = type(env)
    second = build(dataclasses.replace(config, split=other))
    inits = _some_inits(env.spec)
    mine = env.reset(init=inits)
    theirs = second.reset(init=inits)
    second.close()
    pairs = zip(_seen(mine), _seen(theirs), strict=True)
    require(
        not all(torch.equal(a, b) for a, b in pairs),
        f"The initial states {inits} are the same in the splits {config.split} and {other}. "
        "Evaluation would be on states that were trained on: put the split into the seed.",
    )


def _seen(obs: Obs) -> list[Tensor]:
    privileged = [] if obs.privileged is None else [obs.privileged]
    return [obs.proprio, *privileged, *obs.images.values()]


def _some_inits(spec: EnvSpec) -> list[int]:
    limit = spec.num_init_states or 2**31
    return [(k * 7 + 1) % limit for k in range(spec.num_envs)]


def _run(env: VecEnv, actions: list[torch.Tensor], seed: int) -> list[Step]:
    steps = []
    before = env.reset(seed=seed)
    kept = before.proprio.clone()
    for a in actions:
        steps.append(env.step(a))
        require(
            torch.equal(before.proprio, kept),
            "An observation changed after it was returned: _observe must return new tensors "
            "(clone() them), because batches keep them.",
        )
        before = steps[-1].obs
        kept = before.proprio.clone()
    return steps


def _same(a: Step, b: Step) -> bool:
    same = (
        torch.equal(a.obs.proprio, b.obs.proprio)
        and torch.equal(a.reward, b.reward)
        and torch.equal(a.valid, b.valid)
    )
    return same and all(
        torch.equal(image, b.obs.images[name]) for name, image in a.obs.images.items()
    )
