"""Builds envs, policies and configs from configs and checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from embodyrl import registry, starting
from embodyrl.config import Config, resolve
from embodyrl.devices import keep_random_state
from embodyrl.env import EnvConfig, VecEnv
from embodyrl.errors import UserError
from embodyrl.policy import Policy
from embodyrl.ranges import check_config
from embodyrl.rollouts.fault_watch import guarded
from embodyrl.rollouts.history_env import remembering
from embodyrl.rollouts.presented_env import presented
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import check_compatible, spec_from_json
from embodyrl.storage.plain_data import first_line
from embodyrl.types import EnvSpec

FRESH_PARAMETERS = 100_000_000
"""Parameters that a policy may have beside those of its checkpoint: parts that start fresh."""


def make_env(config: EnvConfig, run_device: str = "auto") -> VecEnv:
    """The env that a config describes, with its faults watched (``rollouts.fault_watch``).

    Args:
        config: of the env.
        run_device: ``run.device``, which ``env.device=auto`` follows; see ``devices``.
    """
    check_config("env", config)
    config = dataclasses.replace(config, device=str(config.place(run_device)))
    if config.progress_coef and (config.judges_itself or not config.reflector):
        raise UserError(
            f"env.progress_coef is {config.progress_coef}, but nothing gives that reward: it needs a "
            f"simulator and env.reflector. Set env.progress_coef to 0 for env.name={config.name}, or "
            "name a reflector's folder."
        )
    judged = bool(config.reflector) and not config.judges_itself
    # The simulator must not end an episode of which another judges whether it is solved.
    plain = dataclasses.replace(config, terminate_on_success=False) if judged else config
    envs = f"{config.num_envs} envs" if config.num_envs > 1 else "the env"
    with starting.step(f"building {envs} of {config.name}"):
        env = presented(registry.load("envs", config.name)(plain), config.profile)
        env = remembering(env, config.history)
        return guarded(registry.judged(env, config) if judged else env)


def limit_num_envs(config: EnvConfig, episodes: int) -> EnvConfig:
    """The config with at most ``episodes`` envs: building more would only take time."""
    return dataclasses.replace(config, num_envs=min(config.num_envs, episodes))


def make_policy(
    config: Any, spec: EnvSpec, seed: int, device: torch.device | str = "cpu"
) -> Policy:
    """A policy with fresh weights, which depend on ``seed`` alone."""
    check_config("policy", config)
    # torch's global generator is set for this block only.
    with keep_random_state():
        torch.manual_seed(seed)
        return registry.load("policies", config.name)(config, spec).to(device)


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """The config of the run that wrote a checkpoint, with overrides.

    Args:
        path: of a checkpoint, or of a run, which means its newest checkpoint.
        overrides: each ``key.sub=value``.
    """
    _, meta = checkpoint.load_run(checkpoint.find(path), "config")
    with described_by(path):
        return resolve(meta["config"], overrides)


def load_spec(path: str) -> EnvSpec:
    """The spec of the env that a checkpoint's policy was made for; ``path`` as for ``load_config``.

    Raises:
        UserError: the checkpoint is damaged or malformed.
    """
    _, meta = checkpoint.load_run(checkpoint.find(path))
    return spec_from_json(meta["spec"])


def load_policy(
    path: str, config: Any, spec: EnvSpec, seed: int, device: torch.device | str = "cpu"
) -> Policy:
    """The policy of a checkpoint.

    Args:
        path: as for ``load_config``.
        config: the ``policy`` section of its config.
        spec: of the env that the policy will act in.
        seed: of parts that the checkpoint may lack (``starts_fresh``).
        device: of the policy.

    Raises:
        UserError: the checkpoint is damaged or malformed, or does not fit.
    """
    states, meta = checkpoint.load_run(checkpoint.find(path))
    check_compatible(meta["spec"], spec)
    most = FRESH_PARAMETERS + 3 * checkpoint.num_values(states["policy"])
    with described_by(path), _at_most(most, path):
        policy = make_policy(config, spec, seed, device)
    with described_by(path):
        checkpoint.load_weights(path, policy, spec)
    return policy


@contextlib.contextmanager
def described_by(path: object) -> Iterator[None]:
    """What is built or loaded in this block is described by a file that may come from elsewhere.

    Values of the right type can still be senseless, such as a width of -1 or weights of another
    network. Whatever then fails says so in words.

    Args:
        path: of the file or folder.

    Raises:
        UserError: in place of the errors of Python and PyTorch.
    """
    try:
        yield
    except UserError:
        raise
    except (
        ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError,
        TypeError, ValueError,
    ) as error:  # fmt: skip
        raise UserError(
            f"What {path} describes cannot be built ({first_line(error)}). It is malformed, or "
            "was written by another version of embodyrl. Use an earlier checkpoint, or another "
            "copy."
        ) from error


@contextlib.contextmanager
def config_builds(section: str) -> Iterator[None]:
    """What is built in this block is described by a section of the user's config.

    Raises:
        UserError: in place of what PyTorch says about values that do not go together, such as a
            width that the heads do not divide.
    """
    try:
        yield
    except (AssertionError, ValueError) as error:
        raise UserError(
            f"The {section} that this config describes cannot be built ({first_line(error)}). "
            f"Change the settings of the section {section}."
        ) from error


@contextlib.contextmanager
def _at_most(most: int, path: str) -> Iterator[None]:
    """Refuses a policy that grows beyond a number of parameters, before they fill the memory."""
    count = 0

    def add(module: Any, name: str, parameter: Any) -> None:
        nonlocal count
        count += 0 if parameter is None else parameter.numel()
        if count > most:
            raise UserError(
                f"The config of {path} describes a policy that is far larger than the weights "
                "beside it. It is malformed: use an earlier checkpoint, or another copy."
            )

    handle = register_module_parameter_registration_hook(add)
    try:
        yield
    finally:
        handle.remove()
