"""Initial states: where things are, how they look, and what is said.

``train`` and ``eval`` draw from the same ranges. Every ``ood_`` split draws one thing from others,
and ``env.randomise`` lets ``train`` draw it from ranges in between (``PLACES``, ``LOOKS``).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from embodyrl.sims.mujoco import scene
from embodyrl.sims.mujoco.tasks import Task

Array = NDArray[np.float64]
Bounds = tuple[float, float]

PALETTE = {
    "red": (0.85, 0.08, 0.08),
    "blue": (0.10, 0.20, 0.90),
    "green": (0.08, 0.65, 0.12),
    "yellow": (0.95, 0.85, 0.10),
}
START_EE = np.array([0.44, 0.0, 0.17])
MIN_GAP = 0.095
QUARTERS = {
    "near right": (0, 0),
    "near left": (0, 1),
    "far right": (1, 0),
    "far left": (1, 1),
}
"""Quarters of the region in which blocks start, as the arm sees them: which half of x, and of y."""
HELD = 0.75
"""Share of the initial states of ``put_back`` in which the hand holds the block."""
RIM = 0.012
"""m between the goal and the edge of its quarter."""
MAX_BLOCKS = 4


@dataclass(frozen=True)
class Places:
    """Where objects start.

    Attributes:
        low: m, x and y.
        high: likewise.
        rim: whether blocks stand outside the region of ``USUAL`` alone.
        push: m, from the block to the square that it is pushed onto.
        cabinet: m, how far to the side the cabinet stands at most.
    """

    low: tuple[float, float]
    high: tuple[float, float]
    rim: bool
    push: Bounds
    cabinet: float


@dataclass(frozen=True)
class Colours:
    """Shades of blocks and table.

    Attributes:
        shade: part of the way towards black or white that a block's colour goes.
        table: brightness of the table.
        tint: how far each of its colours differs from that at most.
    """

    shade: Bounds
    table: Bounds
    tint: float


@dataclass(frozen=True)
class Lamp:
    """The lamp, whose light comes from any side.

    Attributes:
        slope: horizontal and downward part of its direction.
        diffuse: brightness of its light.
        diffuse_tint: the weakest of its colours, as a part of that.
        ambient: light from everywhere.
        ambient_tint: likewise.
    """

    slope: tuple[float, float]
    diffuse: Bounds
    diffuse_tint: float
    ambient: Bounds
    ambient_tint: float


@dataclass(frozen=True)
class Viewpoint:
    """The front camera.

    Attributes:
        low: m, how far it is moved at least along x, y and z.
        high: likewise, at most.
        look: m, how far the point that it faces is moved along each axis.
        roll: rad, how far it is tilted.
    """

    low: tuple[float, float, float]
    high: tuple[float, float, float]
    look: float
    roll: float


Look = Colours | Lamp | Viewpoint
USUAL = Places(
    tuple(scene.REGION_LOW.tolist()), tuple(scene.REGION_HIGH.tolist()), False, (0.11, 0.15), 0.10
)
"""Of ``train``, ``eval`` and the splits that vary something else."""
PLACES = (
    Places((0.35, -0.18), (0.605, 0.18), False, (0.11, 0.17), 0.125),
    Places((0.33, -0.20), (0.62, 0.20), True, (0.15, 0.19), 0.15),
)
"""Where ``train`` puts objects if it randomises positions, and where ``ood_position`` does."""
LOOKS: dict[str, tuple[Look, Look]] = {
    "colour": (
        Colours((0.0, 0.2), (0.4, 0.7), 0.08),
        Colours((0.25, 0.4), (0.2, 0.8), 0.08),
    ),
    "lighting": (
        Lamp((0.43, 0.9), (0.5, 0.8), 0.85, (0.4, 0.5), 0.9),
        Lamp((0.8, 0.6), (0.3, 0.9), 0.75, (0.15, 0.35), 0.85),
    ),
    "camera": (
        Viewpoint((-0.025, -0.06, -0.03), (0.04, 0.06, 0.05), 0.015, 0.04),
        Viewpoint((-0.05, -0.12, -0.06), (0.08, 0.12, 0.10), 0.03, 0.08),
    ),
}
"""What only pictures show: the ranges of ``train`` if it randomises it, and of its ``ood_`` split."""
VARIATIONS = ("position", "clutter", *LOOKS)
"""What ``env.randomise`` may name; clutter is one block more than otherwise, at most."""


@dataclass
class Layout:
    """One initial state: where things are, how they look, and the instruction."""

    task: str
    instruction: str
    ee: Array
    """(3,) m, the hand."""
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
    finger: float = 0.04
    """m, how far each finger is from the middle of the hand."""
    grip: float = 0.04
    """m, how far it is told to be."""


def sample(
    task: Task,
    split: str,
    init: int,
    num_blocks: int,
    fewest_blocks: int,
    most_blocks: int,
    randomise: Sequence[str] = (),
) -> Layout:
    """Draws the initial state of number ``init``; the same arguments always give the same one.

    Args:
        task: the row of the table.
        split: a key of ``tasks.SPLITS``.
        init: any non-negative int.
        num_blocks: blocks in the compiled scene; those that are not used are parked out of sight.
        fewest_blocks: fewest blocks on the table.
        most_blocks: most blocks on the table.
        randomise: those of ``VARIATIONS`` that ``train`` draws from wider ranges.
    """
    # A random stream for each task, split and number. The order of the draws below must not change:
    # the number of an initial state stands for it in every result.
    rng = _stream(f"{task.name}/{split}", init)
    # Other splits ignore what training randomises.
    randomise = randomise if split == "train" else ()
    places = PLACES[0] if "position" in randomise else USUAL
    places = PLACES[1] if split == "ood_position" else places
    # How many blocks, their colours, and where they are.
    used = int(rng.integers(fewest_blocks, most_blocks + 1)) if most_blocks else 0
    names = [str(name) for name in rng.permutation(list(PALETTE))]
    rgb = np.array([PALETTE[name] for name in names])
    blocks = np.array(
        [[-1.0 - 0.2 * k, 1.5, scene.BLOCK_HALF, 0.0] for k in range(num_blocks)]
    ).reshape(-1, 4)
    spots = _spots(rng, used, places)
    for k in range(used):
        blocks[k, :2] = spots[k]
        blocks[k, 3] = rng.uniform(-0.25, 0.25)
    # The instruction names the first colours.
    sentence = task.paraphrase if split == "ood_language" else task.instruction
    rgb = np.clip(rgb + rng.uniform(-0.05, 0.05, rgb.shape), 0.02, 1.0)
    layout = Layout(
        task=task.name,
        instruction=sentence.format(*names, quarter=""),
        ee=START_EE + rng.uniform([-0.03, -0.05, -0.03], [0.03, 0.05, 0.03]),
        blocks=blocks,
        colours=names,
        block_rgb=rgb,
    )
    # The goal's marker, or the cabinet.
    if task.marker == "ball":
        layout.ball = np.append(rng.uniform(places.low, places.high), rng.uniform(0.03, 0.18))
    elif task.marker == "zone":
        blocks[0, :2], layout.zone = _push_route(rng, places.push)
        blocks[0, 3] = rng.uniform(-0.1, 0.1)
    if task.drawer:
        reach = places.cabinet
        layout.cabinet = np.array([rng.uniform(0.66, 0.70), rng.uniform(-reach, reach), 0.0])
    if task.undoes:
        _take(layout, places, used, rng)
        _name_goal(layout, sentence, rng, blocks[1:used, :2])
    # Looks: of a split out of distribution, or those that training randomises. Each of these has a
    # stream of its own, so that one more leaves the others and all places as they are.
    for name, (randomised, ood) in LOOKS.items():
        if split == f"ood_{name}":
            _restyle(layout, ood, rng)
        elif name in randomise:
            _restyle(layout, randomised, _stream(f"{task.name}/{split}/{name}", init))
    return layout


def _stream(name: str, init: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence((zlib.crc32(name.encode()), init)))


def _spots(rng: np.random.Generator, count: int, places: Places) -> Array:
    """(count, 2) places at least ``MIN_GAP`` apart."""
    low, high = places.low, places.high
    # Drawn one by one; where the places drawn so far leave no room, begin again.
    while True:
        spots: list[Array] = []
        for _ in range(200):
            if len(spots) == count:
                return np.array(spots).reshape(-1, 2)
            spot = rng.uniform(low, high)
            inside = bool(((spot > USUAL.low) & (spot < USUAL.high)).all())
            if not (places.rim and inside) and all(
                np.hypot(*(spot - other)) > MIN_GAP for other in spots
            ):
                spots.append(spot)


def _push_route(rng: np.random.Generator, distances: Bounds) -> tuple[Array, Array]:
    """Where the block starts (2,), and the zone's centre (3,); mostly away from the robot."""
    angle = rng.uniform(-0.9, 0.9)
    distance = rng.uniform(*distances)
    start = rng.uniform([0.40, -0.10], [0.45, 0.10])
    goal = start + distance * np.array([np.cos(angle), np.sin(angle)])
    return start, np.append(goal, 0.001)


