"""The tasks, one table row each, and how initial states, appearances and instructions are drawn.

Success and progress are computed from a ``View`` of n envs. Nothing here knows about physics or
pixels.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from embodyrl.registry import TaskInfo
from embodyrl.sims.mujoco import scene

Array = NDArray[np.float64]

PALETTE = {
    "red": (0.85, 0.08, 0.08),
    "blue": (0.10, 0.20, 0.90),
    "green": (0.08, 0.65, 0.12),
    "yellow": (0.95, 0.85, 0.10),
}
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
TABLE_LOW = np.array([0.37, -0.16])
TABLE_HIGH = np.array([0.59, 0.16])
"""Where (m, x and y) objects start in training."""
WIDE_LOW = np.array([0.33, -0.20])
WIDE_HIGH = np.array([0.62, 0.20])
"""The larger region whose rim ``ood_position`` uses."""
START_EE = np.array([0.44, 0.0, 0.17])
MIN_GAP = 0.095


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
    )
}


def list_tasks() -> list[TaskInfo]:
    """All tasks, for ``embodyrl list``."""
    return [
        TaskInfo(
            task.name,
            task.instruction.format("<colour>", "<other colour>"),
            f"env.task={task.name}",
        )
        for task in TASKS.values()
    ]


@dataclass
class Layout:
    """One initial state: where things are, how they look, and the instruction."""

    task: str
    instruction: str
    ee: Array
    blocks: Array
    """(num_blocks, 4): x, y, z, yaw."""
    colours: list[str]
    block_rgb: Array
    ball: Array = field(default_factory=lambda: scene.AWAY)
    zone: Array = field(default_factory=lambda: scene.AWAY)
    cabinet: Array = field(default_factory=lambda: scene.AWAY)
    table_rgb: Array = field(default_factory=lambda: scene.TABLE_RGB)
    camera_pos: Array = field(default_factory=lambda: scene.CAMERA_POS)
    camera_quat: Array = field(
        default_factory=lambda: scene.look_at(scene.CAMERA_POS, scene.CAMERA_LOOK_AT)
    )
    light_dir: Array = field(default_factory=lambda: scene.LIGHT_DIR)
    diffuse: Array = field(default_factory=lambda: np.full(3, 0.65))
    ambient: Array = field(default_factory=lambda: np.full(3, 0.4))


def sample(
    task: Task, split: str, init: int, num_blocks: int, fewest_blocks: int, most_blocks: int
) -> Layout:
    """Draws the initial state of number ``init``; the same arguments always give the same one.

    Args:
        task: the row of the table.
        split: a key of ``SPLITS``.
        init: any non-negative int.
        num_blocks: blocks in the compiled scene; those that are not used are parked out of sight.
        fewest_blocks: fewest blocks on the table.
        most_blocks: most blocks on the table.
    """
    # A random stream for each task, split and number. The order of the draws below must not change:
    # the number of an initial state stands for it in every result.
    rng = np.random.default_rng(
        np.random.SeedSequence((zlib.crc32(f"{task.name}/{split}".encode()), init))
    )
    # How many blocks, their colours, and where they are.
    used = int(rng.integers(fewest_blocks, most_blocks + 1)) if most_blocks else 0
    names = [str(name) for name in rng.permutation(list(PALETTE))]
    rgb = np.array([PALETTE[name] for name in names])
    blocks = np.array(
        [[-1.0 - 0.2 * k, 1.5, scene.BLOCK_HALF, 0.0] for k in range(num_blocks)]
    ).reshape(-1, 4)
    spots = _spots(rng, used, split == "ood_position")
    for k in range(used):
        blocks[k, :2] = spots[k]
        blocks[k, 3] = rng.uniform(-0.25, 0.25)
    # The instruction names the first colours.
    sentence = task.paraphrase if split == "ood_language" else task.instruction
    rgb = np.clip(rgb + rng.uniform(-0.05, 0.05, rgb.shape), 0.02, 1.0)
    layout = Layout(
        task=task.name,
        instruction=sentence.format(*names),
        ee=START_EE + rng.uniform([-0.03, -0.05, -0.03], [0.03, 0.05, 0.03]),
        blocks=blocks,
        colours=names,
        block_rgb=rgb,
    )
    # The goal's marker, or the cabinet.
    if task.marker == "ball":
        low, high = (WIDE_LOW, WIDE_HIGH) if split == "ood_position" else (TABLE_LOW, TABLE_HIGH)
        layout.ball = np.append(rng.uniform(low, high), rng.uniform(0.03, 0.18))
    elif task.marker == "zone":
        blocks[0, :2], layout.zone = _push_route(rng, wide=split == "ood_position")
        blocks[0, 3] = rng.uniform(-0.1, 0.1)
    if task.drawer:
        reach = 0.15 if split == "ood_position" else 0.10
        layout.cabinet = np.array([rng.uniform(0.66, 0.70), rng.uniform(-reach, reach), 0.0])
    _restyle(layout, split, rng)
    return layout


def _spots(rng: np.random.Generator, count: int, wide: bool) -> Array:
    """(count, 2) places at least ``MIN_GAP`` apart; if ``wide``, on the rim of the wider region."""
    low, high = (WIDE_LOW, WIDE_HIGH) if wide else (TABLE_LOW, TABLE_HIGH)
    # Drawn one by one; where the places drawn so far leave no room, begin again.
    while True:
        spots: list[Array] = []
        for _ in range(200):
            if len(spots) == count:
                return np.array(spots).reshape(-1, 2)
            spot = rng.uniform(low, high)
            inside = bool(((spot > TABLE_LOW) & (spot < TABLE_HIGH)).all())
            if not (wide and inside) and all(
                np.hypot(*(spot - other)) > MIN_GAP for other in spots
            ):
                spots.append(spot)


def _push_route(rng: np.random.Generator, wide: bool) -> tuple[Array, Array]:
    """Where the block starts (2,), and the zone's centre (3,).

    They are 11 to 15 cm apart (15 to 19 if ``wide``), and the way leads mostly away from the robot.
    """
    angle = rng.uniform(-0.9, 0.9)
    distance = rng.uniform(0.15, 0.19) if wide else rng.uniform(0.11, 0.15)
    start = rng.uniform([0.40, -0.10], [0.45, 0.10])
    goal = start + distance * np.array([np.cos(angle), np.sin(angle)])
    return start, np.append(goal, 0.001)


def _restyle(layout: Layout, split: str, rng: np.random.Generator) -> None:
    """Changes colours, light or camera, in the splits that do."""
    if split == "ood_colour":
        # Darker or paler, but never so far that the colour's name is wrong.
        toward = rng.choice([0.0, 1.0], size=(len(layout.block_rgb), 1))
        layout.block_rgb = layout.block_rgb + rng.uniform(0.25, 0.4) * (toward - layout.block_rgb)
        layout.table_rgb = np.clip(rng.uniform(0.2, 0.8) + rng.uniform(-0.08, 0.08, 3), 0, 1)
    elif split == "ood_lighting":
        side = rng.uniform(0, 2 * np.pi)
        direction = np.array([0.8 * np.cos(side), 0.8 * np.sin(side), -0.6])
        layout.light_dir = direction / np.linalg.norm(direction)
        layout.diffuse = rng.uniform(0.3, 0.9) * rng.uniform(0.75, 1.0, 3)
        layout.ambient = rng.uniform(0.15, 0.35) * rng.uniform(0.85, 1.0, 3)
    elif split == "ood_camera":
        layout.camera_pos = scene.CAMERA_POS + rng.uniform(
            [-0.05, -0.12, -0.06], [0.08, 0.12, 0.10]
        )
        look = scene.CAMERA_LOOK_AT + rng.uniform(-0.03, 0.03, 3)
        layout.camera_quat = scene.look_at(
            layout.camera_pos, look, roll=float(rng.uniform(-0.08, 0.08))
        )
