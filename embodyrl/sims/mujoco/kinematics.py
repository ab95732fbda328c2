"""Forward kinematics, Jacobian and inverse kinematics of N Panda arms at once, in numpy.

The arm is described by the manufacturer's modified Denavit-Hartenberg table (Craig's convention).
All functions take float64 arrays with a leading N. Each row is computed by itself, so its result
does not depend on the other rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# a_{i-1} (m), d_i (m), alpha_{i-1} in quarter turns, for joints 1 to 7.
_DH = (
    (0.0, 0.333, 0),
    (0.0, 0.0, -1),
    (0.0, 0.316, 1),
    (0.0825, 0.0, 1),
    (-0.0825, 0.384, -1),
    (0.0, 0.0, 1),
    (0.088, 0.0, 1),
)
FLANGE_TO_TCP = 0.107 + 0.1034
"""Distance (m) along joint 7's axis from its frame to the point between the finger tips."""
_HAND_YAW = -np.pi / 4

JOINT_LOWER = np.array([-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973])
JOINT_UPPER = np.array([2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973])
HOME = np.array([0.0, -0.1, 0.0, -2.35, 0.0, 2.25, np.pi / 4])
"""A posture with the hand pointing down, away from every limit; the elbow is drawn towards it."""
DOWN = np.diag([1.0, -1.0, -1.0])
"""Rotation of a hand that points straight down; its fingers close along the world's y axis."""


def forward(q: Array) -> tuple[Array, Array, Array]:
    """Pose of the tool centre point and its geometric Jacobian.

    Args:
        q: (N, 7) joint angles in rad.

    Returns:
        Position (N, 3) in m, rotation (N, 3, 3), Jacobian (N, 6, 7) (linear rows first, both in the
        base's frame).
    """
    # The frame (x, y, z axes and position) goes along the arm, joint by joint.
    num = len(q)
    cos = np.cos(q)
    sin = np.sin(q)
    x, y, z = (np.broadcast_to(axis, (num, 3)) for axis in np.eye(3))
    position = np.zeros((num, 3))
    origins = np.empty((num, 7, 3))
    axes = np.empty((num, 7, 3))
    for i, (a, d, quarter) in enumerate(_DH):
        if a:
            position = position + a * x
        if quarter == 1:
            y, z = z, -y
        elif quarter == -1:
            y, z = -z, y
        if d:
            position = position + d * z
        c = cos[:, i, None]
        s = sin[:, i, None]
        x, y = c * x + s * y, c * y - s * x
        origins[:, i] = position
        axes[:, i] = z
    # From the last joint to the point between the finger tips.
    position = position + FLANGE_TO_TCP * z
    c = np.cos(_HAND_YAW)
    s = np.sin(_HAND_YAW)
    x, y = c * x + s * y, c * y - s * x
    # A joint turns the hand about its axis, and moves it by axis x (position - origin).
    jacobian = np.empty((num, 6, 7))
    arm = position[:, None] - origins
    # The cross product by hand: np.cross costs several times as much on arrays this small.
    jacobian[:, 0] = axes[..., 1] * arm[..., 2] - axes[..., 2] * arm[..., 1]
    jacobian[:, 1] = axes[..., 2] * arm[..., 0] - axes[..., 0] * arm[..., 2]
    jacobian[:, 2] = axes[..., 0] * arm[..., 1] - axes[..., 1] * arm[..., 0]
    jacobian[:, 3:] = axes.transpose(0, 2, 1)
    return position, np.stack([x, y, z], axis=-1), jacobian


def rotation_error(goal: Array, rotation: Array) -> Array:
    """Rotation vector (N, 3) in the base's frame that turns ``rotation`` to ``goal``.

    Args:
        goal: (N, 3, 3).
        rotation: (N, 3, 3).
    """
    error = goal @ rotation.transpose(0, 2, 1)
    skew = np.stack(
        [
            error[:, 2, 1] - error[:, 1, 2],
            error[:, 0, 2] - error[:, 2, 0],
            error[:, 1, 0] - error[:, 0, 1],
        ],
        axis=-1,
    )
    # ``skew`` is 2 sin(angle) * axis. Beyond a right angle the sine falls again, so it is scaled to
    # the angle itself.
    sine = 0.5 * np.sqrt((skew**2).sum(-1))
    angle = np.arctan2(sine, 0.5 * (np.trace(error, axis1=1, axis2=2) - 1.0))
    return skew * (0.5 * np.where(sine > 1e-6, angle / np.maximum(sine, 1e-6), 1.0))[:, None]


def exp_rotation(vector: Array) -> Array:
    """Rotation matrices (N, 3, 3) of the rotation vectors (N, 3), by Rodrigues' formula."""
    angle = np.sqrt((vector**2).sum(-1))[:, None, None]
    x, y, z = vector.T
    zero = np.zeros_like(x)
    cross = np.stack([zero, -z, y, z, zero, -x, -y, x, zero], axis=-1).reshape(-1, 3, 3)
    a = np.where(angle > 1e-8, np.sin(angle) / np.maximum(angle, 1e-8), 1.0)
    b = np.where(angle > 1e-8, (1.0 - np.cos(angle)) / np.maximum(angle, 1e-8) ** 2, 0.5)
    return np.eye(3) + a * cross + b * (cross @ cross)


def ik_step(
    q: Array, goal_pos: Array, goal_rot: Array, damping: float = 0.02, max_step: float = 0.3
) -> Array:
    """One damped least squares step towards a pose (Nakamura and Hanafusa, 1986).

    In the null space, where the hand does not move, the arm goes towards ``HOME``.

    Args:
        q: (N, 7) current joint angles.
        goal_pos: (N, 3) m.
        goal_rot: (N, 3, 3).
        damping: of the least squares; bounds joint speed near singularities.
        max_step: largest change of a joint in rad; a larger step is scaled as a whole.

    Returns:
        (N, 7) joint angles within the limits.
    """
    position, rotation, jacobian = forward(q)
    return ik_step_from(q, position, rotation, jacobian, goal_pos, goal_rot, damping, max_step)


def ik_step_from(
    q: Array,
    position: Array,
    rotation: Array,
    jacobian: Array,
    goal_pos: Array,
    goal_rot: Array,
    damping: float = 0.02,
    max_step: float = 0.3,
) -> Array:
    """``ik_step`` for callers that have computed ``forward(q)`` already."""
    posture = 0.1 * (HOME - q)
    error = np.concatenate([goal_pos - position, rotation_error(goal_rot, rotation)], axis=-1)
    # dq = posture + J^T (J J^T + damping^2)^-1 (error - J posture): the posture term moves the arm
    # in the null space only.
    residual = error - (jacobian @ posture[..., None])[..., 0]
    gram = jacobian @ jacobian.transpose(0, 2, 1) + damping**2 * np.eye(6)
    step = (
        posture + (jacobian.transpose(0, 2, 1) @ np.linalg.solve(gram, residual[..., None]))[..., 0]
    )
    step *= np.minimum(1.0, max_step / np.maximum(np.abs(step).max(axis=-1, keepdims=True), 1e-9))
    return np.clip(q + step, JOINT_LOWER, JOINT_UPPER)


def solve(
    goal_pos: Array, goal_rot: Array, start: Array | None = None, iterations: int = 30
) -> Array:
    """Joint angles (N, 7) that reach the poses, by ``ik_step`` from ``start`` (None: ``HOME``)."""
    q = np.broadcast_to(HOME, (len(goal_pos), 7)) if start is None else start
    for _ in range(iterations):
        q = ik_step(q, goal_pos, goal_rot)
    return np.array(q)
