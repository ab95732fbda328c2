"""Collects a LeRobotDataset in an env, by its scripted expert, a policy, or replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.build import make_env
from embodyrl.data.partial import EpisodeParts, parts_folder
from embodyrl.data.perturbed_replay import load_replays
from embodyrl.data.policy_actor import load_actor
from embodyrl.data.record import CollectStats, Keep, record_episodes
from embodyrl.env import EnvConfig, VecEnv
from embodyrl.errors import UserError
from embodyrl.storage.folder_lock import locked
from embodyrl.types import EnvSpec


def make_expert(env: VecEnv, noise: float = 0.0, seed: int = 0) -> Any:
    """The scripted expert that comes with an env.

    Raises:
        UserError: none comes with it.
    """
    if not hasattr(env, "make_expert"):
        raise UserError(
            f"{env.spec.name} comes with no scripted expert, so it cannot demonstrate its task."
        )
    return env.make_expert(noise=noise, seed=seed)  # pyright: ignore[reportAttributeAccessIssue] - looked for above


def shuffled_states(spec: EnvSpec, seed: int, *, repeat: bool = False) -> Iterator[int]:
    """Initial states in a random order in which the tasks take turns.

    Args:
        spec: of the env.
        seed: of the order.
        repeat: go on with a new order when all have been used.
    """
    rng = np.random.default_rng(seed)
    tasks = len(spec.tasks)
    while True:
        if spec.num_init_states is None:
            state = int(rng.integers(2**31 // tasks))
            yield from (state * tasks + task for task in range(tasks))
            continue
        for state in rng.permutation(-(-spec.num_init_states // tasks)).tolist():
            yield from (
                i for i in range(state * tasks, (state + 1) * tasks) if i < spec.num_init_states
            )
        if not repeat:
            return


def collect_dataset(
    config: EnvConfig,
    out: str | Path,
    *,
    num_episodes: int,
    noise: float = 0.0,
    keep_failures: bool = False,
    past_success: int | None = None,
    policy: str = "",
    derail: float = 0.0,
    noise_free: bool = False,
    replay: str = "",
    perturb: float = 1.0,
    seed: int = 0,
) -> CollectStats:
    """Collects episodes of a scripted expert or a policy into a LeRobotDataset v3.

    Every episode is on disk (``OUT.parts``) as soon as it is over. However a collection ended, the
    same call goes on from there; where it asks for fewer episodes than there are, it takes the
    first ones. Without noise the result is that of a collection that nothing disturbed; with noise,
    the expert's noise is drawn anew from where it goes on.

    Args:
        config: of the env.
        out: the data set's folder.
        num_episodes: how many to keep.
        noise: standard deviation of noise on the expert's actions.
        keep_failures: keep failed episodes as well, marked ``success`` False.
        past_success: see ``record_episodes``; the env then goes on when the task is solved,
            whatever ``config`` says, which is what the data set keeps: the env that a policy is
                scored in.
        policy: a checkpoint or run whose policy acts instead of the expert, with its exploration
            noise.
        derail: share of the policy's episodes that leave its way at random (see ``PolicyActor``).
        noise_free: the policy acts without its exploration noise.
        replay: a data set whose successes are replayed with a nudge (see ``ReplayActor``), instead
            of either.
        perturb: size of that nudge.
        seed: of the order of initial states and of the noise.

    Returns:
        Figures of this call alone.

    Raises:
        UserError: the env has no scripted expert, the policy does not fit it, ``out`` exists,
            ``OUT.parts`` was collected with other settings or is being written by another process,
            or see ``record_episodes``.
    """
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from embodyrl.data.lerobot_write import DatasetWriter, require_free, require_recordable

    require_free(out)
    if policy and noise:
        raise UserError("noise is the expert's; a policy acts with its own exploration noise.")
    if derail and not policy:
        raise UserError("derail needs a policy to lead astray; give the expert noise instead.")
    if noise_free and not policy:
        raise UserError("noise_free is a policy's; an expert has the noise that is given.")
    if replay and (policy or noise):
        raise UserError(
            "A replay repeats recorded actions: give neither a policy nor noise with it."
        )
    stats = CollectStats()
    env = make_env(config if past_success is None else replace(config, terminate_on_success=False))
    with ExitStack() as stack:
        stack.callback(env.close)
        require_recordable(out, env.spec)
        if not (keep_failures or env.spec.reports_success):
            raise UserError(
                f"{env.spec.name} reports no success, and only episodes that succeed would be "
                "kept. Keep all of them with --keep-failures, and imitate all with data.keep=all."
            )
        # How many episodes run at once, and where, changes none of them.
        common = {
            k: v
            for k, v in asdict(config).items()
            if k not in ("num_envs", "num_workers", "num_threads", "device")
        }
        how = {
            "noise": noise,
            "keep_failures": keep_failures,
            "past_success": past_success,
            "seed": seed,
        }
        how |= {"replay": replay, "perturb": perturb} if replay else {}
        stack.enter_context(locked(parts_folder(out)))
        how |= {"noise_free": True} if noise_free else {}
        parts = EpisodeParts(out, common | how | {"policy": policy, "derail": derail})
        done = len(parts)
        fresh = seed + 1_000_003 * done
        if replay:
            expert = load_replays(replay, config, env, perturb, fresh)
            inits = expert.inits
        else:
            expert = (
                load_actor(env.spec, policy, derail, fresh, noise_free)
                if policy
                else make_expert(env, noise, fresh)
            )
            inits = shuffled_states(env.spec, seed, repeat=noise > 0 or bool(policy))
            for recording in parts:
                while next(inits) != recording.init:
                    pass
        with Progress(
            *Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn()
        ) as bar:
            line = bar.add_task(
                f"episodes of {env.spec.name}",
                total=num_episodes,
                completed=min(done, num_episodes),
            )
            keep: Keep = "all" if keep_failures else "success"
            missing = max(0, num_episodes - done)
            how = {
                "inits": inits,
                "keep": keep,
                "noise": noise,
                "past_success": past_success,
                "stats": stats,
            }
            for recording in record_episodes(env, expert, missing, **how):
                parts.add(recording)
                bar.advance(line)
            line = bar.add_task("loading LeRobot", total=num_episodes)
            with DatasetWriter(out, env.spec, split=config.split, config=asdict(config)) as writer:
                bar.update(line, description=f"writing {out}")
                for recording in islice(parts, num_episodes):
                    writer.add(recording)
                    bar.advance(line)
        parts.remove()
    return stats