def ask_for(layout: Layout, task: Task, split: str, init: int, others: Array) -> None:
    """Makes a layout say what the next episode asks for, in the scene as it lies.

    Args:
        layout: of the episode before; its colours stay.
        task: that is asked for now.
        split: of the language.
        init: number of the draw.
        others: (n, 2) m, where the blocks lie that are not named first.
    """
    sentence = task.paraphrase if split == "ood_language" else task.instruction
    layout.task = task.name
    if task.undoes:
        _name_goal(layout, sentence, _stream(f"{task.name}/{split}/goal", init), others)
    else:
        layout.instruction = sentence.format(*layout.colours)


def _name_goal(layout: Layout, sentence: str, rng: np.random.Generator, others: Array) -> None:
    """Draws a place to put a block, and names its quarter in the instruction.

    The place is as far from the other blocks as in an initial state, where there is room.
    """
    half = (scene.REGION_HIGH - scene.REGION_LOW) / 2
    best = (-1.0, np.zeros(2), "")
    for _ in range(50):
        quarter = str(rng.choice(list(QUARTERS)))
        corner = scene.REGION_LOW + half * QUARTERS[quarter]
        spot = rng.uniform(corner + RIM, corner + half - RIM)
        room = min((float(np.hypot(*(spot - other))) for other in others), default=MIN_GAP)
        best = max(best, (room, spot, quarter), key=lambda found: found[0])
        if room >= MIN_GAP:
            break
    layout.zone = np.append(best[1], 0.001)
    layout.instruction = sentence.format(*layout.colours, quarter=best[2])


