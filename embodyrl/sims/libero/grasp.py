"""``plan_grasp``: where to grasp an object, from its collision geometry and what stands around."""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's module is native and its wheel describes it only in part to a type checker.
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np

if TYPE_CHECKING:
    from embodyrl.sims.libero.native import Simulation
    from embodyrl.sims.libero.scene import Scene

MAX_WIDTH = 0.072  # metres; what is wider does not fit between the open fingers
FINGER_DEPTH = 0.03  # how far below an object's top the fingers reach at most
YAWS = np.deg2rad(np.arange(-90, 90, 5))
_ROUND = (mujoco.mjtGeom.mjGEOM_CYLINDER, mujoco.mjtGeom.mjGEOM_CAPSULE)


@dataclass
class Grasp:
    """A grasp from above.

    Attributes:
        position: (3,) of the point between the finger tips, metres.
        yaw: of the hand about the vertical, relative to its nominal pose, radians.
        offset: (3,) gripper minus object, measured when the fingers have closed.
        cost: the lower, the better.
    """

    position: np.ndarray
    yaw: float
    offset: np.ndarray
    cost: float


class Workspace:
    """What an expert sees of a scene: poses and collision geometry.

    Body poses must be up to date in the scene's ``data``.
    """

    def __init__(self, scene: Scene | Simulation) -> None:
        self.scene = scene
        self.model = scene.model
        self.data = scene.data
        self._site = self.model.site("gripper0_grip_site").id
        self._nominal = scene.nominal_mat
        # The direction in which the fingers move, for a hand in its nominal pose.
        fingers = [
            self.data.xpos[self.model.body(f"gripper0_{side}finger").id]
            for side in ("left", "right")
        ]
        axis = (
            self._nominal
            @ self.data.site_xmat[self._site].reshape(3, 3).T
            @ (fingers[0] - fingers[1])
        )
        self._axis = axis[:2] / np.linalg.norm(axis[:2])
        # Body -> the bodies that hang on it, itself included.
        parents = self.model.body_parentid
        self._tree: dict[int, list[int]] = {}
        for body in range(self.model.nbody):
            above = body
            while above:
                self._tree.setdefault(above, []).append(body)
                above = int(parents[above])

    def eef(self) -> np.ndarray:
        """(3,) the point between the finger tips."""
        return self.data.site_xpos[self._site].copy()

    def speed(self) -> float:
        """The hand's speed in m/s."""
        return float(np.linalg.norm(self.scene.hand_velocity))

    def finger_axis(self, yaw: float) -> np.ndarray:
        """(2,) the horizontal direction in which the fingers of a hand turned by ``yaw`` move."""
        c = np.cos(yaw)
        s = np.sin(yaw)
        return np.array([[c, -s], [s, c]]) @ self._axis

    def rotation_error(self, yaw: float) -> np.ndarray:
        """(3,) rotation vector that turns the hand to point straight down, turned by ``yaw``."""
        c = np.cos(yaw)
        s = np.sin(yaw)
        wanted = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1.0]]) @ self._nominal
        quat = np.empty(4)
        out = np.empty(3)
        mujoco.mju_mat2Quat(
            quat, (wanted @ self.data.site_xmat[self._site].reshape(3, 3).T).ravel()
        )
        mujoco.mju_quat2Vel(out, quat, 1.0)
        return out

    def position(self, name: str) -> np.ndarray:
        """(3,) of an object or a region."""
        return self.scene.position(name)

    def bodies(self, name: str) -> list[int]:
        """All bodies of an object, or of what a region belongs to; none for the table's regions."""
        body = self.scene.body(name)
        return self._tree[body] if body >= 0 else []

    def points(self, name: str) -> np.ndarray:
        """(M, 3) points of an object's collision geometry."""
        return body_points(self.model, self.data, self.bodies(name))

    def obstacles(self, name: str) -> np.ndarray:
        """(M, 3) points of everything that is neither ``name`` nor the robot."""
        own = set(self.bodies(name)) | set(self._tree[self.model.body("robot0_base").id])
        return body_points(
            self.model, self.data, [b for b in range(self.model.nbody) if b not in own]
        )

    def surface(self, place: str) -> tuple[float, float]:
        """Two heights: of the surface in the middle of a place, and of the place's highest part."""
        points = self.points(place)
        middle = self.position(place)
        if not len(points):
            return float(middle[2]), float(middle[2])
        near = points[np.linalg.norm(points[:, :2] - middle[:2], axis=1) < 0.03]
        top = float(points[:, 2].max())
        return float(near[:, 2].max()) if len(near) else float(points[:, 2].min()), top


