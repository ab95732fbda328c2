"""``plan_grasp``: where to hold an object, from its geometry and what stands around it.

What stands around the place that it is carried to counts, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embodyrl.sims.libero.skills.workspace import Workspace, vertical_rotation

MAX_WIDTH = 0.068  # metres; what is wider does not fit between the open fingers
FINGER_DEPTH = 0.03  # how far below an object's top the fingers reach at most
KNOB = 0.017  # metres of a knob that stick out on top
PALM = 0.085  # height of the palm above the finger tips
YAWS = np.deg2rad(np.arange(-90, 90, 5))


@dataclass
class Grasp:
    """A grasp from above.

    Attributes:
        position: (3,) of the point between the finger tips, metres.
        mat: (3, 3) rotation of the hand.
        mat_at_place: (3, 3) rotation of the hand when it lets go.
        release_height: of the item's lowest point, in metres, at which it is let go.
        cost: the lower, the better.
    """

    position: np.ndarray
    mat: np.ndarray
    mat_at_place: np.ndarray
    release_height: float
    cost: float


@dataclass
class _Hold:
    """A way to hold an object: where the hand is, how it is turned, and what that costs."""

    position: np.ndarray
    yaw: float
    cost: float


def plan_grasp(space: Workspace, item: str, place: str, attempt: int = 0) -> Grasp:
    """The grasp of an object with the lowest cost.

    Args:
        space: the scene.
        item: the object's name.
        place: of the object or region that it is carried to.
        attempt: how many grasps have failed; each takes a worse one.
    """
    points = space.points(item)
    obstacles = space.obstacles(item)
    turn = _turn_to_fit(points - space.position(item), space.half_size(place))
    grasps = []
    for hold in _holds(space, points):
        cost = hold.cost + _in_the_way(space, hold, obstacles) + 0.2 * abs(hold.yaw + turn)
        release_height, deep = _release(space, hold, turn, item, place, obstacles)
        grasps.append(
            Grasp(
                hold.position,
                vertical_rotation(hold.yaw) @ space.nominal,
                vertical_rotation(hold.yaw + turn) @ space.nominal,
                release_height,
                cost + deep,
            )
        )
    grasps.sort(key=lambda grasp: grasp.cost)
    return grasps[min(attempt * 2, len(grasps) - 1)]


def _holds(space: Workspace, points: np.ndarray) -> list[_Hold]:
    """Every yaw gives a pinch across the object where it fits between the fingers.

    Otherwise it gives two grasps of its rim. Little turning and a small width cost little.
    """
    top = points[:, 2].max()
    upper = points[points[:, 2] > top - 0.04]
    middle = (points[:, :2].max(0) + points[:, :2].min(0)) / 2
    height = max(top - FINGER_DEPTH, points[:, 2].min() + 0.012)
    knob = points[points[:, 2] > top - KNOB]
    out = []
    for yaw in YAWS:
        axis = space.finger_axis(yaw)
        along = upper[:, :2] @ axis
        width = along.max() - along.min()
        across = np.array([-axis[1], axis[0]])
        if width < MAX_WIDTH:
            centre = axis * (along.max() + along.min()) / 2 + across * (middle @ across)
            out.append(_Hold(np.array([*centre, height]), yaw, 10 * width))
        else:
            # A knob on top.
            along = knob[:, :2] @ axis
            if np.ptp(along) < MAX_WIDTH / 2 and np.ptp(knob[:, :2] @ across) < MAX_WIDTH / 2:
                centre = (knob[:, :2].max(0) + knob[:, :2].min(0)) / 2
                out.append(_Hold(np.array([*centre, top - KNOB / 2]), yaw, 1.0))
            # The rim: one finger inside, one outside.
            rim = points[points[:, 2] > top - 0.01]
            for side in (1.0, -1.0):
                radius = (side * ((rim[:, :2] - middle) @ axis)).max()
                centre = middle + side * axis * (radius - 0.006)
                out.append(_Hold(np.array([*centre, top - 0.022]), yaw, 2.0))
    return out


def _in_the_way(space: Workspace, hold: _Hold, obstacles: np.ndarray) -> float:
    """The cost of obstacles (M, 3) where fingers or palm would be."""
    along, across = _beside(space, hold.position[:2], hold.yaw, obstacles)
    height = hold.position[2]
    fingers = (np.abs(along - 0.045) < 0.02) & (across < 0.02) & (obstacles[:, 2] > height - 0.012)
    palm = (along < 0.12) & (across < 0.05) & (obstacles[:, 2] > height + PALM)
    return 1.0 * min(5, fingers.sum()) + 1.0 * min(5, palm.sum())


def _beside(
    space: Workspace, centre: np.ndarray, yaw: float, points: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Distances (M,) of points from a hand at ``centre`` (2,), along and across its fingers."""
    axis = space.finger_axis(yaw)
    relative = points[:, :2] - centre
    return np.abs(relative @ axis), np.abs(relative @ [-axis[1], axis[0]])


def _release(
    space: Workspace, hold: _Hold, turn: float, item: str, place: str, obstacles: np.ndarray
) -> tuple[float, float]:
    """How low an item can be put down before the palm hits something, and what a fall costs.

    Returns:
        The height in metres of the item's lowest point, and a cost.
    """
    surface, _ = space.surface(place)
    offset = vertical_rotation(turn) @ (hold.position - space.position(item))
    centre = (space.position(place) + offset)[:2]
    along, across = _beside(space, centre, hold.yaw + turn, obstacles)
    below_palm = obstacles[(along < 0.11) & (across < 0.035)]
    hanging = hold.position[2] - space.points(item)[:, 2].min()
    lowest = below_palm[:, 2].max() - PALM - hanging if len(below_palm) else surface
    release_height = max(surface, lowest)
    return release_height, 20.0 * (release_height - surface)


def _turn_to_fit(points: np.ndarray, half_size: np.ndarray | None) -> float:
    """The smallest turn in radians by which points (M, 3) about an item fit into a region.

    0 where the place is no region, or none fits.
    """
    if half_size is None:
        return 0.0
    for turn in sorted(np.concatenate([YAWS, -YAWS[:1]]), key=abs):
        flat = points[:, :2] @ vertical_rotation(turn)[:2, :2].T
        if ((flat.max(0) - flat.min(0)) / 2 < half_size[:2]).all():
            return float(turn)
    return 0.0
