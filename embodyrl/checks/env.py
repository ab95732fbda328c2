"""``check_env``: does an env keep the promises that everything else relies on?"""

from __future__ import annotations

import torch

from embodyrl.checks.error import CheckError, require
from embodyrl.env import InvalidActionError, VecEnv
from embodyrl.types import EnvSpec, Obs, Step


def check_env(env: VecEnv, *, horizon: int = 4, chunks: int = 3) -> None:
    """Runs a VecEnv through its interface with random actions; returns if all is well.

    Raises:
        CheckError: says in words which promise is broken.
    """
    spec = env.spec
    n = spec.num_envs
    generator = torch.Generator().manual_seed(0)
    actions = [
        torch.rand(n, horizon, spec.action_dim, generator=generator) * 2 - 1 for _ in range(chunks)
    ]

    obs = env.reset(seed=3)
    check_obs(obs, spec, "reset")
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

    first = _run(env, actions, seed=3)
    for step in first:
        check_step(step, spec, horizon)
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

    # An ended env stays masked until it is reset.
    env.reset(seed=5)
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
        ended |= step.done
    require(
        bool(ended.all()),
        f"Some env still runs after max_episode_steps={spec.max_episode_steps} actions.",
    )


def check_obs(obs: Obs, spec: EnvSpec, where: str) -> None:
    """Shapes, types and finiteness of an observation against the spec."""
    n = spec.num_envs
    require(
        set(obs.images) == set(spec.cameras),
        f"{where}: cameras {sorted(obs.images)}, spec says {sorted(spec.cameras)}.",
    )
    for name, (height, width) in spec.cameras.items():
        image = obs.images[name]
        require(
            tuple(image.shape) == (n, height, width, 3) and image.dtype == torch.uint8,
            (
                f"{where}: image {name!r} is {tuple(image.shape)} {image.dtype}, not "
                f"{(n, height, width, 3)} uint8."
            ),
        )
        require(
            bool((image.float().std(dim=(1, 2, 3)) > 0).all()),
            f"{where}: an image of camera {name!r} is one flat colour.",
        )
    require(
        tuple(obs.proprio.shape) == (n, spec.proprio_dim) and obs.proprio.dtype == torch.float32,
        (
            f"{where}: proprio is {tuple(obs.proprio.shape)} {obs.proprio.dtype}, not "
            f"{(n, spec.proprio_dim)} float32."
        ),
    )
    require(bool(torch.isfinite(obs.proprio).all()), f"{where}: proprio is not finite.")
    require(
        len(obs.instruction) == n, f"{where}: {len(obs.instruction)} instructions for {n} envs."
    )
    require(all(obs.instruction), f"{where}: an instruction is empty.")
    if spec.privileged_dim:
        privileged = obs.privileged
        require(
            privileged is not None and tuple(privileged.shape) == (n, spec.privileged_dim),
            f"{where}: privileged is not (N, {spec.privileged_dim}) as the spec says.",
        )
        assert privileged is not None
        require(bool(torch.isfinite(privileged).all()), f"{where}: privileged is not finite.")


def check_step(step: Step, spec: EnvSpec, horizon: int) -> None:
    """Shapes and logic of what a chunk returned."""
    n = spec.num_envs
    check_obs(step.obs, spec, "step")
    for name in ("reward", "valid"):
        shape = tuple(getattr(step, name).shape)
        require(shape == (n, horizon), f"step.{name} is {shape}, not {(n, horizon)}.")
    for name in ("terminated", "truncated", "success", "fault"):
        value = getattr(step, name)
        require(
            tuple(value.shape) == (n,) and value.dtype == torch.bool,
            f"step.{name} is not ({n},) bool.",
        )
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


def _some_inits(spec: EnvSpec) -> list[int]:
    limit = spec.num_init_states or 2**31
    return [(k * 7 + 1) % limit for k in range(spec.num_envs)]


def _run(env: VecEnv, actions: list[torch.Tensor], seed: int) -> list[Step]:
    env.reset(seed=seed)
    return [env.step(a) for a in actions]


def _same(a: Step, b: Step) -> bool:
    same = (
        torch.equal(a.obs.proprio, b.obs.proprio)
        and torch.equal(a.reward, b.reward)
        and torch.equal(a.valid, b.valid)
    )
    return same and all(
        torch.equal(image, b.obs.images[name]) for name, image in a.obs.images.items()
    )
