"""The ``EnvSpec`` of a checkpoint: as JSON, read again, and compared with that of an env."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from embodyrl.errors import UserError, did_you_mean
from embodyrl.storage.plain_data import (
    ANYTHING,
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    Kind,
    mismatch,
    read_json,
)
from embodyrl.types import Conventions, EnvSpec


def one_of(*valid: str) -> Kind:
    """One of these texts."""
    return Kind(f"one of {', '.join(filter(None, valid))}", lambda value: value in valid)


POSITIVE = Kind("above 0", lambda value: NUMBER.test(value) and 0 < value <= 1e6)
SIZE = Kind("from 0 to 1,000,000", lambda value: COUNT.test(value) and value <= 10**6)
PIXELS = Kind("from 1 to 8192", lambda value: COUNT.test(value) and 0 < value <= 8192)
ORIGIN_FILE = "embodyrl.json"
"""The file of an exported checkpoint that holds the spec of its env."""
MEANING = {
    "orientation?": one_of("", "upright", "upside_down", "mirrored", "turned_180"),
    "channels?": one_of("", "rgb", "bgr"),
    "fit?": one_of("", "crop", "squeeze", "pad"),
    "state?": [TEXT],
    "actions?": one_of("", "delta", "absolute", "velocity"),
    "scale?": [NUMBER],
    "gripper?": [NUMBER],
    "lag?": Kind("-1, 0 or 1", lambda value: value in (-1, 0, 1) and not isinstance(value, bool)),
}
"""Structure of ``Conventions`` as plain data."""
WORDS = {
    "orientation": "the orientation of pictures",
    "channels": "the order of the colour channels",
    "fit": "how a picture of another shape is changed",
    "state": "the parts of the state",
    "actions": "the kind of actions",
    "scale": "what an action of 1 moves",
    "gripper": "the actions that close and open the gripper",
    "lag": "the frames by which actions stand late",
}
"""What the fields of ``Conventions`` are called in messages."""
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
    "task_steps?": [COUNT],
    "num_init_states?": (COUNT, None),
    "reports_success?": FLAG,
    "layout?": [ANYTHING],
    "conventions?": {...: ANYTHING},
    "history?": COUNT,
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
        values["task_steps"] = tuple(data.get("task_steps", ()))
        if values["task_steps"] and len(values["task_steps"]) != len(values["tasks"]):
            raise ValueError("task_steps must be one number for each of tasks")
        values["layout"] = tuple(
            (kind, int(start), int(numbers)) for kind, start, numbers in data.get("layout", ())
        )
        values["conventions"] = conventions_from_json(data.get("conventions", {}))
        return EnvSpec(**values)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"The env spec is incomplete: {error}.") from error


def conventions_from_json(data: Mapping[str, Any], where: str = "The conventions") -> Conventions:
    """Conventions from plain data, such as a file, a message or ``data.convention`` says them.

    Raises:
        UserError: an unknown key, or a value that cannot be.
    """
    known = [f.name for f in fields(Conventions)]
    for key in data:
        if key not in known:
            raise UserError(f"{where} have no field {key!r}. {did_you_mean(str(key), known)}")
    # As JSON has it, with lists for tuples.
    plain = json.loads(json.dumps(dict(data)))
    problem = mismatch(plain, MEANING)
    ends = plain.get("gripper", [])
    if not problem and ends and (len(ends) != 2 or ends[0] == ends[1]):
        problem = "gripper must be the two actions that close and open it, such as [-1, 1]"
    if not problem and 0 in plain.get("scale", []):
        problem = "scale holds a 0, and every action dim but the gripper's moves something"
    if problem:
        raise UserError(f"{where} are wrong: {problem}.")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
    return Conventions(**values)


def unlike(old: Conventions, new: Conventions) -> list[str]:
    """The fields of conventions in which both are known and differ."""
    return [
        f.name
        for f in fields(Conventions)
        if getattr(old, f.name) and getattr(new, f.name) and not _same(old, new, f.name)
    ]


def check_export(folder: Path, env: EnvSpec) -> None:
    """Refuses an exported checkpoint whose pictures or actions mean something else than the env's.

    Args:
        folder: of the checkpoint; one without ``ORIGIN_FILE`` says nothing.
        env: the spec of the env that its policy will act in.

    Raises:
        UserError: naming what differs, and what to give.
    """
    file = folder / ORIGIN_FILE
    if not file.is_file():
        return
    said = read_json(file, {"spec": {...: ANYTHING}}, "Export the checkpoint again.")
    old = spec_from_json(said["spec"])
    for name in unlike(old.conventions, env.conventions):
        raise UserError(
            f"{WORDS[name].capitalize()} of the checkpoint {folder} ({name}) was "
            f"{getattr(old.conventions, name)!r}, and {env.name} has "
            f"{getattr(env.conventions, name)!r}. Show the env as it was: set env.profile as in "
            "the run that was exported."
        )


def _same(old: Conventions, new: Conventions, name: str) -> bool:
    one, other = getattr(old, name), getattr(new, name)
    if name == "scale" and len(one) == len(other):
        return all(abs(a - b) <= 1e-6 * abs(b) for a, b in zip(one, other, strict=True))
    return one == other


def check_compatible(saved: EnvSpec | Mapping[str, Any], env: EnvSpec) -> None:
    """Checks that a checkpoint's policy can act in an env.

    Action dims, proprio dims, control mode, control rate, cameras and what is known of the
    conventions must be equal. The tasks and the episode length may differ.

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
    wrong += [
        f"{WORDS[name]} ({name}) was {getattr(old.conventions, name)!r} and is "
        f"{getattr(env.conventions, name)!r}"
        for name in unlike(old.conventions, env.conventions)
    ]
    if wrong:
        raise UserError(
            f"The checkpoint was made for {old.name} and does not fit {env.name}: "
            f"{'; '.join(wrong)}. Change the env's config to match, or train for this env."
        )
