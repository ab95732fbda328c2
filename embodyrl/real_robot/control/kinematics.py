"""Kinematics of one Franka arm: forward, Jacobian and a step of inverse, in microseconds.

The simulator's ``kinematics`` does the same for N arms at once, and pays numpy's overhead for each
operation. A safety filter has one arm and little time, so all that it needs at each tick is written
in plain floats. FR3 and Panda share one Denavit-Hartenberg table.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import atan2, cos, pi, sin, sqrt
from operator import add, sub

import numpy as np

from embodyrl.real_robot.control.least_squares import damped_step
from embodyrl.real_robot.control.messages import Array

FLANGE_TO_TCP = 0.107 + 0.1034
"""m along joint 7's axis from its frame to the point between the finger tips of the Franka hand."""
DOWN = np.diag([1.0, -1.0, -1.0])
"""Rotation of the hand that points straight down with its fingers along y."""
HOME = np.array([0.0, -0.1, 0.0, -2.35, 0.0, 2.25, np.pi / 4])
"""(7,) rad, a posture with the hand pointing down; redundant motion is drawn towards it."""
_HOME = HOME.tolist()
_HAND = sqrt(0.5)
"""Sine and cosine of 45 degrees, by which the hand is turned against the flange."""

_HALF_TURN = 1.4e-3
"""Sine of the angle below which the axis of a half turn cannot be told from its skew part."""

Frame = tuple[float, ...]
"""A place and an orientation: origin (3), x axis (3), y axis (3), z axis (3)."""
Axis = tuple[float, float, float, float, float, float]
"""An axis of a joint: a point on it (3) and its direction (3)."""
Column = tuple[float, float, float, float, float, float]
"""How the hand moves (3) and turns (3) with one joint: a column of the Jacobian."""


def frame(q: Sequence[float]) -> Frame:
    """Joint 7's frame at the angles q (7,), with its origin at the tool centre point."""
    return chain(q)[0]


def tip(q: Sequence[float]) -> tuple[float, float, float]:
    """x, y and z (m) of the tool centre point at the angles q (7,)."""
    x, y, z, *_ = chain(q)[0]
    return x, y, z


def tilt_trace(at: Frame) -> float:
    """1 + 2 cos(angle) for the angle between the hand at ``at`` and ``DOWN``."""
    # The hand is turned by -45 degrees about z against joint 7's frame.
    return _HAND * (at[3] - at[6] - at[4] - at[7]) - at[11]


def hand_frame(position: Array, rotation: Array) -> Frame:
    """Joint 7's frame where the hand is at ``position`` (3,) and turned by ``rotation`` (3, 3)."""
    (xx, yx, zx), (xy, yy, zy), (xz, yz, zz) = rotation.tolist()
    x, y, z = position.tolist()
    h = _HAND
    return (
        x, y, z,
        h * (xx + yx), h * (xy + yy), h * (xz + yz),
        h * (yx - xx), h * (yy - xy), h * (yz - xz),
        zx, zy, zz,
    )  # fmt: skip


def turn_trace(one: Frame, other: Frame) -> float:
    """1 + 2 cos(angle) for the angle between the orientations of two frames."""
    (_, _, _, a, b, c, d, e, f, g, h, i) = one
    (_, _, _, j, k, m, n, o, p, q, r, s) = other
    return a * j + b * k + c * m + d * n + e * o + f * p + g * q + h * r + i * s


def turn_sine(one: Frame, other: Frame) -> tuple[float, float, float]:
    """Axis, times the sine of the angle, of the rotation that turns ``one`` into ``other``."""
    (_, _, _, a, b, c, d, e, f, g, h, i) = one
    (_, _, _, j, k, m, n, o, p, q, r, s) = other
    # Half of the sum of the cross products of their axes: the skew part of the rotation.
    return (
        0.5 * (b * m - c * k + e * p - f * o + h * s - i * r),
        0.5 * (c * j - a * m + f * n - d * p + i * q - g * s),
        0.5 * (a * k - b * j + d * o - e * n + g * r - h * q),
    )


