"""Kinematics of one Franka arm: forward, Jacobian and a step of inverse, in tens of microseconds.

The simulator's ``kinematics`` does the same for N arms at once, and pays numpy's overhead for each
operation. A safety filter has one arm and little time, so the chain is written in plain floats.
FR3 and Panda share one Denavit-Hartenberg table.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import atan2, cos, pi, sin, sqrt

import numpy as np

from embodyrl.real_robot.control.messages import Array

FLANGE_TO_TCP = 0.107 + 0.1034
"""m along joint 7's axis from its frame to the point between the finger tips of the Franka hand."""
DOWN = np.diag([1.0, -1.0, -1.0])
"""Rotation of the hand that points straight down with its fingers along y."""
HOME = np.array([0.0, -0.1, 0.0, -2.35, 0.0, 2.25, np.pi / 4])
"""(7,) rad, a posture with the hand pointing down; redundant motion is drawn towards it."""
# Joints 1 to 7 in Craig's convention: a_{i-1} (m), d_i (m), alpha_{i-1} (quarter turns).
_DH = (
    (0.0, 0.333, 0), (0.0, 0.0, -1), (0.0, 0.316, 1), (0.0825, 0.0, 1),
    (-0.0825, 0.384, -1), (0.0, 0.0, 1), (0.088, 0.0, 1),
)  # fmt: skip
_HAND = sqrt(0.5)
"""Sine and cosine of 45 degrees, by which the hand is turned against the flange."""


def tip(q: Sequence[float]) -> tuple[float, float, float]:
    """x, y and z (m) of the tool centre point at the angles q (7,).

    The same as in ``forward``, without the rotation and the Jacobian, for half of its time.
    """
    # p is the origin of the current frame; (xx, xy, xz) is its x axis, and so on.
    px = py = pz = 0.0
    xx = 1.0
    xy = 0.0
    xz = 0.0
    yx = 0.0
    yy = 1.0
    yz = 0.0
    zx = 0.0
    zy = 0.0
    zz = 1.0
    for (a, d, quarter), angle in zip(_DH, q, strict=True):
        # Move by a along x, and turn about x by a multiple of 90 degrees.
        px = px + a * xx
        py = py + a * xy
        pz = pz + a * xz
        if quarter > 0:
            yx, yy, yz, zx, zy, zz = zx, zy, zz, -yx, -yy, -yz
        elif quarter < 0:
            yx, yy, yz, zx, zy, zz = -zx, -zy, -zz, yx, yy, yz
        # Move by d along z, and turn about z by the joint's angle.
        px = px + d * zx
        py = py + d * zy
        pz = pz + d * zz
        c = cos(angle)
        s = sin(angle)
        xx, xy, xz, yx, yy, yz = (
            c * xx + s * yx, c * xy + s * yy, c * xz + s * yz,
            c * yx - s * xx, c * yy - s * xy, c * yz - s * xz,
        )  # fmt: skip
    return px + FLANGE_TO_TCP * zx, py + FLANGE_TO_TCP * zy, pz + FLANGE_TO_TCP * zz


def forward(q: Array) -> tuple[Array, Array, Array]:
    """Pose and geometric Jacobian of the tool centre point.

    Args:
        q: (7,) rad.

    Returns:
        Position (3,), rotation (3, 3) and Jacobian (6, 7), linear rows first, all in the base's
        frame.
    """
    # p is the origin of the current frame; (xx, xy, xz) is its x axis, and so on.
    px = py = pz = 0.0
    xx = 1.0
    xy = 0.0
    xz = 0.0
    yx = 0.0
    yy = 1.0
    yz = 0.0
    zx = 0.0
    zy = 0.0
    zz = 1.0
    joints = []
    for (a, d, quarter), angle in zip(_DH, q.tolist(), strict=True):
        # Move by a along x, and turn about x by a multiple of 90 degrees.
        px = px + a * xx
        py = py + a * xy
        pz = pz + a * xz
        if quarter > 0:
            yx, yy, yz, zx, zy, zz = zx, zy, zz, -yx, -yy, -yz
        elif quarter < 0:
            yx, yy, yz, zx, zy, zz = -zx, -zy, -zz, yx, yy, yz
        # Move by d along z, and turn about z by the joint's angle.
        px = px + d * zx
        py = py + d * zy
        pz = pz + d * zz
        c = cos(angle)
        s = sin(angle)
        xx, xy, xz, yx, yy, yz = (
            c * xx + s * yx, c * xy + s * yy, c * xz + s * yz,
            c * yx - s * xx, c * yy - s * xy, c * yz - s * xz,
        )  # fmt: skip
        joints.append((px, py, pz, zx, zy, zz))
    px = px + FLANGE_TO_TCP * zx
    py = py + FLANGE_TO_TCP * zy
    pz = pz + FLANGE_TO_TCP * zz
    # Column i of the Jacobian: axis_i x (tip - origin_i), then axis_i itself.
    columns = []
    for ox, oy, oz, ax, ay, az in joints:
        rx = px - ox
        ry = py - oy
        rz = pz - oz
        columns.append((ay * rz - az * ry, az * rx - ax * rz, ax * ry - ay * rx, ax, ay, az))
    # The hand is turned by -45 degrees about z against the last frame.
    h = _HAND
    rotation = np.array(
        [
            [h * (xx - yx), h * (yx + xx), zx],
            [h * (xy - yy), h * (yy + xy), zy],
            [h * (xz - yz), h * (yz + xz), zz],
        ]
    )
    return np.array([px, py, pz]), rotation, np.array(columns).T


