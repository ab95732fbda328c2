"""The ``EnvSpec`` of a checkpoint: as JSON, read again, and compared with that of an env."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from embodyrl.errors import UserError, did_you_mean
from embodyrl.storage.plain_data import ANYTHING, COUNT, FLAG, NUMBER, TEXT, Kind, mismatch
from embodyrl.types import EnvSpec

POSITIVE = Kind("above 0", lambda value: NUMBER.test(value) and 0 < value <= 1e6)
SIZE = Kind("from 0 to 1,000,000", lambda value: COUNT.test(value) and value <= 10**6)
PIXELS = Kind("from 1 to 8192", lambda value: COUNT.test(value) and 0 < value <= 8192)
SPEC = {
    "name": TEXT,
    "num_envs": SIZE,
    "action_dim": SIZE,
    "proprio_dim": SIZE,
    "control_mode": TEXT,
    "control_hz": POSITIVE,
    "max_episode_steps": COUNT,
    "cameras": {...: [PIXELS]},
    "privileged_dim?": SIZE,
    "tasks?": [TEXT],
    "num_init_states?": (COUNT, None),
    "reports_success?": FLAG,
    "layout?": [ANYTHING],
}
"""Structure of an ``EnvSpec`` as plain data."""


def spec_to_json(spec: EnvSpec) -> dict[str, Any]:
    """An ``EnvSpec`` as plain JSON data."""
    return json.loads(json.dumps(asdict(spec)))


def spec_from_json(data: Mapping[str, Any]) -> EnvSpec:
    """The inverse of ``spec_to_json``.

    Raises:
        UserError: an unknown or missing key, named.
    """
    known = [f.name for f in fields(EnvSpec)]
    if isinstance(data, Mapping):
        for key in data:
            if key not in known:
                raise UserError(f"An env spec has no key {key!r}. {did_you_mean(str(key), known)}")
    if problem := mismatch(data, SPEC):
        raise UserError(
            f"The env spec is malformed: {problem}. It must be one that embodyrl wrote."
        )
    # Names of cameras become names of files and folders.
    if odd := [name for name in data["cameras"] if not re.fullmatch(r"\w[\w .-]*", name)]:
        raise UserError(f"The env spec is malformed: a camera cannot be named {odd[0][:60]!r}.")
    # JSON has lists in place of tuples.
    values = dict(data)
    try:
        values["cameras"] = {
            name: (height, width) for name, (height, width) in data["cameras"].items()
        }
        values["tasks"] = tuple(data.get("tasks", EnvSpec.tasks))
        values["layout"] = tuple(
            (kind, int(start), int(numbers)) for kind, start, numbers in data.get("layout", ())
        )
        return EnvSpec(**values)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"The env spec is incomplete: {error}.") from error


def check_compatible(saved: EnvSpec | Mapping[str, Any], env: EnvSpec) -> None:
    """Checks that a checkpoint's policy can act in an env.

    Action dims, proprio dims, control mode, control rate and cameras must be equal. The tasks and
    the episode length may differ.

    Args:
        saved: the spec that was saved with the checkpoint.
        env: the spec of this env.

    Raises:
        UserError: the message names every difference.
    """
    old = saved if isinstance(saved, EnvSpec) else spec_from_json(saved)
    wrong = [
        f"{what} was {getattr(old, key)!r} and is {getattr(env, key)!r}"
        for key, what in (
            ("action_dim", "the number of action dims (action_dim)"),
            ("proprio_dim", "the number of proprio dims (proprio_dim)"),
            ("control_mode", "the control mode (control_mode)"),
            ("control_hz", "the number of actions per second (control_hz)"),
        )
        if getattr(old, key) != getattr(env, key)
    ]
    for name, size in old.cameras.items():
        if name not in env.cameras:
            hint = did_you_mean(name, env.cameras) if env.cameras else "It has no camera."
            wrong.append(f"the env has no camera {name!r} ({hint})")
        elif tuple(size) != tuple(env.cameras[name]):
            wrong.append(
                f"camera {name!r} was {tuple(size)} (height, width) and is "
                f"{tuple(env.cameras[name])}"
            )
    wrong += [
        f"the env has a camera {name!r} that the checkpoint does not know"
        for name in env.cameras
        if name not in old.cameras
    ]
    if wrong:
        raise UserError(
            f"The checkpoint was made for {old.name} and does not fit {env.name}: "
            f"{'; '.join(wrong)}. Change the env's config to match, or train for this env."
        )
