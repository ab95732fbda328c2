"""What each evaluation goal of OGBench's scenes is in words."""

from __future__ import annotations

from typing import Any

import numpy as np

from embodyrl.registry import TaskInfo
from embodyrl.sims.ogbench.scenes import CUBE_SIZE, SCENES, SPLITS, SceneInfo

__all__ = ["SPLITS", "instruction", "list_tasks", "task_name"]

CUBE_COLOURS = ("red", "blue", "orange", "green", "purple", "yellow", "magenta", "gray")
BUTTON_COLOURS = ("red", "blue")

_SCENE_SENTENCES = (
    "open the drawer and the window",
    "close and lock the drawer and the window",
    "move the cube to the right, open the drawer, close the window and leave both unlocked",
    "put the cube into the drawer, close it and leave it unlocked",
    "put the cube into the drawer, close and lock it, and open and lock the window",
)


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
    # Of the cubes only those are named that have to move.
    goals = info["goal_xyzs"]
    moved = np.flatnonzero(np.abs(goals - info["init_xyzs"]).max(axis=1) > 1e-6)
    return "put " + " and ".join(
        f"the {CUBE_COLOURS[k]} cube {_place(goals, k)}" for k in moved.tolist()
    )


def _place(goals: np.ndarray, k: int) -> str:
    """Where cube k belongs, as seen by the cameras, which look along -x."""
    x, y, z = goals[k]
    # A cube whose goal is right below another's carries it.
    below = np.abs(goals - [x, y, z - CUBE_SIZE]).max(axis=1) < CUBE_SIZE / 4
    if below.any():
        return f"on the {CUBE_COLOURS[int(below.argmax())]} cube"
    row = "far" if x < 0.38 else "near" if x > 0.47 else "middle"
    column = "left" if y < -0.04 else "right" if y > 0.04 else "centre"
    return f"at the {row} {column}"


def task_name(scene: str, goal: int) -> str:
    """OGBench's own name of a single task, without the version."""
    return f"{scene}-task{goal}"


def list_tasks() -> list[TaskInfo]:
    """All goals, scene by scene.

    Raises:
        MissingDependencyError: OGBench is not installed.
    """
    from embodyrl.sims.ogbench.simulation import goal_infos

    return [
        TaskInfo(
            task_name(name, goal),
            instruction(scene, goal, info),
            f"env.task={name} env.goals=[{goal}]",
            group=name,
        )
        for name, scene in SCENES.items()
        for goal, info in enumerate(goal_infos(scene), start=1)
    ]