def body_points(model: Any, data: Any, bodies: list[int]) -> np.ndarray:
    """Points (M, 3) of the collision geometry of some bodies, in the world's frame."""
    collides = model.geom_contype + model.geom_conaffinity > 0
    points = [np.zeros((0, 3))]
    for geom in np.flatnonzero(np.isin(model.geom_bodyid, bodies) & collides):
        local = _geom_points(model, geom)
        points.append(local @ data.geom_xmat[geom].reshape(3, 3).T + data.geom_xpos[geom])
    return np.concatenate(points)


def _geom_points(model: Any, geom: int) -> np.ndarray:
    """Points (M, 3) of a geom in its own frame: a mesh's corners, or a grid in its bounding box."""
    kind = model.geom_type[geom]
    if kind == mujoco.mjtGeom.mjGEOM_MESH:
        mesh = model.geom_dataid[geom]
        start = model.mesh_vertadr[mesh]
        return model.mesh_vert[start : start + model.mesh_vertnum[mesh]]
    if kind == mujoco.mjtGeom.mjGEOM_PLANE:  # has no end
        return np.zeros((0, 3))
    # MuJoCo's sizes: radius; radius and half length; or three half edges.
    size = model.geom_size[geom]
    half = size
    if kind == mujoco.mjtGeom.mjGEOM_SPHERE:
        half = size[[0, 0, 0]]
    if kind in _ROUND:
        half = np.array([size[0], size[0], size[1]])
    grid = np.linspace(-1, 1, 5)
    points = np.stack(np.meshgrid(grid, grid, grid), -1).reshape(-1, 3)
    if kind in _ROUND:
        points = points[np.hypot(points[:, 0], points[:, 1]) < 1.1]
    return points * half


def plan_grasp(space: Workspace, item: str, attempt: int = 0) -> Grasp:
    """The grasp of an object with the lowest cost.

    Args:
        space: the scene.
        item: the object's name.
        attempt: how many grasps have failed; each takes a worse one.
    """
    points = space.points(item)
    obstacles = space.obstacles(item)
    top = points[:, 2].max()
    upper = points[points[:, 2] > top - 0.04]
    middle = (points[:, :2].max(0) + points[:, :2].min(0)) / 2
    height = max(top - FINGER_DEPTH, points[:, 2].min() + 0.012)
    # Every yaw gives a pinch across the object where it fits between the fingers, and otherwise two
    # grasps of its rim. Little turning and a small width cost little.
    candidates = []
    for yaw in YAWS:
        axis = space.finger_axis(yaw)
        along = upper[:, :2] @ axis
        width = along.max() - along.min()
        across = np.array([-axis[1], axis[0]])
        turn = 0.2 * abs(yaw)
        if width < MAX_WIDTH:
            centre = axis * (along.max() + along.min()) / 2 + across * (middle @ across)
            candidates.append(_candidate(centre, height, yaw, axis, obstacles, turn + 10 * width))
        else:
            # The rim: one finger inside, one outside.
            rim = points[points[:, 2] > top - 0.01]
            for side in (1.0, -1.0):
                radius = (side * ((rim[:, :2] - middle) @ axis)).max()
                centre = middle + side * axis * (radius - 0.006)
                candidates.append(_candidate(centre, top - 0.022, yaw, axis, obstacles, turn + 2.0))
    candidates.sort(key=lambda grasp: grasp.cost)
    return candidates[min(attempt * 2, len(candidates) - 1)]


def _candidate(
    centre: np.ndarray,
    height: float,
    yaw: float,
    axis: np.ndarray,
    obstacles: np.ndarray,
    cost: float,
) -> Grasp:
    """A grasp at ``centre`` (2,); obstacles where fingers or hand would be add to its cost."""
    relative = obstacles[:, :2] - centre
    along = relative @ axis
    across = relative @ np.array([-axis[1], axis[0]])
    fingers = (
        (np.abs(np.abs(along) - 0.045) < 0.02)
        & (np.abs(across) < 0.02)
        & (obstacles[:, 2] > height - 0.012)
    )
    hand = (np.abs(along) < 0.12) & (np.abs(across) < 0.05) & (obstacles[:, 2] > height + 0.085)
    cost += 1.0 * min(5, fingers.sum()) + 1.0 * min(5, hand.sum())
    return Grasp(np.array([*centre, height]), float(yaw), np.zeros(3), cost)
