"""OGBench's manipulation scenes, and what each of their evaluation goals is in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodyrl.errors import UserError, did_you_mean
from embodyrl.registry import TaskInfo

SPLITS = {"train": "resets with even seeds", "eval": "resets with odd seeds"}
EXPERTS = ("markov", "plan", "play")
NUM_GOALS = 5
"""Evaluation goals of every scene."""


@dataclass(frozen=True)
class SceneInfo:
    """A scene.

    Attributes:
        kind: ``"cube"``, ``"scene"`` or ``"puzzle"``: which of OGBench's classes.
        env_type: its variant.
        max_episode_steps: OGBench's time limit, in control steps.
    """

    kind: str
    env_type: str
    max_episode_steps: int


SCENES = {
    "cube-single": SceneInfo("cube", "single", 200),
    "cube-double": SceneInfo("cube", "double", 500),
    "cube-triple": SceneInfo("cube", "triple", 1000),
    "cube-quadruple": SceneInfo("cube", "quadruple", 1000),
    "cube-octuple": SceneInfo("cube", "octuple", 1500),
    "scene": SceneInfo("scene", "scene", 750),
    "puzzle-3x3": SceneInfo("puzzle", "3x3", 500),
    "puzzle-4x4": SceneInfo("puzzle", "4x4", 500),
    "puzzle-4x5": SceneInfo("puzzle", "4x5", 1000),
    "puzzle-4x6": SceneInfo("puzzle", "4x6", 1000),
}
"""Name -> scene, with the time limits of OGBench 1.2."""

CUBE_COLOURS = ("red", "blue", "orange", "green", "purple", "yellow", "magenta", "gray")
BUTTON_COLOURS = ("red", "blue")
CUBE_SIZE = 0.04
"""Edge of a cube, in metres."""

_SCENE_SENTENCES = (
    "open the drawer and the window",
    "close and lock the drawer and the window",
    "move the cube to the right, open the drawer, close the window and leave both unlocked",
    "put the cube into the drawer, close it and leave it unlocked",
    "put the cube into the drawer, close and lock it, and open and lock the window",
)


def require_scene(name: str) -> SceneInfo:
    """The scene of a name.

    Raises:
        UserError: there is none.
    """
    if name not in SCENES:
        raise UserError(f"OGBench has no task {name!r}. {did_you_mean(name, SCENES)}")
    return SCENES[name]


def instruction(scene: SceneInfo, goal: int, info: dict[str, Any]) -> str:
    """The sentence that a policy is told.

    Args:
        scene: which.
        goal: its number, from 1.
        info: what OGBench says of the goal (``task_infos``).
    """
    if scene.kind == "scene":
        return _SCENE_SENTENCES[goal - 1]
    if scene.kind == "puzzle":
        columns = int(scene.env_type.split("x")[1])
        rows = np.asarray(info["goal_button_states"]).reshape(-1, columns)
        shown = ", ".join(" ".join(BUTTON_COLOURS[state] for state in row) for row in rows.tolist())
        return f"press buttons until their rows are {shown}"
    goals = info["goal_xyzs"]
    moved = np.flatnonzero(np.abs(goals - info["init_xyzs"]).max(axis=1) > 1e-6)
    return "put " + " and ".join(
        f"the {CUBE_COLOURS[k]} cube {_place(goals, k)}" for k in moved.tolist()
    )


def _place(goals: np.ndarray, k: int) -> str:
    """Where cube k belongs, as seen by the cameras, which look along -x."""
    x, y, z = goals[k]
    below = np.abs(goals - [x, y, z - CUBE_SIZE]).max(axis=1) < CUBE_SIZE / 4
    if below.any():
        return f"on the {CUBE_COLOURS[int(below.argmax())]} cube"
    row = "far" if x < 0.38 else "near" if x > 0.47 else "middle"
    column = "left" if y < -0.04 else "right" if y > 0.04 else "centre"
    return f"at the {row} {column}"


def goal_infos(scene: SceneInfo) -> Sequence[dict[str, Any]]:
    """What OGBench says of a scene's goals, without building it.

    Raises:
        MissingDependencyError: OGBench is not installed.
    """
    from embodyrl.sims.ogbench.simulation import scene_class

    blank: Any = object.__new__(scene_class(scene.kind))
    blank._env_type = scene.env_type
    blank._reward_task_id = None
    if scene.kind == "puzzle":
        blank._num_rows, blank._num_cols = map(int, scene.env_type.split("x"))
    blank.set_tasks()
    return blank.task_infos


def task_names(name: str, goals: Sequence[int]) -> list[str]:
    """OGBench's own names of single tasks, without the version."""
    return [f"{name}-task{goal}" for goal in goals]


def list_tasks() -> list[TaskInfo]:
    """All goals, scene by scene.

    Raises:
        MissingDependencyError: OGBench is not installed.
    """
    return [
        TaskInfo(
            task_names(name, [goal])[0],
            instruction(scene, goal, info),
            f"env.task={name} env.goals=[{goal}]",
            group=name,
        )
        for name, scene in SCENES.items()
        for goal, info in enumerate(goal_infos(scene), start=1)
    ]
