"""The demonstrations of a run."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from embodyrl.algorithm import Algorithm
from embodyrl.config import Config
from embodyrl.data.partial import parts_folder
from embodyrl.env import EnvConfig
from embodyrl.errors import UserError, refuse_unread
from embodyrl.policy import num_executed
from embodyrl.storage.paths import is_hub_id, settings_of
from embodyrl.types import EnvSpec

EPISODES = 100
"""Demonstrations that a message proposes to collect."""


def load_demos(
    config: Config,
    algorithm: Algorithm,
    spec: EnvSpec,
    *,
    pictures: bool = True,
    say: Callable[[str], None] = print,
) -> Any:
    """The data sets of the ``data`` section; None where the algorithm reads none.

    Args:
        config: of the run.
        algorithm: that learns from them.
        spec: of the env that they must fit.
        pictures: False leaves the pictures undecoded, to see whether the data fit.
        say: is told, in a line each, what is taken as it is and may not be what was meant.

    Raises:
        UserError: it needs some and ``data.path`` names none, it names some that nothing would read,
            or they mean something else than the env does (``data.env_check``).
    """
    data = config.data
    if not algorithm.takes_demos:
        keys = [field.name for field in dataclasses.fields(data)]
        why = f"{config.algorithm.name} with these settings reads no demonstrations"
        refuse_unread(data, "data", keys, why)
        return None
    if not data.path:
        if not algorithm.wants_demos:
            keys = [field.name for field in dataclasses.fields(data)]
            refuse_unread(data, "data", keys, "data.path names no demonstrations")
            return None
        raise UserError(
            "This algorithm learns from demonstrations: give data.path=FOLDER (see `embodyrl "
            "collect --help`)."
        )
    from embodyrl.data.env_check import data_options
    from embodyrl.data.load_demonstrations import load_demonstrations
    from embodyrl.data.mixture import Mixture

    require_data_sets(config)
    parts = []
    for path in (data.path, *data.more):
        part = load_demonstrations(
            path,
            algorithm.policy.config.horizon,
            execute=num_executed(algorithm.policy.config),
            spec=spec,
            skip=data.skip if path == data.path else (),
            episodes=data.episodes,
            keep=data.keep,
            pictures=pictures,
            **data_options(data),
        )
        _require_meaning(part, path, config, spec, say)
        part.intervention_weight = data.intervention_weight
        for text in part.remarks:
            say(text)
        if part.no_instruction and getattr(algorithm.policy, "reads_instructions", True):
            raise UserError(
                f"{part.no_instruction} ({config.policy.name} reads instructions; or leave them "
                "out: data.skip.)"
            )
        if part.no_instruction and getattr(config.algorithm, "bc_schedule", "") == "unsolved":
            raise UserError(
                f"{part.no_instruction} algorithm.bc_schedule=unsolved looks for demonstrations of "
                "instructions that stay unsolved: set it to constant or success."
            )
        parts.append(part)
    weights = list(data.weights)
    if data.codec and not pictures:
        from embodyrl.world_models.model_files import read_model_meta

        read_model_meta(Path(data.codec))
        weights = []  # one for each data set and its reconstruction
    elif data.codec:
        from embodyrl.world_models.reencode import reencode

        parts = parts + [reencode(part, data.codec) for part in parts]
        weights = weights * 2
    return Mixture(parts, weights or None) if len(parts) > 1 or weights else parts[0]


def _require_meaning(
    part: Any, path: str, config: Config, spec: EnvSpec, say: Callable[[str], None]
) -> None:
    """Refuses a data set whose rate, pictures or actions mean something else than the env's.

    Data that embodyrl recorded in the same env are trusted (``embodyrl data verify`` looks at them,
    too).

    Raises:
        UserError: saying what differs, and what to give.
    """
    from embodyrl.data.env_check import (
        check_with_env,
        data_options,
        findings_in_words,
        other_rate,
    )

    if not config.data.rate and (text := other_rate(part.rate, spec, path)):
        raise UserError(text)
    # Data of the same env are trusted.
    if part.origin.get("env") == spec.name:
        return
    # Data from elsewhere are held against the env.
    check = check_with_env(path, config.env, data_options(config.data))
    given = {**config.data.convention, **({"cameras": True} if config.data.cameras else {})}
    refused = []
    for _, text, refuse in findings_in_words(check, spec.conventions, given, path):
        refused += [text] if refuse else []
        if not refuse:
            say(text)
    for text in check.unchecked:
        say(f"{path}: {text}")
    if refused:
        raise UserError(
            " ".join(refused)
            + f" Look at it: embodyrl data verify {path} {config.env.name} env.KEY=VALUE"
        )


def require_data_sets(config: Config) -> None:
    """Refuses data sets that are not there, with the command that makes them.

    Raises:
        UserError: naming the first that is missing and is no id on a hub.
    """
    for path in filter(None, (config.data.path, *config.data.more)):
        if Path(path).exists() or parts_folder(path).exists() or is_hub_id(path):
            continue
        # Who reads failed episodes needs those of a policy: an expert's are solved.
        policy = config.run.init_checkpoint if config.data.keep == "all" else ""
        env = config.env if policy else config.env.for_demonstrations()
        make = "" if env is None else f" Or make it: {collect_command(env, path, policy)}"
        # No expert knows a robot's task, but a person does.
        if env is None and config.env.name == "robot":
            make = (
                f" Or record it: embodyrl record --robot {vars(config.env)['robot']} --out {path}"
            )
        raise UserError(
            f"There is no data set {path} (data.path). Name one that is there, or OWNER/NAME of one "
            f"on the Hugging Face hub.{make}"
        )


def collect_command(env: EnvConfig, out: str, policy: str = "") -> str:
    """The command line that collects demonstrations in an env, or what a policy does there.

    Args:
        env: its config; settings that are not the default are repeated.
        out: folder of the data set.
        policy: a run or checkpoint, whose failed episodes are kept too; empty for the expert.
    """
    plain = type(env)()
    skip = settings_of(env, "machine") | {"name"}
    given = [
        f"env.{f.name}={_as_yaml(getattr(env, f.name))}"
        for f in fields(env)
        if f.name not in skip and getattr(env, f.name) != getattr(plain, f.name)
    ]
    tried = ["--policy", policy, "--keep-failures"] if policy else []
    episodes = ["--episodes", str(10 * EPISODES if policy else EPISODES)]
    words = ["embodyrl", "collect", env.name, *given, *tried, *episodes, "--out", out]
    return shlex.join(words)


def _as_yaml(value: Any) -> str:
    """A value as an override says it."""
    if isinstance(value, tuple):
        return f"[{','.join(map(_as_yaml, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
