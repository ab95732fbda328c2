"""The tasks, one table row each; ``layouts`` draws their initial states.

Success and progress are computed from a ``View`` of n envs. Nothing here knows about physics or
pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embodyrl.registry import TaskInfo
from embodyrl.sims.mujoco import scene

Array = NDArray[np.float64]

SPLITS = {
    "train": "the distribution that is trained on",
    "eval": "the same distribution, other states",
    "ood_position": "blocks outside the region seen in training",
    "ood_clutter": "as many blocks as there are colours (pick and stack)",
    "ood_colour": "other shades of the named colours, another table",
    "ood_lighting": "darker, tinted light from another side",
    "ood_camera": "the camera moved, turned and tilted",
    "ood_language": "paraphrased instructions",
}


@dataclass
class View:
    """The state of n envs as tasks and experts see it; positions in m in the robot base's frame."""

    ee: Array
    """(n, 3) point between the finger tips."""
    opening: Array
    """(n,) distance between the fingers."""
    blocks: Array
    """(n, num_blocks, 3): the named one first; for stack, the one below second."""
    goal: Array
    """(n, 3) the marker's centre."""
    handle: Array
    """(n, 3) the drawer's handle."""
    drawer: Array
    """(n,) how far the drawer is open."""


@dataclass(frozen=True)
class Task:
    """A row of the table."""

    name: str
    steps: int
    instruction: str
    paraphrase: str
    success: Callable[[View], NDArray[np.bool_]]
    progress: Callable[[View], Array]
    """(n,) in [0, 1]; the dense reward of a step is its change."""
    blocks: tuple[int, int] = (0, 0)
    """Fewest and most blocks on the table."""
    clutter: bool = False
    """Whether ``ood_clutter`` adds blocks."""
    marker: str | None = None
    drawer: bool = False
    undoes: str = ""
    """The task whose end is the start of this one, and whose start is its end.

    Its instruction then names a ``{quarter}`` of the region in which blocks start, in which the goal
    lies unseen, so that the blocks of a long practice come to lie in different places.
    """


def _norm(x: Array) -> Array:
    return np.sqrt((x**2).sum(-1))


def _near(distance: Array, scale: float) -> Array:
    """From 1 at distance 0 down to 0; about a quarter at ``scale`` m."""
    return 1.0 - np.tanh(distance / scale)


def _lift(v: View) -> Array:
    """Height of the first block above the table, in m."""
    return v.blocks[:, 0, 2] - scene.BLOCK_HALF


def _on_top(v: View) -> NDArray[np.bool_]:
    """Whether the first block rests on the second, and the hand has let go."""
    gap = v.blocks[:, 0] - v.blocks[:, 1]
    level = np.abs(gap[:, 2] - 2 * scene.BLOCK_HALF) < 0.008
    return (
        level
        & (_norm(gap[:, :2]) < scene.BLOCK_HALF)
        & (v.opening > 0.06)
        & (_norm(v.ee - v.blocks[:, 0]) > 0.03)
    )


def _to_quarter(v: View) -> Array:
    """(n,) m from the first block to the goal's quarter of the region; 0 in it."""
    middle = (scene.REGION_LOW + scene.REGION_HIGH) / 2
    goal = v.goal[:, :2]
    low = np.where(goal < middle, scene.REGION_LOW, middle)
    high = np.where(goal < middle, middle, scene.REGION_HIGH)
    block = v.blocks[:, 0, :2]
    return _norm(block - np.clip(block, low, high))


def _put_back(v: View) -> NDArray[np.bool_]:
    """Whether the first block lies in its quarter, free to be grasped, and the hand is off it."""
    others = _norm(v.blocks[:, 1:, :2] - v.blocks[:, :1, :2])
    return (
        (_to_quarter(v) == 0.0)
        & (np.abs(_lift(v)) < 0.008)
        & (others > 0.065).all(-1)
        & (v.opening > 0.06)
        & (v.ee[:, 2] - v.blocks[:, 0, 2] > 0.05)
    )


