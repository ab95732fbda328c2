"""What ``embodyrl train --dry-run`` tries: all that a run builds, of the smallest size.

The envs of training and evaluation are built with one env each, the policy and the algorithm on
PyTorch's meta device, which holds no data. Of data sets the tables are read and no pictures. What
the run would refuse is refused here, with the same words. Nothing is written.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import Any

from embodyrl import registry
from embodyrl.build import config_builds, make_env
from embodyrl.config import Config
from embodyrl.devices import pick_device
from embodyrl.env import EnvConfig
from embodyrl.policy import num_executed
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import check_compatible
from embodyrl.storage.loggers import require_loggers
from embodyrl.storage.profiles import profile_named
from embodyrl.training.evaluate import first_inits, missed_tasks
from embodyrl.training.load_demos import load_demos
from embodyrl.training.memory_estimate import check_memory, on_meta
from embodyrl.training.resume_check import check_folder
from embodyrl.training.run_checks import (
    check_draws,
    check_episodes_end,
    check_held,
    check_history,
    check_reward,
)
from embodyrl.training.setup import recorded_spec
from embodyrl.training.shards import check_sharing
from embodyrl.types import EnvSpec


def try_run(config: Config) -> tuple[list[str], EnvSpec | None]:
    """Builds what the run of a config would build.

    Returns:
        Lines that say what was found, and the spec of the training env; None for a robot's, which
        is left alone.

    Raises:
        UserError: what the run would raise.
    """
    # What needs nothing built.
    run = config.run
    require_loggers(run.loggers)
    device = pick_device(run.device)
    lines: list[str] = []
    check_folder(run.folder, config, lines.append)
    if run.workers > 1 or run.max_lag:
        check_sharing(config)
    # The envs.
    cls = registry.load("algorithms", config.algorithm.name)
    evaluated = recorded_spec(config) or _spec(
        config.env.for_evaluation(run.eval_split), run.device
    )
    played = _spec(config.env, run.device) if cls.plays else evaluated
    if played is None:
        lines.append("env: a robot, which a dry run leaves alone; nothing that needs it was tried")
        return lines, None
    lines.append(_about_env(played))
    lines += [f"env: {text}" for text in filter(None, [about_profile(config)])]
    # Policy and algorithm, and the data that it learns from.
    with config_builds("policy"):
        policy = on_meta(config, played)
    trained = sum(p.numel() for p in policy.actor_parameters())
    count = sum(p.numel() for p in policy.parameters())
    lines.append(f"policy: {count:,} parameters, {trained:,} of them trained")
    _try_checkpoint(config, policy, played)
    algorithm = _algorithm(cls, config, policy)
    if algorithm is None:
        lines.append(f"algorithm: {config.algorithm.name} cannot be tried without data")
        return lines, played
    check_draws(config, algorithm, played)
    check_held(config, algorithm, played)
    check_reward(config, algorithm)
    check_history(config, algorithm)
    if evaluated is not None:
        inits = first_inits(evaluated, run.eval_episodes)
        lines += filter(None, [missed_tasks(evaluated, inits)])
    if algorithm.continues_episodes:
        check_episodes_end(config, num_executed(policy.config), played.max_episode_steps)
    demos = load_demos(config, algorithm, played, pictures=False, say=lines.append)
    if demos is not None:
        lines.append(f"data: {demos.num_episodes:,} episodes, {len(demos):,} frames")
    whole = dataclasses.replace(played, num_envs=config.env.num_envs)
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun's processes hold a share each
        check_memory(config, whole, device)
    return lines, whole


def _spec(config: EnvConfig, run_device: str) -> EnvSpec | None:
    """The spec of an env, from the smallest of its kind."""
    small = config.smallest()
    if small is None:
        return None
    env = make_env(small, run_device)
    env.close()
    return env.spec


def about_profile(config: Config) -> str:
    """Which family a pretrained checkpoint is taken to be of; empty without one."""
    profile = config.env.profile
    pretrained = getattr(config.policy, "pretrained", "")
    if not profile or not pretrained:
        return ""
    about = profile_named(profile).about
    cameras = ",".join(config.policy.cameras)
    return f"shown to {pretrained} as env.profile={profile}: {about}; policy.cameras=[{cameras}]"


def _about_env(spec: EnvSpec) -> str:
    cameras = ", ".join(f"{name} {h}x{w}" for name, (h, w) in spec.cameras.items()) or "none"
    tasks = len(spec.tasks)
    return (
        f"env: {spec.name}, {tasks} {'task' if tasks == 1 else 'tasks'}, {spec.action_dim} action "
        f"dims ({spec.control_mode}), {spec.proprio_dim} of proprioception, cameras: {cameras}, up "
        f"to {spec.max_episode_steps} actions at {spec.control_hz:g} Hz"
    )


def _try_checkpoint(config: Config, policy: Any, spec: EnvSpec) -> None:
    """The checkpoint that the run would start from, or go on from, fits."""
    newest = checkpoint.latest(config.run.folder / "checkpoints")
    if newest is not None:
        check_compatible(checkpoint.load_run(newest, "position")[1]["spec"], spec)
    elif config.run.init_checkpoint:
        with warnings.catch_warnings():  # weights that are put where no data are
            warnings.simplefilter("ignore")
            checkpoint.load_weights(config.run.init_checkpoint, policy, spec)


def _algorithm(cls: Any, config: Config, policy: Any) -> Any:
    """The algorithm; None for one that cannot be built without data."""
    try:
        return cls(config.algorithm, policy)
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
    return None
