"""``Workspace``: what an expert sees of a scene, namely poses, joints and collision geometry."""

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

_ROUND = (mujoco.mjtGeom.mjGEOM_CYLINDER, mujoco.mjtGeom.mjGEOM_CAPSULE)
DOWN = np.array([0.0, 0.0, -1.0])


@dataclass
class Joint:
    """A joint of a drawer, a door or a knob, as it is now.

    Attributes:
        number: in the model.
        body: that it moves.
        slides: along ``axis``, or turns about it.
        axis: (3,) in the world.
        anchor: (3,) a point of the axis.
        position: in metres or radians.
    """

    number: int
    body: int
    slides: bool
    axis: np.ndarray
    anchor: np.ndarray
    position: float

    def motion(self, delta: float) -> tuple[np.ndarray, np.ndarray]:
        """What moving by ``delta`` does to a point x: (rotation (3, 3), shift (3,)) of R x + s."""
        if self.slides:
            return np.eye(3), delta * self.axis
        rotation = axis_rotation(self.axis, delta)
        return rotation, self.anchor - rotation @ self.anchor


class Workspace:
    """See the module. Body poses must be up to date in the scene's ``data``."""

    def __init__(self, scene: Scene | Simulation) -> None:
        self.scene = scene
        self.model = scene.model
        self.data = scene.data
        self._site = self.model.site("gripper0_grip_site").id
        self.nominal = scene.nominal_mat
        # The direction in which the fingers move, for a hand in its nominal pose.
        fingers = [
            self.data.xpos[self.model.body(f"gripper0_{side}finger").id]
            for side in ("left", "right")
        ]
        axis = self.nominal @ self.hand_mat().T @ (fingers[0] - fingers[1])
        self._axis = axis[:2] / np.linalg.norm(axis[:2])
        # Body -> the bodies that hang on it, itself included.
        parents = self.model.body_parentid
        self._tree: dict[int, list[int]] = {}
        for body in range(self.model.nbody):
            above = body
            while above:
                self._tree.setdefault(above, []).append(body)
                above = int(parents[above])

    def hand(self) -> np.ndarray:
        """(3,) the point between the finger tips."""
        return self.data.site_xpos[self._site].copy()

    def hand_mat(self) -> np.ndarray:
        """(3, 3) rotation of the hand."""
        return self.data.site_xmat[self._site].reshape(3, 3).copy()

    def speed(self) -> float:
        """The hand's speed in m/s."""
        return float(np.linalg.norm(self.scene.hand_velocity))

    def finger_axis(self, yaw: float) -> np.ndarray:
        """(2,) the horizontal direction in which the fingers of a hand turned by ``yaw`` move."""
        return (vertical_rotation(yaw)[:2, :2]) @ self._axis

    def pointing(self, direction: np.ndarray, fingers: np.ndarray) -> np.ndarray:
        """(3, 3) rotation of a hand that points in a direction.

        Args:
            direction: (3,) from the wrist to the finger tips.
            fingers: (3,) in which the fingers move; of its two signs the one that turns the hand
                less is taken.
        """
        direction = direction / np.linalg.norm(direction)
        fingers = fingers - direction * (fingers @ direction)
        fingers = fingers / np.linalg.norm(fingers)
        # Columns: where a hand points, how its fingers move, and what is square to both.
        now = np.stack([DOWN, [*self._axis, 0.0], np.cross(DOWN, [*self._axis, 0.0])], 1)
        options = [
            np.stack([direction, f, np.cross(direction, f)], 1) @ now.T @ self.nominal
            for f in (fingers, -fingers)
        ]
        return max(options, key=lambda mat: float(np.trace(mat @ self.nominal.T)))

    def rotation_error(self, mat: np.ndarray) -> np.ndarray:
        """(3,) rotation vector that turns the hand to ``mat`` (3, 3)."""
        quat = np.empty(4)
        out = np.empty(3)
        mujoco.mju_mat2Quat(quat, (mat @ self.hand_mat().T).ravel())
        mujoco.mju_quat2Vel(out, quat, 1.0)
        return out

    def position(self, name: str) -> np.ndarray:
        """(3,) of an object or a region."""
        return self.scene.position(name)

    def joints(self, name: str) -> list[Joint]:
        """The joints of an articulated object, or of the part that a region belongs to."""
        addresses, _ = self.scene.articulation(name)
        return [self.joint(n) for n in np.flatnonzero(np.isin(self.model.jnt_qposadr, addresses))]

    def joint(self, number: int) -> Joint:
        """The joint of that number in the model."""
        return Joint(
            number,
            int(self.model.jnt_bodyid[number]),
            bool(self.model.jnt_type[number] == mujoco.mjtJoint.mjJNT_SLIDE),
            self.data.xaxis[number].copy(),
            self.data.xanchor[number].copy(),
            float(self.data.qpos[self.model.jnt_qposadr[number]]),
        )

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

    def half_size(self, place: str) -> np.ndarray | None:
        """(3,) half extents of a region's box along the world's axes; None for an object."""
        site = mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_SITE, place)
        if site < 0:
            return None
        return np.abs(self.data.site_xmat[site].reshape(3, 3) @ self.model.site_size[site])

    def surface(self, place: str) -> tuple[float, float]:
        """Two heights: of the surface in the middle of a place, and of the place's highest part."""
        points = self.points(place)
        middle = self.position(place)
        if not len(points):
            return float(middle[2]), float(middle[2])
        near = points[np.linalg.norm(points[:, :2] - middle[:2], axis=1) < 0.03]
        top = float(points[:, 2].max())
        return float(near[:, 2].max()) if len(near) else float(points[:, 2].min()), top


def vertical_rotation(yaw: float) -> np.ndarray:
    """(3, 3) rotation about the vertical."""
    c = np.cos(yaw)
    s = np.sin(yaw)
    return np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])


def axis_rotation(axis: np.ndarray, angle: float) -> np.ndarray:
    """(3, 3) rotation by an angle about a unit vector (3,)."""
    quat = np.empty(4)
    mat = np.empty(9)
    mujoco.mju_axisAngle2Quat(quat, axis, angle)
    mujoco.mju_quat2Mat(mat, quat)
    return mat.reshape(3, 3)


def body_points(model: Any, data: Any, bodies: list[int]) -> np.ndarray:
    """Points (M, 3) of the collision geometry of some bodies, in the world's frame."""
    points = [np.zeros((0, 3))]
    points += [geom_points(model, data, geom) for geom in body_geoms(model, bodies)]
    return np.concatenate(points)


def body_geoms(model: Any, bodies: list[int]) -> list[int]:
    """The collision geoms of some bodies."""
    collides = model.geom_contype + model.geom_conaffinity > 0
    return np.flatnonzero(np.isin(model.geom_bodyid, bodies) & collides).tolist()


def geom_points(model: Any, data: Any, geom: int) -> np.ndarray:
    """Points (M, 3) of a geom in the world's frame: a mesh's corners, or a grid in its box."""
    local = _local_points(model, geom)
    return local @ data.geom_xmat[geom].reshape(3, 3).T + data.geom_xpos[geom]


def _local_points(model: Any, geom: int) -> np.ndarray:
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
