"""What the spaces of a Gymnasium env become here: cameras, proprioception, an instruction, actions.

    Box of pictures                      a camera
    other Box, Discrete, MultiBinary ... numbers of proprio, one after the other
    Text                                 the instruction
    Dict, Tuple                          each entry by its own kind, named by its key
    others                               refused, in words

``docs/simulators.md`` has the table for users.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from embodyrl.errors import UserError

LEAST_EDGE = 8
"""Pixels of the shortest edge of what counts as a picture; smaller arrays are numbers."""
MOST_NUMBERS = 4096
"""A Box of two or more dimensions with more numbers than that is no state, but looks like a map."""
WHOLE_PICTURE = "image"
"""The camera's name where the observation is a picture and nothing else."""


class Picture(NamedTuple):
    """How a Box of pictures is stored.

    Attributes:
        order: ``"hwc"``, ``"chw"`` or ``"hw"``.
        size: (height, width).
        scale: what its values are multiplied with to lie in 0 to 255.
    """

    order: str
    size: tuple[int, int]
    scale: float

    def read(self, value: Any) -> np.ndarray:
        """(h, w, 3) uint8; grey pictures get three equal channels."""
        picture = np.asarray(value)
        if self.order == "chw":
            picture = np.moveaxis(picture, 0, -1)
        if self.order == "hw":
            picture = picture[..., None]
        if picture.shape[:2] != self.size or picture.shape[-1] not in (1, 3):
            raise ValueError(f"the picture has the shape {np.shape(value)}, unlike its space")
        if picture.dtype != np.uint8:
            picture = np.rint(np.nan_to_num(picture) * self.scale).clip(0, 255).astype(np.uint8)
        return np.ascontiguousarray(np.broadcast_to(picture, (*self.size, 3)))


class Numbers(NamedTuple):
    """How an entry becomes numbers.

    Attributes:
        size: how many.
        read: gives them, flat.
    """

    size: int
    read: Callable[[Any], np.ndarray]


class Seen(NamedTuple):
    """One observation.

    Attributes:
        images: camera name -> (h, w, 3) uint8.
        proprio: (P,) float32.
        instruction: a sentence; empty where the env gives none.
    """

    images: dict[str, np.ndarray]
    proprio: np.ndarray
    instruction: str


class ObservationReader:
    """Reads the observations of a space.

    Attributes:
        cameras: name -> (height, width).
        numbers: entry -> (first number in proprio, how many), in order.
        proprio_dim: P; 1 where there are only pictures: that number is always 0.
    """

    def __init__(self, env_id: str, space: spaces.Space[Any]) -> None:
        """Finds out what each entry becomes.

        Raises:
            UserError: an entry is of a kind that no policy here can see.
        """
        self.cameras: dict[str, tuple[int, int]] = {}
        self.numbers: dict[str, tuple[int, int]] = {}
        self._pictures: dict[str, tuple[tuple[Any, ...], Picture]] = {}
        self._columns: list[tuple[tuple[Any, ...], Numbers]] = []
        self._texts: list[tuple[Any, ...]] = []
        # Each entry is a sentence, a picture or some numbers.
        first = 0
        for path, leaf in _leaves(space):
            name = _name(path)
            if isinstance(leaf, spaces.Text):
                self._texts.append(path)
            elif (picture := picture_of(env_id, name, leaf)) is not None:
                self.cameras[name or WHOLE_PICTURE] = picture.size
                self._pictures[name or WHOLE_PICTURE] = (path, picture)
            else:
                column = _numbers_of(env_id, name, leaf)
                self._columns.append((path, column))
                self.numbers[name or "observation"] = (first, column.size)
                first += column.size
        if len(self.cameras) + len(self._columns) == 0:
            raise UserError(f"{env_id} shows nothing that a policy could act on: {space}.")
        self.proprio_dim = max(1, first)

    def read(self, obs: Any) -> Seen:
        """The parts of one observation.

        Raises:
            ValueError: an entry has another shape than its space says.
            KeyError: an entry is missing.
        """
        # All numbers in one row, in the order of the space.
        proprio = np.zeros(self.proprio_dim, np.float32)
        place = 0
        for path, column in self._columns:
            values = column.read(_at(obs, path))
            if values.shape != (column.size,):
                raise ValueError(
                    f"the observation {_name(path)!r} has {values.size} numbers, not {column.size}"
                    if path
                    else f"the observation has the shape {np.shape(obs)}, unlike its space"
                )
            proprio[place : place + column.size] = values
            place += column.size
        images = {
            name: picture.read(_at(obs, path)) for name, (path, picture) in self._pictures.items()
        }
        return Seen(images, proprio, " ".join(str(_at(obs, path)) for path in self._texts))