def rotation_vector(rotation: Array) -> Array:
    """(3,) axis times angle (at most pi) of a rotation matrix (3, 3)."""
    # The skew part is sin(angle) * axis, and the trace is 1 + 2 cos(angle).
    (_, a, b), (c, _, d), (e, f, _) = rotation.tolist()
    x = 0.5 * (f - d)
    y = 0.5 * (b - e)
    z = 0.5 * (c - a)
    sine = sqrt(x * x + y * y + z * z)
    p, q, r = rotation.diagonal().tolist()
    cosine = 0.5 * (p + q + r - 1.0)
    if cosine < -0.999999:  # half a turn: the skew part vanishes, and R = 2 a a' - 1
        axis = rotation[:, int(np.argmax((p, q, r)))].copy()
        axis[int(np.argmax((p, q, r)))] += 1.0
        return axis * (pi / sqrt(float(axis @ axis)))
    scale = atan2(sine, cosine) / sine if sine > 1e-9 else 1.0
    return np.array([x * scale, y * scale, z * scale])


def exp_rotation(vector: Array) -> Array:
    """(3, 3) rotation matrix of a rotation vector (3,), by Rodrigues' formula."""
    x, y, z = vector.tolist()
    square = x * x + y * y + z * z
    angle = sqrt(square)
    a = sin(angle) / angle if angle > 1e-9 else 1.0
    b = (1.0 - cos(angle)) / square if angle > 1e-9 else 0.5
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    return np.eye(3) + a * cross + b * (cross @ cross)


def ik_step(
    q: Array,
    position: Array,
    rotation: Array,
    q_min: Array,
    q_max: Array,
    max_step: float = 0.3,
    posture_gain: float = 0.1,
    damping: float = 0.02,
) -> Array:
    """One damped least-squares step towards a pose (Nakamura and Hanafusa, 1986).

    The redundant motion, in the null space of the Jacobian, goes towards the posture ``HOME``.

    Args:
        q: (7,) rad, where to start.
        position: (3,) m, goal.
        rotation: (3, 3) goal.
        q_min: (7,) rad, smallest angles.
        q_max: (7,) rad, largest angles.
        max_step: rad that the fastest joint may turn; the others turn in proportion.
        posture_gain: share of the way to ``HOME`` that the redundant motion covers.
        damping: bounds the step near singularities.

    Returns:
        The new angles (7,).
    """
    here, turned, jacobian = forward(q)
    (_, b, c), (d, _, f), (g, h, _) = (rotation @ turned.T).tolist()
    (x, y, z) = position.tolist()
    (u, v, w) = here.tolist()
    # The error of the pose. Its rotation is sin(angle) * axis: the reference is never far ahead, so
    # the sine is close to the angle.
    error = np.array([x - u, y - v, z - w, 0.5 * (h - f), 0.5 * (c - g), 0.5 * (d - b)])
    # The step is posture + J' (J J' + damping^2 I)^-1 (error - J posture).
    posture = posture_gain * (HOME - q)
    gram = jacobian @ jacobian.T
    gram.flat[::7] += damping * damping
    step = posture + jacobian.T @ np.linalg.solve(gram, error - jacobian @ posture)
    # Bound the step, and keep it inside the limits of the joints.
    largest = max(map(abs, step.tolist()))
    if largest > max_step:
        step *= max_step / largest
    return np.minimum(np.maximum(q + step, q_min), q_max)
