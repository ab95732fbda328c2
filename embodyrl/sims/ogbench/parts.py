"""Which part of an OGBench scene to move next, and whither: what its oracles are told.

An OGBench oracle moves one part: a cube, a button, the drawer or the window. Its goals need several
in the right order: the cubes of a stack from below, a place freed before it is filled, a drawer
unlocked before it is opened.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodyrl.sims.ogbench.scenes import CUBE_SIZE

_NEAR = 0.04  # OGBench's own bound of success, in metres
_FREE = 0.055  # cubes whose centres are farther apart do not touch, whatever their yaw
_TABLE = 0.02  # height of a cube that lies on the table
_DRAWER_OPEN = -0.16
_WINDOW_OPEN = 0.2
_LOCK = {"drawer": 0, "window": 1}
"""The button that locks each; state 0 is locked."""


@dataclass(frozen=True)
class Move:
    """One part and where it belongs.

    Attributes:
        part: ``"cube"``, ``"button"``, ``"drawer"`` or ``"window"``.
        number: of the cube or button.
        place: of a cube, (x, y, z, yaw); of the others its joint position or state.
    """

    part: str
    number: int = 0
    place: tuple[float, ...] = (0.0,)


def next_move(simulation: Any, rng: np.random.Generator) -> Move | None:
    """The next move towards the goal of the episode; None if all is done.

    Args:
        simulation: OGBench's env.
        rng: for the place of a cube that is in another's way.
    """
    if not hasattr(simulation, "_target_button_states"):
        return _next_cube(simulation, rng)
    if hasattr(simulation, "_target_drawer_pos"):
        return _next_in_scene(simulation)
    pressed = presses(
        np.asarray(simulation._cur_button_states),
        np.asarray(simulation._target_button_states),
        simulation._num_cols,
    )
    return _press(simulation, pressed[0]) if pressed else None


def random_move(simulation: Any, rng: np.random.Generator) -> Move:
    """A random part to a random place, as in OGBench's play data."""
    parts = []
    if hasattr(simulation, "_cube_target_mocap_ids"):
        parts.append("cube")
    if hasattr(simulation, "_target_button_states"):
        parts.append("button")
    if hasattr(simulation, "_target_drawer_pos"):
        parts += ["drawer", "window"]
    # A locked drawer or window is tried less often, as OGBench does.
    states = getattr(simulation, "_cur_button_states", ())
    weights = np.array([0.25 if p in _LOCK and not states[_LOCK[p]] else 1.0 for p in parts])
    part = str(rng.choice(parts, p=weights / weights.sum()))
    # A drawer or window goes from one end to the other.
    if part == "button":
        return _press(simulation, int(rng.integers(simulation._num_buttons)))
    if part == "drawer":
        closed = simulation.data.joint("drawer_slide").qpos[0] >= _DRAWER_OPEN / 2
        return Move("drawer", place=(_DRAWER_OPEN if closed else 0.0,))
    if part == "window":
        closed = simulation.data.joint("window_slide").qpos[0] <= _WINDOW_OPEN / 2
        return Move("window", place=(_WINDOW_OPEN if closed else 0.0,))
    # A cube that nothing lies on goes to the table, or half of the time onto another such cube.
    cubes = cube_positions(simulation)
    tops = _uncovered(cubes)
    number = int(rng.choice(tops))
    others = [k for k in tops if k != number]
    x, y = rng.uniform(*simulation._target_sampling_bounds)
    z = _TABLE
    if others and rng.uniform() < 0.5:
        x, y, z = cubes[int(rng.choice(others))] + [0, 0, CUBE_SIZE]
    return Move("cube", number, (float(x), float(y), float(z), float(rng.uniform(0, 2 * np.pi))))


def cube_positions(simulation: Any) -> np.ndarray:
    """(cubes, 3) in metres."""
    count = simulation._num_cubes
    return np.stack([simulation.data.joint(f"object_joint_{k}").qpos[:3] for k in range(count)])


def _uncovered(cubes: np.ndarray) -> list[int]:
    """The cubes that nothing lies on."""
    return [
        k
        for k, cube in enumerate(cubes)
        if not any(
            other[2] > cube[2] + CUBE_SIZE / 2
            and np.linalg.norm(other[:2] - cube[:2]) < CUBE_SIZE * 0.9
            for other in cubes
        )
    ]