def picture_of(env_id: str, name: str, space: spaces.Space[Any]) -> Picture | None:
    """How the pictures of a space are stored; None where it holds no pictures.

    Pictures are uint8 with one or three channels, first or last, or grey without a channel axis;
    or floats with three axes in 0 to 1 or 0 to 255.

    Raises:
        UserError: it looks like pictures, but of a kind that cannot be told (stacked frames, RGBA).
    """
    if not isinstance(space, spaces.Box) or len(space.shape) < 2:
        return None
    # Bytes may be pictures of any layout; floats only with three axes and the range of colours.
    shape = space.shape
    is_bytes = space.dtype == np.uint8
    low = float(space.low.min())
    top = float(space.high.max())
    is_float = np.issubdtype(space.dtype, np.floating) and low == 0.0 and top in (1.0, 255.0)
    if not (is_bytes or (is_float and len(shape) >= 3)):
        return None
    # Channels last, channels first, or grey.
    scale = 255.0 if is_float and top == 1.0 else 1.0
    if len(shape) == 3 and shape[-1] in (1, 3) and min(shape[:2]) >= LEAST_EDGE:
        return Picture("hwc", (shape[0], shape[1]), scale)
    if len(shape) == 3 and shape[0] in (1, 3) and min(shape[1:]) >= LEAST_EDGE:
        return Picture("chw", (shape[1], shape[2]), scale)
    if len(shape) == 2 and min(shape) >= LEAST_EDGE:
        return Picture("hw", (shape[0], shape[1]), scale)
    if int(np.prod(shape)) <= MOST_NUMBERS:
        return None  # a small board, or the like
    raise UserError(
        f"{_entry(env_id, name)} looks like pictures, but its shape {shape} is neither "
        "(height, width, 3), (3, height, width) nor grey. Stacked frames, RGBA and depth are not "
        "read: wrap the env so that it shows one RGB picture per camera."
    )


def action_box(env_id: str, space: spaces.Space[Any]) -> spaces.Box:
    """The space of actions, which must be a bounded Box.

    Raises:
        UserError: it is something else.
    """
    if not isinstance(space, spaces.Box):
        choices = isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)
        what = "names one of several moves" if choices else "is no single array of numbers"
        raise UserError(
            f"The actions of {env_id} are {_short(space)}, which {what}; a flow policy gives "
            "continuous numbers. Wrap the env so that its action_space is a Box with bounds (docs: "
            "Simulators, Gymnasium, has an example)."
        )
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise UserError(f"The actions of {env_id} have no bounds to scale [-1, 1] to: {space}.")
    return space


def _leaves(space: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The entries of nested Dicts and Tuples, each with the keys that lead to it."""
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for place, inner in enumerate(space.spaces):
            yield from _leaves(inner, (*path, place))
    else:
        yield path, space


def _at(obs: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        obs = obs[key]
    # ManiSkill and others hand over torch tensors, which may lie on a GPU.
    return obs.detach().cpu().numpy() if hasattr(obs, "detach") else obs


def _name(path: tuple[Any, ...]) -> str:
    """The keys as one name, which is also good for a file."""
    return re.sub(r"[^\w .-]", "_", "_".join(str(key) for key in path)).lstrip(" .-")


def _numbers_of(env_id: str, name: str, space: Any) -> Numbers:
    """How an entry that is no picture becomes numbers.

    Raises:
        UserError: it cannot.
    """
    if isinstance(space, spaces.Box):
        count = int(np.prod(space.shape))
        if len(space.shape) >= 2 and count > MOST_NUMBERS:
            raise UserError(
                f"{_entry(env_id, name)} has the shape {space.shape} of {space.dtype}, which is no "
                "picture (uint8, or floats in 0 to 1) and too much for a state. Wrap the env so "
                "that it shows less, or as a picture."
            )
        shape = space.shape

        def flat(value: Any) -> np.ndarray:
            row = np.asarray(value, np.float32)
            if row.shape != shape:
                raise ValueError(f"the observation has the shape {row.shape}, not {shape}")
            return row.ravel()

        return Numbers(count, flat)
    # A choice is one number for each of its values: 1 for the one that is chosen.
    if isinstance(space, spaces.Discrete):
        size = int(space.n)
        start = int(space.start)
        _check_choices(env_id, name, size)
        return Numbers(size, lambda value: _one_hot(int(np.asarray(value).item()) - start, size))
    if isinstance(space, spaces.MultiDiscrete):
        sizes = [int(n) for n in space.nvec.ravel()]
        starts = [int(s) for s in np.broadcast_to(space.start, space.nvec.shape).ravel()]
        _check_choices(env_id, name, sum(sizes))

        def several(value: Any) -> np.ndarray:
            numbers = np.asarray(value).ravel().tolist()
            parts = zip(numbers, starts, sizes, strict=True)
            return np.concatenate([_one_hot(x - first, size) for x, first, size in parts])

        return Numbers(sum(sizes), several)
    if isinstance(space, spaces.MultiBinary):
        return Numbers(
            int(np.prod(space.shape)), lambda value: np.asarray(value, np.float32).ravel()
        )
    raise UserError(
        f"{_entry(env_id, name)} is {_short(space)}, whose size changes or whose kind is not known "
        "here; a policy sees pictures, a fixed number of numbers, and a sentence. Wrap the env so "
        "that it shows a Box."
    )


def _check_choices(env_id: str, name: str, count: int) -> None:
    if count > MOST_NUMBERS:
        raise UserError(
            f"{_entry(env_id, name)} has {count} values, each of which would be a number of its "
            f"own (at most {MOST_NUMBERS}). Wrap the env so that it shows a Box."
        )


def _one_hot(place: int, size: int) -> np.ndarray:
    """(size,) float32 with a 1 at ``place``."""
    if not 0 <= place < size:
        raise ValueError(f"the observation {place} is not one of {size} values")
    row = np.zeros(size, np.float32)
    row[place] = 1.0
    return row


def _entry(env_id: str, name: str) -> str:
    return f"The observation {name!r} of {env_id}" if name else f"The observation of {env_id}"


def _short(space: Any) -> str:
    text = str(space)
    return text if len(text) < 80 else f"{text[:77]}..."