def turned_at_most(start: Frame, goal: Frame, angle: float) -> Frame:
    """``goal``, but if it is turned by more than ``angle`` rad against ``start``, by that much."""
    trace = turn_trace(start, goal)
    if trace >= 1.0 + 2.0 * cos(angle):
        return goal
    x, y, z = turn_sine(start, goal)
    sine = sqrt(x * x + y * y + z * z)
    if atan2(sine, 0.5 * (trace - 1.0)) <= angle:
        return goal
    if trace < 0.0 and sine < _HALF_TURN:  # half a turn: the skew part vanishes
        x, y, z = _half_turn_axis(start, goal)
        sine = 1.0
    # Rodrigues' formula for each of the axes.
    x /= sine
    y /= sine
    z /= sine
    c = cos(angle)
    s = sin(angle)
    turned = list(goal[:3])
    for k in (3, 6, 9):
        u, v, w = start[k : k + 3]
        along = (1.0 - c) * (x * u + y * v + z * w)
        turned.append(c * u + s * (y * w - z * v) + along * x)
        turned.append(c * v + s * (z * u - x * w) + along * y)
        turned.append(c * w + s * (x * v - y * u) + along * z)
    return tuple(turned)


def _half_turn_axis(start: Frame, goal: Frame) -> tuple[float, float, float]:
    """The axis a of a half turn R = 2 a a' - 1, from the longest column of R + 1."""
    turn = np.reshape(goal[3:], (3, 3)).T @ np.reshape(start[3:], (3, 3)) + np.eye(3)
    x, y, z = turn[:, int(turn.diagonal().argmax())].tolist()
    length = sqrt(x * x + y * y + z * z)
    return x / length, y / length, z / length


def chain(q: Sequence[float]) -> tuple[Frame, tuple[Axis, ...]]:
    """Joint 7's frame with its origin at the tool centre point, and the axes of joints 1 to 7.

    The Denavit-Hartenberg chain is written out, because a safety filter asks for it three times a
    tick. Per joint: (xi, yi, zi) are the axes of its frame, and p is its origin.
    """
    q1, q2, q3, q4, q5, q6, q7 = q
    # Joints 1 and 2 share an origin on the base's z axis.
    c1 = cos(q1)
    s1 = sin(q1)
    c2 = cos(q2)
    s2 = sin(q2)
    x2x = c2 * c1
    x2y = c2 * s1
    # Joint 3.
    z3x = s2 * c1
    z3y = s2 * s1
    p3x = 0.316 * z3x
    p3y = 0.316 * z3y
    p3z = 0.333 + 0.316 * c2
    c3 = cos(q3)
    s3 = sin(q3)
    x3x = c3 * x2x - s3 * s1
    x3y = c3 * x2y + s3 * c1
    x3z = -c3 * s2
    y3x = -c3 * s1 - s3 * x2x
    y3y = c3 * c1 - s3 * x2y
    y3z = s3 * s2
    # Joint 4.
    p4x = p3x + 0.0825 * x3x
    p4y = p3y + 0.0825 * x3y
    p4z = p3z + 0.0825 * x3z
    c4 = cos(q4)
    s4 = sin(q4)
    x4x = c4 * x3x + s4 * z3x
    x4y = c4 * x3y + s4 * z3y
    x4z = c4 * x3z + s4 * c2
    y4x = c4 * z3x - s4 * x3x
    y4y = c4 * z3y - s4 * x3y
    y4z = c4 * c2 - s4 * x3z
    # Joint 5.
    p5x = p4x - 0.0825 * x4x + 0.384 * y4x
    p5y = p4y - 0.0825 * x4y + 0.384 * y4y
    p5z = p4z - 0.0825 * x4z + 0.384 * y4z
    c5 = cos(q5)
    s5 = sin(q5)
    x5x = c5 * x4x + s5 * y3x
    x5y = c5 * x4y + s5 * y3y
    x5z = c5 * x4z + s5 * y3z
    y5x = c5 * y3x - s5 * x4x
    y5y = c5 * y3y - s5 * x4y
    y5z = c5 * y3z - s5 * x4z
    # Joint 6 shares its origin with joint 5.
    c6 = cos(q6)
    s6 = sin(q6)
    x6x = c6 * x5x + s6 * y4x
    x6y = c6 * x5y + s6 * y4y
    x6z = c6 * x5z + s6 * y4z
    # Joint 7.
    z7x = s6 * x5x - c6 * y4x
    z7y = s6 * x5y - c6 * y4y
    z7z = s6 * x5z - c6 * y4z
    p7x = p5x + 0.088 * x6x
    p7y = p5y + 0.088 * x6y
    p7z = p5z + 0.088 * x6z
    c7 = cos(q7)
    s7 = sin(q7)
    last = (
        p7x + FLANGE_TO_TCP * z7x, p7y + FLANGE_TO_TCP * z7y, p7z + FLANGE_TO_TCP * z7z,
        c7 * x6x - s7 * y5x, c7 * x6y - s7 * y5y, c7 * x6z - s7 * y5z,
        -c7 * y5x - s7 * x6x, -c7 * y5y - s7 * x6y, -c7 * y5z - s7 * x6z,
        z7x, z7y, z7z,
    )  # fmt: skip
    axes = (
        (0.0, 0.0, 0.333, 0.0, 0.0, 1.0),
        (0.0, 0.0, 0.333, -s1, c1, 0.0),
        (p3x, p3y, p3z, z3x, z3y, c2),
        (p4x, p4y, p4z, -y3x, -y3y, -y3z),
        (p5x, p5y, p5z, y4x, y4y, y4z),
        (p5x, p5y, p5z, -y5x, -y5y, -y5z),
        (p7x, p7y, p7z, z7x, z7y, z7z),
    )
    return last, axes