def _take(layout: Layout, places: Places, used: int, rng: np.random.Generator) -> None:
    """Gives the first block into the hand, or lays it down where ``pick`` may have lost it."""
    blocks = layout.blocks
    if rng.uniform() < HELD:
        blocks[0, 2:] = scene.BLOCK_HALF + rng.uniform(0.06, 0.16), 0.0
        layout.ee = blocks[0, :3].copy()
        layout.finger = scene.BLOCK_HALF
        layout.grip = 0.0
        return
    wide = PLACES[1] if places.rim else PLACES[0]
    while True:
        spot = rng.uniform(wide.low, wide.high)
        if all(np.hypot(*(spot - other)) > MIN_GAP for other in blocks[1:used, :2]):
            blocks[0, :2] = spot
            return


def _restyle(layout: Layout, ranges: Look, rng: np.random.Generator) -> None:
    """Changes colours, light or camera."""
    if isinstance(ranges, Colours):
        # Darker or paler, but never so far that the colour's name is wrong.
        toward = rng.choice([0.0, 1.0], size=(len(layout.block_rgb), 1))
        layout.block_rgb = layout.block_rgb + rng.uniform(*ranges.shade) * (
            toward - layout.block_rgb
        )
        tint = (-ranges.tint, ranges.tint, 3)
        layout.table_rgb = np.clip(rng.uniform(*ranges.table) + rng.uniform(*tint), 0, 1)
    elif isinstance(ranges, Lamp):
        # From any side, at one height; then how bright and of what colour.
        side = rng.uniform(0, 2 * np.pi)
        across, down = ranges.slope
        direction = np.array([across * np.cos(side), across * np.sin(side), -down])
        layout.light_dir = direction / np.linalg.norm(direction)
        layout.diffuse = rng.uniform(*ranges.diffuse) * rng.uniform(ranges.diffuse_tint, 1.0, 3)
        layout.ambient = rng.uniform(*ranges.ambient) * rng.uniform(ranges.ambient_tint, 1.0, 3)
    else:
        # Moved first, then turned towards a point near the usual one, and tilted.
        layout.camera_pos = scene.CAMERA_POS + rng.uniform(ranges.low, ranges.high)
        look = scene.CAMERA_LOOK_AT + rng.uniform(-ranges.look, ranges.look, 3)
        layout.camera_quat = scene.look_at(
            layout.camera_pos, look, roll=float(rng.uniform(-ranges.roll, ranges.roll))
        )
