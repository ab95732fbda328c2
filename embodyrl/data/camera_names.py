"""Which camera of a data set is which one of an env: ``data.cameras``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from embodyrl.data.lerobot_read import IMAGE_PREFIX, DatasetFiles
from embodyrl.errors import UserError, did_you_mean
from embodyrl.types import EnvSpec

HAND_WORDS = ("wrist", "hand", "gripper")
"""Parts of the names of cameras that an arm carries."""


def short_name(key: str) -> str:
    """A camera's key in a data set without LeRobot's prefix."""
    return key.removeprefix(IMAGE_PREFIX).removeprefix("observation.")


def dataset_cameras(
    data: DatasetFiles,
    spec: EnvSpec | None,
    given: Mapping[str, str] | None = None,
    profile: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, str]:
    """Camera name of the env -> key in the data set.

    A name comes from ``given``, from the profile, or from an equal name. If data set and env have
    one camera each, these are taken to be the same.

    Args:
        data: opened.
        spec: of the env; None takes all cameras of the data set under their own names.
        given: what the user says (``data.cameras``).
        profile: an env's camera -> the keys that the data's family may have for it.

    Raises:
        UserError: a camera of the env has none in the data set; the message says what to give.
    """
    found = list(data.cameras)
    short = {short_name(key): key for key in found}
    known = {**short, **{key: key for key in found}}
    # What the user says.
    keys = {name: known[data.need(key, known)] for name, key in (given or {}).items()}
    if spec is None:
        return keys or short
    if wrong := [name for name in keys if name not in spec.cameras]:
        raise UserError(
            f"{spec.name} has no camera {wrong[0]!r}. {did_you_mean(wrong[0], spec.cameras)}"
        )
    # The profile's keys, then equal names.
    for name in spec.cameras:
        options = [*(profile or {}).get(name, ()), name]
        there = [known[key] for key in options if key in known]
        if name not in keys and there:
            keys[name] = there[0]
    # One camera on both sides.
    if not keys and len(spec.cameras) == len(found) == 1:
        return {next(iter(spec.cameras)): found[0]}
    if missing := [name for name in spec.cameras if name not in keys]:
        raise UserError(_advice(data, spec, keys, missing))
    return {name: keys[name] for name in spec.cameras}


def _advice(data: DatasetFiles, spec: EnvSpec, keys: Mapping[str, str], missing: list[str]) -> str:
    """What to give where cameras of the env are missing."""
    short = [short_name(key) for key in data.cameras]
    says = f"{spec.name} has the camera {missing[0]!r}, but the data set {data.path} only has "
    says += f"{', '.join(map(repr, short)) or 'none'}."
    # What of the pictures is no camera.
    says += "".join(f" {key!r} is {what}." for key, what in data.no_colours.items())
    free = [short_name(key) for key in data.cameras if key not in keys.values()]
    if len(free) < len(missing):
        kept = [name for name in spec.cameras if name in keys] + missing[: len(free)]
        return (
            f"{says} It has fewer cameras than the env: take an env that shows as many "
            f"(env.cameras=[{','.join(kept)}])."
        )
    # Cameras on the hand go together; the others in their order.
    pairs = {name: short_name(key) for name, key in keys.items()}
    wanted = any(_on_hand(name) for name in missing)
    hands = [key for key in free if _on_hand(key)] or (free[1:2] if wanted else [])
    for name in sorted(missing, key=lambda name: not _on_hand(name)):
        likely = [k for k in free if (k in hands) == _on_hand(name)] or free
        pairs[name] = likely[0]
        free.remove(likely[0])
    listed = ", ".join(f"{name}: {pairs[name]}" for name in spec.cameras)
    return f'{says} Say which one to use: "data.cameras={{{listed}}}".'


def _on_hand(name: str) -> bool:
    return any(word in name.lower() for word in HAND_WORDS)
