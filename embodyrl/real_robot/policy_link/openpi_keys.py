"""Observations of openpi's clients, as this project's servers take them.

openpi's examples for LIBERO, ALOHA and DROID name things otherwise:

    what        openpi                                           here
    a picture   observation/image, observation/wrist_image, ...   images: {camera: (h, w, 3) uint8}
                or images: {name: (3, h, w)}
    the state   observation/state or state, float64; for DROID    proprio, float32
                observation/joint_position and gripper_position
    the words   prompt                                            prompt

Nothing is turned or mirrored: a picture must be the way round that the policy was trained on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from embodyrl.functional.pictures import Image, fit
from embodyrl.real_robot.parsing import MessageError

log = logging.getLogger(__name__)
PREFIX = "observation/"
STATES = (("state",), ("joint_position", "gripper_position"))
"""Keys of the state, after ``PREFIX`` or alone; several are joined in this order."""
PLAIN = ("prompt", "step")
"""Keys that mean the same here."""
HANDS = ("wrist", "hand", "gripper")
"""A camera whose name holds one of these moves with the hand."""
MAX_PICTURES = 16


def from_openpi(message: Any, metadata: Mapping[str, Any]) -> Any:
    """The observation with the keys of ``server.check_observation``, if openpi's client sent it.

    Pictures may be (h, w, 3) or (3, h, w), uint8 or floats in [0, 1], and are fitted to the size of
    the policy's camera. A picture belongs to the camera of its name. Otherwise the only picture of
    a hand belongs to the only camera of a hand, and the only other one to the only other camera.

    Args:
        message: any request.
        metadata: of the policy, with its ``cameras`` (name -> (h, w)).

    Raises:
        MessageError: openpi's keys, but they do not say which picture is which camera's.
    """
    # Whoever sends proprio knows this project's keys.
    if not isinstance(message, dict) or "proprio" in message:
        return message
    parts = {str(key).removeprefix(PREFIX): value for key, value in message.items()}
    state = next((names for names in STATES if all(name in parts for name in names)), None)
    if state is None:
        return message
    # The state, what means the same, and the pictures, which are all that is left.
    proprio = np.concatenate([_numbers(parts.pop(name), name) for name in state])
    translated = {key: parts.pop(key) for key in PLAIN if key in parts}
    pictures = parts.pop("images", {})
    if not isinstance(pictures, dict):
        raise MessageError("The observation does not fit this policy: images is not a map.")
    pictures = pictures | parts
    if len(pictures) > MAX_PICTURES:
        raise MessageError(f"The observation has more than {MAX_PICTURES} pictures.")
    cameras = metadata["cameras"]
    # Which picture is which camera's.
    source = _sources(list(map(str, pictures)), list(cameras))
    if aside := sorted(set(map(str, pictures)) - set(source.values())):
        log.info("Pictures that the policy has no camera for: %s.", ", ".join(aside)[:200])
    images = {
        name: fit(_picture(pictures[key], key), (int(cameras[name][0]), int(cameras[name][1])))
        for name, key in source.items()
    }
    return {**translated, "images": images, "proprio": proprio}


def _sources(sent: list[str], cameras: list[str]) -> dict[str, str]:
    """Camera of the policy -> the picture that is its.

    Raises:
        MessageError: a camera has no picture, or may have several.
    """
    # Equal names go together.
    found = {name: name for name in cameras if name in sent}
    # Of what is left, the only camera of a kind goes with the only picture of that kind.
    for on_hand in (False, True):
        open_cameras = _of_kind((n for n in cameras if n not in found), on_hand)
        free = _of_kind((n for n in sent if n not in found.values()), on_hand)
        if len(open_cameras) == len(free) == 1:
            found[open_cameras[0]] = free[0]
    if missing := [name for name in cameras if name not in found]:
        raise MessageError(
            f"The observation does not fit this policy: no picture is camera {missing[0]}'s. Its "
            f"cameras are {', '.join(cameras)}, and the pictures {', '.join(sent)[:200] or 'none'}. "
            f"Name each picture as the camera, for example {PREFIX}{missing[0]}"
        )
    return {name: found[name] for name in cameras}


def _of_kind(names: Iterable[str], on_hand: bool) -> list[str]:
    """Those of cameras on the hand, or the others."""
    return [name for name in names if any(word in name for word in HANDS) is on_hand]


def _numbers(value: Any, name: str) -> np.ndarray:
    """A list of numbers, float32."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu" or value.ndim > 1:
        raise MessageError(
            f"The observation does not fit this policy: {name} is no list of numbers."
        )
    return value.reshape(-1).astype(np.float32)


def _picture(value: Any, name: str) -> Image:
    """A picture (h, w, 3) uint8."""
    if (
        not isinstance(value, np.ndarray)
        or value.ndim != 3
        or 3 not in (value.shape[0], value.shape[2])
    ):
        raise MessageError(
            f"The observation does not fit this policy: {name} is no colour picture."
        )
    if 0 in value.shape:
        raise MessageError(f"The observation does not fit this policy: {name} is an empty picture.")
    # Colours last, and whole numbers.
    if value.shape[2] != 3:
        value = value.transpose(1, 2, 0)
    if value.dtype.kind == "f":
        if not (np.isfinite(value).all() and value.min() >= 0 and value.max() <= 1):
            raise MessageError(
                f"The observation does not fit this policy: {name} holds floats outside of [0, 1]."
            )
        value = np.round(value * 255).astype(np.uint8)
    if value.dtype != np.uint8:
        raise MessageError(f"The observation does not fit this policy: {name} is not uint8.")
    return value