def _put_back_progress(v: View) -> Array:
    # Near the block, over its quarter, and down again.
    near = _near(_norm(v.ee - v.blocks[:, 0]), 0.1)
    there = _near(_to_quarter(v), 0.1)
    low = 1.0 - np.clip(_lift(v) / 0.05, 0, 1)
    return 0.3 * near + 0.4 * there + 0.3 * there * low


def _stack_progress(v: View) -> Array:
    above = v.blocks[:, 1] + [0.0, 0.0, 2 * scene.BLOCK_HALF]
    near = _near(_norm(v.ee - v.blocks[:, 0]), 0.1)
    return (
        0.3 * near
        + 0.2 * np.clip(_lift(v) / 0.05, 0, 1)
        + 0.5 * _near(_norm(v.blocks[:, 0] - above), 0.1)
    )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "reach",
            25,
            instruction="move the gripper to the green ball",
            paraphrase="bring the hand over to where the green ball is",
            success=lambda v: _norm(v.ee - v.goal) < 0.025,
            progress=lambda v: _near(_norm(v.ee - v.goal), 0.15),
            marker="ball",
        ),
        Task(
            "push",
            50,
            instruction="push the {0} block onto the green square",
            paraphrase="slide the {0} cube until it is on the green patch",
            success=lambda v: _norm(v.blocks[:, 0, :2] - v.goal[:, :2]) < 0.035,
            progress=lambda v: (
                0.3 * _near(_norm(v.ee - v.blocks[:, 0]), 0.1)
                + 0.7 * _near(_norm(v.blocks[:, 0, :2] - v.goal[:, :2]), 0.1)
            ),
            blocks=(1, 1),
            marker="zone",
        ),
        Task(
            "pick",
            40,
            instruction="pick up the {0} block",
            paraphrase="grasp the {0} cube and raise it",
            success=lambda v: (_lift(v) > 0.05) & (_norm(v.ee - v.blocks[:, 0]) < 0.06),
            progress=lambda v: (
                0.5 * _near(_norm(v.ee - v.blocks[:, 0]), 0.1)
                + 0.5 * np.clip(_lift(v) / 0.05, 0, 1)
            ),
            blocks=(2, 3),
            clutter=True,
        ),
        Task(
            "stack",
            60,
            instruction="stack the {0} block on the {1} block",
            paraphrase="put the {0} cube on top of the {1} cube",
            success=_on_top,
            progress=_stack_progress,
            blocks=(2, 2),
            clutter=True,
        ),
        Task(
            "open_drawer",
            50,
            instruction="open the drawer",
            paraphrase="pull the drawer out by its handle",
            success=lambda v: v.drawer > 0.10,
            progress=lambda v: (
                0.4 * _near(_norm(v.ee - v.handle), 0.1) + 0.6 * np.clip(v.drawer / 0.10, 0, 1)
            ),
            drawer=True,
        ),
        Task(
            "put_back",
            60,
            instruction="put the {0} block back on the {quarter}",
            paraphrase="return the {0} cube to the {quarter} of the table",
            success=_put_back,
            progress=_put_back_progress,
            blocks=(2, 3),
            clutter=True,
            undoes="pick",
        ),
    )
}


def counterpart(name: str) -> str:
    """The task whose start is the end of another, and whose end is its start; empty for none."""
    undoing = [task.name for task in TASKS.values() if task.undoes == name]
    return TASKS[name].undoes or next(iter(undoing), "")


def list_tasks() -> list[TaskInfo]:
    """All tasks, for ``embodyrl list``."""
    return [
        TaskInfo(
            task.name,
            task.instruction.format(
                "<colour>", "<other colour>", quarter="<near or far, left or right>"
            ),
            f"env.task={task.name}",
        )
        for task in TASKS.values()
    ]
