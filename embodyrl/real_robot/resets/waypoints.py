"""A scripted return: where the hand goes to bring the scene back, whatever lies where.

    # waypoints.yaml: take what is in the hand to the middle of the tray, and let go
    spread: [0.08, 0.10, 0.0]
    waypoints:
      - {position: [0.48, 0.0, 0.15], fingers: closed}
      - {position: [0.48, 0.0, 0.03], fingers: closed}
      - {position: [0.48, 0.0, 0.03], fingers: open, seconds: 1.0}
      - {position: [0.48, 0.0, 0.15], fingers: open}

The hand points down. In place of such a file, the log of an episode is played again: the hand goes
where it was told to be then.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.errors import UserError
from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.limits import MAX_WIDTH
from embodyrl.real_robot.control.messages import Array
from embodyrl.real_robot.logs.mcap_log import read
from embodyrl.real_robot.parsing import number
from embodyrl.storage.plain_data import NUMBER, TEXT, check, read_yaml

STRUCTURE = {
    "waypoints": [{"position": [NUMBER], "fingers": TEXT, "seconds?": NUMBER}],
    "spread?": [NUMBER],
}
"""Structure of a file of waypoints."""
EVERY = 0.25
"""s between two waypoints of a log."""
GRASP = 0.5
"""s that the hand waits where the log opens or closes its fingers."""
LONGEST = 60.0
"""s that the hand may wait at a waypoint."""


@dataclass(frozen=True)
class Waypoint:
    """Where the hand goes next.

    Attributes:
        position: (3,) m, of the tool centre point, in the base's frame.
        rotation: (3, 3) of the hand.
        is_open: whether the fingers are open on the way and there.
        seconds: that the hand waits there.
    """

    position: Array
    rotation: Array
    is_open: bool
    seconds: float = 0.0


@dataclass(frozen=True)
class Script:
    """Waypoints in order, and (3,) m by how far each return shifts them all at most."""

    waypoints: tuple[Waypoint, ...]
    spread: Array


def read_script(path: str, low: Any, high: Any) -> Script:
    """The scripted return of a file.

    Args:
        path: of waypoints (YAML), or of a log (MCAP).
        low: (3,) m, lower corner of the workspace.
        high: (3,) m, upper corner.

    Raises:
        UserError: the file cannot be read, or a waypoint lies outside the workspace.
    """
    script = _of_log(path) if path.endswith(".mcap") else _of_yaml(path)
    for k, point in enumerate(script.waypoints):
        least, most = point.position - script.spread, point.position + script.spread
        if (least < low).any() or (most > high).any():
            raise UserError(
                f"Waypoint {k + 1} of {path}, {_text(point.position)} with a spread of "
                f"{_text(script.spread)}, lies outside the workspace from {_text(low)} to "
                f"{_text(high)}. Move it, or give another workspace."
            )
    return script


def _of_yaml(path: str) -> Script:
    remedy = "The page docs/howto/resets.md has an example."
    raw = read_yaml(Path(path))
    check(raw, STRUCTURE, path, remedy)
    points = []
    for k, given in enumerate(raw["waypoints"]):
        where = f"waypoints[{k}]"
        if given["fingers"] not in ("open", "closed"):
            raise UserError(
                f"{path} is malformed: {where}.fingers is {given['fingers']!r}; it must be open or "
                "closed."
            )
        seconds = number(given.get("seconds", 0.0), 0.0, LONGEST, f"{where}.seconds of {path}")
        position = _vector(given["position"], f"{where}.position", path)
        points.append(Waypoint(position, kinematics.DOWN, given["fingers"] == "open", seconds))
    if not points:
        raise UserError(f"{path} is malformed: it has no waypoints. {remedy}")
    spread = np.abs(_vector(raw.get("spread", [0.0, 0.0, 0.0]), "spread", path))
    return Script(tuple(points), spread)


def _of_log(path: str) -> Script:
    """Where the hand was told to be, every so often, and wherever its fingers changed."""
    commands = read(path)["/command"]
    if not commands:
        raise UserError(f"{path} holds no commands, so there is nothing to play again.")
    points: list[Waypoint] = []
    due = -np.inf
    for k, command in enumerate(commands):
        is_open = command["width"] > MAX_WIDTH / 2
        changed = bool(points) and is_open != points[-1].is_open
        if command["stamp"] < due and not changed and k + 1 < len(commands):
            continue
        due = command["stamp"] + EVERY
        position, rotation, _ = kinematics.forward(np.array(command["q"]))
        points.append(Waypoint(position, rotation, is_open, GRASP if changed else 0.0))
    return Script(tuple(points), np.zeros(3))


def _vector(given: list[float], name: str, path: str) -> Array:
    if len(given) != 3:
        raise UserError(f"{path} is malformed: {name} must be x, y and z in m.")
    return np.array(given, float)


def _text(vector: Any) -> str:
    return "(" + ", ".join(f"{value:g}" for value in np.round(np.asarray(vector), 3)) + ")"