def _next_cube(simulation: Any, rng: np.random.Generator) -> Move | None:
    cubes = cube_positions(simulation)
    # OGBench marks each cube's goal with a mocap body.
    goals = simulation.data.mocap_pos[simulation._cube_target_mocap_ids]
    done = np.linalg.norm(cubes - goals, axis=1) <= _NEAR
    if done.all():
        return None
    tops = _uncovered(cubes)
    below = goals[:, 2][:, None] > goals[:, 2][None] + CUBE_SIZE / 2
    # The lowest goals first.
    for k in sorted(tops, key=lambda k: goals[k, 2]):
        others = np.delete(cubes, k, axis=0)
        free = not (np.linalg.norm(others - goals[k], axis=1) < _FREE * 0.7).any()
        # What it will stand on must be there.
        stands = all(done[j] for j in np.flatnonzero(below[k]))
        if not done[k] and free and stands:
            return Move("cube", k, (*goals[k].tolist(), 0.0))
    # Each one's place is taken, or it lies below another: put one aside, where nothing is and nothing belongs.
    blocked = [k for k in tops if not done[k]] or tops
    number = int(rng.choice(blocked))
    taken = np.concatenate([cubes, goals])[:, :2]
    places = rng.uniform(*simulation._target_sampling_bounds, size=(100, 2))
    room = np.linalg.norm(taken[None] - places[:, None], axis=2).min(axis=1)
    place = places[int((room > 2 * _FREE).argmax() if (room > 2 * _FREE).any() else room.argmax())]
    return Move("cube", number, (*place.tolist(), _TABLE, 0.0))


def _next_in_scene(simulation: Any) -> Move | None:
    """The cube first, which may need the drawer open; locks last."""
    cube = cube_positions(simulation)[0]
    goal = simulation.data.mocap_pos[simulation._cube_target_mocap_ids[0]]
    drawer = float(simulation.data.joint("drawer_slide").qpos[0])
    window = float(simulation.data.joint("window_slide").qpos[0])
    # A goal that far to the left is inside the closed drawer.
    into_drawer = goal[1] < -0.2
    if into_drawer and not simulation._is_in_drawer(cube):
        if drawer > _DRAWER_OPEN + 0.02:
            return _slide(simulation, "drawer", _DRAWER_OPEN)
        return Move("cube", 0, (*simulation._drawer_center.tolist(), 0.0))
    if not into_drawer and np.linalg.norm(cube - goal) > _NEAR:
        return Move("cube", 0, (*goal.tolist(), 0.0))
    # Then what slides, more closely than success asks for, because it is to stay.
    if abs(drawer - simulation._target_drawer_pos) > _NEAR / 2:
        return _slide(simulation, "drawer", simulation._target_drawer_pos)
    if abs(window - simulation._target_window_pos) > _NEAR / 2:
        return _slide(simulation, "window", simulation._target_window_pos)
    # Buttons last: they lock what has been moved.
    for number, (now, wanted) in enumerate(
        zip(simulation._cur_button_states, simulation._target_button_states, strict=True)
    ):
        if now != wanted:
            return _press(simulation, number)
    return None


def _slide(simulation: Any, part: str, place: float) -> Move:
    """Moves the drawer or the window, which may have to be unlocked first."""
    lock = _LOCK[part]
    if simulation._cur_button_states[lock] == 0:
        return _press(simulation, lock)
    return Move(part, place=(float(place),))


def _press(simulation: Any, number: int) -> Move:
    return Move("button", number, (float(1 - simulation._cur_button_states[number]),))


def presses(now: np.ndarray, wanted: np.ndarray, columns: int) -> list[int]:
    """The fewest buttons of "Lights Out" that lead from one state to another.

    A button turns itself and its neighbours. Once the presses of the first row are chosen, each
    row below is determined, because only it can still put right the row above.

    Args:
        now: (rows * columns,) states, 0 or 1.
        wanted: the same.
        columns: of the puzzle.

    Returns:
        Numbers of the buttons; empty if nothing differs.

    Raises:
        ValueError: no presses lead there.
    """
    wrong = (np.asarray(now) != np.asarray(wanted)).reshape(-1, columns)
    best: np.ndarray | None = None
    for first in itertools.product([False, True], repeat=columns):
        left = wrong.copy()
        pressed = np.zeros_like(left)
        for row in range(len(left)):
            pressed[row] = first if row == 0 else left[row - 1]
            # Each press turns five lights, fewer at the edge.
            for column in np.flatnonzero(pressed[row]):
                for r, c in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)):
                    y, x = row + r, column + c
                    if 0 <= y < len(left) and 0 <= x < columns:
                        left[y, x] ^= True
        if not left.any() and (best is None or pressed.sum() < best.sum()):
            best = pressed
    if best is None:
        raise ValueError("No presses lead from this state of the buttons to that one.")
    return np.flatnonzero(best.ravel()).tolist()
