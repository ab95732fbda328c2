"""What the HDF5 layouts have in common: names of episodes, arrays by their paths, settings as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.data.importers.write import Say, UnusableEpisodeError
from embodyrl.data.recording import Recording
from embodyrl.errors import UserError
from embodyrl.storage.plain_data import first_line
from embodyrl.types import Conventions

Episodes = Iterator[tuple[str, Callable[[], Recording]]]


def each_episode(file: Path, names: list[str], read: Callable[[str], Recording]) -> Episodes:
    """What each episode is called, and the function that reads it."""

    def one(name: str) -> Recording:
        try:
            return read(name)
        except (KeyError, OSError, TypeError, ValueError, IndexError) as error:
            raise UnusableEpisodeError(f"it cannot be read ({first_line(error)})") from error

    return ((f"{file.name}, {name}", partial(one, name)) for name in names)


def recording_of(
    *,
    images: dict[str, np.ndarray],
    proprio: np.ndarray,
    actions: np.ndarray,
    reward: np.ndarray,
    solved: np.ndarray | None,
    task: str,
    instruction: str,
) -> Recording:
    """An episode of plain arrays; without ``solved`` its last action solves the task."""
    steps = len(actions)
    return Recording(
        images={name: np.ascontiguousarray(frames) for name, frames in images.items()},
        proprio=proprio.reshape(len(proprio), -1).astype(np.float32),
        actions=actions.reshape(steps, -1).astype(np.float32),
        reward=reward.reshape(-1).astype(np.float32),
        solved=np.arange(steps) == steps - 1 if solved is None else solved.reshape(-1),
        init=-1,
        task=task,
        instruction=instruction,
    )


def controller_of(options: dict[str, Any]) -> tuple[str, Conventions]:
    """What robosuite's settings say: the control mode, as the envs here call it, and its actions.

    Both are empty where the settings name no controller.
    """
    controller = _controller(options)
    kind = str(controller.get("type", "")).lower()
    return kind, Conventions(actions="absolute") if kind and _absolute(
        controller
    ) else Conventions()


def as_executed(
    file: Path, data: Any, names: list[str], options: dict[str, Any], say: Say
) -> Callable[[np.ndarray], np.ndarray]:
    """Recorded actions (T, A) -> as robosuite executes them.

    Its controllers clip changes to their input range (``Controller.scale_action``), and people's
    devices reach beyond it. Targets are not clipped, nor is anything whose controller is not known.
    """
    controller = _controller(options)
    low, high = controller.get("input_min", -1), controller.get("input_max", 1)
    plain = all(isinstance(limit, int | float) for limit in (low, high))
    if not controller.get("type") or _absolute(controller) or not plain:
        return lambda actions: actions
    # Said once for a file.
    rows = [array_of(data[name], "actions") for name in names if "actions" in data[name]]
    beyond = [((a < low) | (a > high)).any(axis=1).sum() for a in rows if a.ndim == 2]
    if sum(beyond):
        say(
            f"{file.name}: {sum(beyond)} of {sum(map(len, rows))} actions reach beyond "
            f"[{low:g}, {high:g}] and are clipped, as {controller['type']} does."
        )
    return lambda actions: np.clip(actions, low, high)


def _controller(options: dict[str, Any]) -> dict[str, Any]:
    """The settings of the controller; empty where none is named."""
    controller = options.get("controller_configs") or {}
    # From robosuite 1.5 on, each arm has its own.
    if parts := controller.get("body_parts"):
        controller = next(iter(parts.values()))
    return controller


def _absolute(controller: dict[str, Any]) -> bool:
    return not controller.get("control_delta", True) or controller.get("input_type") == "absolute"


def in_order(group: Any) -> list[str]:
    """The names of a group's episodes, by their numbers."""
    names = [name for name in group if re.fullmatch(r"(demo|traj)_\d+", name)]
    if not names:
        raise UserError(f"{group.file.filename} holds no episode.")
    return sorted(names, key=lambda name: int(name.split("_")[1]))


def first_obs(data: Any, names: list[str], file: Path) -> dict[str, Any]:
    """Key -> array of the first episode's observations."""
    if "obs" not in data[names[0]]:
        raise UserError(
            f"{file} holds states of the simulator but no observations. Add them with robomimic's "
            "dataset_states_to_obs.py (after convert_robosuite.py, if robosuite wrote the file)."
        )
    return dict(leaves_of(data[names[0]]["obs"]))


def leaves_of(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays of a group by their paths; a plain array has an empty one."""
    if hasattr(node, "shape"):
        yield prefix, node
        return
    for name in node:
        yield from leaves_of(node[name], f"{prefix}/{name}" if prefix else name)


def require_keys(known: dict[str, Any], keys: Sequence[str], file: Path) -> None:
    """Refuses a state that is made of keys which are not there."""
    missing = [key for key in keys if key not in known]
    if missing or not keys:
        raise UserError(
            f"{file} has no {missing[0] if missing else 'state'!r} among its observations. Name the "
            f"keys that make the state: --state KEY,KEY. There are {', '.join(known)}."
        )


def is_colour(array: Any) -> bool:
    """Whether these are pictures (T, h, w, 3) uint8."""
    return array.ndim == 4 and array.shape[-1] == 3 and array.dtype == np.uint8


def say_aside(
    file: Path, known: dict[str, Any], state: Sequence[str], cameras: dict[str, str], say: Say
) -> None:
    """Says which observations are not taken, depth among them."""
    aside = [key for key in known if key not in state and key not in cameras]
    if aside:
        say(f"{file.name}: left aside are {', '.join(aside)}.")


def longest(group: Any, names: list[str]) -> int:
    """Actions of the longest episode."""
    found = [group[name]["actions"] for name in names if "actions" in group[name]]
    return max((len(actions) for actions in found if hasattr(actions, "shape")), default=1)


def array_of(group: Any, key: str) -> np.ndarray:
    """An array of an episode, read whole."""
    return np.asarray(group[key][()])


def concatenated(group: Any, keys: list[str]) -> np.ndarray:
    """(T, P) of several arrays beside one another."""
    parts = [array_of(group, key) for key in keys]
    if len({len(part) for part in parts}) > 1:
        lengths = ", ".join(f"{key} {len(part)}" for key, part in zip(keys, parts, strict=True))
        raise UnusableEpisodeError(f"its state has parts of different lengths ({lengths})")
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def text_of(value: Any) -> str:
    """An attribute as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def json_of(text: Any, where: str) -> dict[str, Any]:
    """A mapping that an attribute or a file holds as JSON.

    Raises:
        UserError: it holds none; ``where`` names it.
    """
    try:
        found = json.loads(text_of(text))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is no JSON ({first_line(error)}).") from error
    if not isinstance(found, dict):
        raise UserError(f"{where} is no mapping.")
    return found