def jacobian_columns(at: Frame, axes: tuple[Axis, ...]) -> list[Column]:
    """The geometric Jacobian of the tool centre point by columns, one per joint of ``chain``."""
    px, py, pz, *_ = at
    columns = []
    for ox, oy, oz, ax, ay, az in axes:
        # axis x (tip - origin), then the axis itself.
        rx = px - ox
        ry = py - oy
        rz = pz - oz
        columns.append((ay * rz - az * ry, az * rx - ax * rz, ax * ry - ay * rx, ax, ay, az))
    return columns


def forward(q: Array) -> tuple[Array, Array, Array]:
    """Pose and geometric Jacobian of the tool centre point.

    Args:
        q: (7,) rad.

    Returns:
        Position (3,), rotation (3, 3) and Jacobian (6, 7), linear rows first, all in the base's
        frame.
    """
    at, axes = chain(q.tolist())
    px, py, pz, xx, xy, xz, yx, yy, yz, zx, zy, zz = at
    # The hand is turned by -45 degrees about z against the last frame.
    h = _HAND
    rotation = np.array(
        [
            [h * (xx - yx), h * (yx + xx), zx],
            [h * (xy - yy), h * (yy + xy), zy],
            [h * (xz - yz), h * (yz + xz), zz],
        ]
    )
    return np.array([px, py, pz]), rotation, np.array(jacobian_columns(at, axes)).T


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
    q: list[float],
    goal: Frame,
    q_min: list[float],
    q_max: list[float],
    max_step: float = 0.3,
    posture_gain: float = 0.1,
    damping: float = 0.02,
) -> list[float]:
    """One damped least-squares step towards a pose (Nakamura and Hanafusa, 1986).

    The redundant motion, in the null space of the Jacobian, goes towards the posture ``HOME``.

    Args:
        q: (7,) rad, where to start.
        goal: of joint 7, see ``hand_frame``.
        q_min: (7,) rad, smallest angles.
        q_max: (7,) rad, largest angles.
        max_step: rad that the fastest joint may turn; the others turn in proportion.
        posture_gain: share of the way to ``HOME`` that the redundant motion covers.
        damping: bounds the step near singularities.

    Returns:
        The new angles (7,).
    """
    here, axes = chain(q)
    # The error of the pose. Its rotation is sin(angle) * axis: the reference is never far ahead, so
    # the sine is close to the angle.
    x, y, z = map(sub, goal[:3], here[:3])
    error = (x, y, z, *turn_sine(here, goal))
    posture = [posture_gain * (home - angle) for home, angle in zip(_HOME, q, strict=True)]
    step = damped_step(jacobian_columns(here, axes), posture, error, damping)
    # Bound the step, and keep it inside the limits of the joints.
    largest = max(map(abs, step))
    if largest > max_step:
        step = [by * (max_step / largest) for by in step]
    return clamp(list(map(add, q, step)), q_min, q_max)


def clamp(x: Sequence[float], low: Sequence[float], high: Sequence[float]) -> list[float]:
    """Each number, at least ``low`` and at most ``high``; ``min`` and ``max`` would take longer."""
    return [
        least if value < least else most if value > most else value
        for value, least, most in zip(x, low, high, strict=True)
    ]
