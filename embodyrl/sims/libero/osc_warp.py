"""The controller of ``osc`` as one Warp kernel, with one thread for each of thousands of worlds.

The formulas are those of ``osc``, and so of robosuite. ``osc`` repeats robosuite's library calls to
the last bit, which a GPU cannot do. Here the inverses come from Cholesky factors, in double
precision, because the arm's inertias differ by a factor of a thousand.
"""

# Warp compiles these functions: inside them types are Warp's, and ``array[i]`` means its element.
# pyright: reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import warp as wp

from embodyrl.sims.libero.osc import (
    GRIPPER_SPEED,
    NULL_STIFFNESS,
    POSITION_SCALE,
    ROTATION_SCALE,
    STIFFNESS,
)

# With unrolled loops the kernel takes minutes to compile.
wp.set_module_options({"enable_backward": False, "max_unroll": 1})

_STIFFNESS = wp.constant(wp.float64(STIFFNESS))
_NULL_STIFFNESS = wp.constant(wp.float64(NULL_STIFFNESS))
_POSITION_SCALE = wp.constant(POSITION_SCALE)
_ROTATION_SCALE = wp.constant(ROTATION_SCALE)
_GRIPPER_SPEED = wp.constant(GRIPPER_SPEED)


# A 6 x 6 matrix is kept in a 7 x 7 one, with the last row and column of the identity.
_Square = wp.types.matrix(shape=(7, 7), dtype=wp.float64)
# The arm's Jacobian: rows of translation, then of rotation.
_Wide = wp.types.matrix(shape=(6, 7), dtype=wp.float64)
# One number for each joint.
_Seven = wp.types.vector(length=7, dtype=wp.float64)


@wp.struct
class Arm:
    """``osc.ControlledRobot`` on the device."""

    joints: wp.array[int]  # (7,) numbers of the arm's joints
    qpos: wp.array[int]  # (7,) where they are in qpos
    dofs: wp.array[int]  # (7,) and in qvel
    mass: wp.array2d[int]  # (7, 7) in MuJoCo's sparse inertia matrix
    actuators: wp.array[int]  # (7,)
    gripper_actuators: wp.array[int]  # (2,)
    fingers: wp.array[int]  # (2,) in qpos
    site: int
    hand: int
    torque_low: wp.array[float]  # (7,) N m
    torque_high: wp.array[float]
    gripper_bias: wp.array[float]  # (2,)
    gripper_weight: wp.array[float]
    rest: wp.array[float]  # (7,)


@wp.func
def _factor(a: _Square):
    """The lower Cholesky factor of a."""
    low = _Square()
    for i in range(7):
        for j in range(i + 1):
            total = a[i, j]
            for k in range(j):
                total -= low[i, k] * low[j, k]
            if i == j:
                low[i, j] = wp.sqrt(total)
            else:
                low[i, j] = total / low[j, j]
    return low


@wp.func
def _solve(low: _Square, b: _Seven):
    """Solves (low low^T) x = b for x."""
    # Forwards for low y = b, then backwards for low^T x = y.
    x = b
    for i in range(7):
        for k in range(i):
            x[i] -= low[i, k] * x[k]
        x[i] /= low[i, i]
    for back in range(7):
        i = 6 - back
        for k in range(i + 1, 7):
            x[i] -= low[k, i] * x[k]
        x[i] /= low[i, i]
    return x


@wp.kernel
def control(
    arm: Arm,
    aim: bool,  # whether the action sets the goal: in the first physics step of a control step
    action: wp.array2d[float],  # (N, 7)
    qpos: wp.array2d[float],
    qvel: wp.array2d[float],
    bias: wp.array2d[float],
    inertia: wp.array2d[float],
    site_pos: wp.array2d[wp.vec3],
    site_mat: wp.array2d[wp.mat33],
    anchor: wp.array2d[wp.vec3],
    axis: wp.array2d[wp.vec3],
    goal_pos: wp.array[wp.vec3],
    goal_mat: wp.array[wp.mat33],
    gripper: wp.array2d[float],  # (N, 2)
    velocity: wp.array[wp.vec3],  # of the hand, m/s
    ctrl: wp.array2d[float],
):
    """Torques towards the goal and the gripper's command, for one physics step of every world."""
    w = wp.tid()
    # The hand's pose and velocity, the Jacobian and the arm's inertia; see ``osc._sense``.
    pos = site_pos[w, arm.site]
    mat = site_mat[w, arm.site]
    jac = _Wide()
    mass = _Square()
    linear = wp.vec3()
    angular = wp.vec3()
    for j in range(7):
        turn = axis[w, arm.joints[j]]
        move = wp.cross(turn, pos - anchor[w, arm.joints[j]])
        speed = qvel[w, arm.dofs[j]]
        linear += move * speed
        angular += turn * speed
        for i in range(3):
            jac[i, j] = wp.float64(move[i])
            jac[3 + i, j] = wp.float64(turn[i])
        for i in range(7):
            mass[i, j] = wp.float64(inertia[w, arm.mass[i, j]])
    velocity[w] = linear

    # The action sets the goal, relative to the hand. Without a rotation the earlier one stays.
    if aim:
        rotation = wp.vec3(action[w, 3], action[w, 4], action[w, 5]) * _ROTATION_SCALE
        angle = wp.length(rotation)
        if angle > 0.0:
            goal_mat[w] = wp.quat_to_matrix(wp.quat_from_axis_angle(rotation / angle, angle)) * mat
        goal_pos[w] = pos + wp.vec3(action[w, 0], action[w, 1], action[w, 2]) * _POSITION_SCALE

    # A critically damped spring from the hand to the goal: a force and a torque.
    goal = goal_mat[w]
    error = wp.vec3()
    for k in range(3):
        error += wp.cross(
            wp.vec3(mat[0, k], mat[1, k], mat[2, k]), wp.vec3(goal[0, k], goal[1, k], goal[2, k])
        )
    damping = wp.float64(2.0) * wp.sqrt(_STIFFNESS)
    force = wp.vec3d(goal_pos[w] - pos) * _STIFFNESS - wp.vec3d(linear) * damping
    torque = wp.vec3d(error) * (wp.float64(0.5) * _STIFFNESS) - wp.vec3d(angular) * damping

    # The inertia that is felt at the hand, A = (J M^-1 J^T)^-1. Translation and rotation are
    # decoupled: each uses its own block only.
    factor = _factor(mass)
    inverse = _Square()
    inverse[6, 6] = wp.float64(1.0)
    for i in range(6):
        row = _solve(factor, jac[i])
        for j in range(6):
            inverse[j, i] = wp.dot(jac[j], row)
    pos_inverse = wp.mat33d()
    ori_inverse = wp.mat33d()
    for i in range(3):
        for j in range(3):
            pos_inverse[i, j] = inverse[i, j]
            ori_inverse[i, j] = inverse[3 + i, 3 + j]
    force = wp.inverse(pos_inverse) * force
    torque = wp.inverse(ori_inverse) * torque

    # A pull to the rest pose, without the part that would move the hand:
    # (I - J^T A J M^-1) M (...).
    posture = _Seven()
    null_damping = wp.float64(2.0) * wp.sqrt(_NULL_STIFFNESS)
    for j in range(7):
        away = wp.float64(arm.rest[j] - qpos[w, arm.qpos[j]])
        posture[j] = _NULL_STIFFNESS * away - null_damping * wp.float64(qvel[w, arm.dofs[j]])
    pull = mass * posture
    felt = _Seven()
    for i in range(6):
        felt[i] = wp.dot(jac[i], posture)
    felt = _solve(_factor(inverse), felt)

    # Torques of gravity, pull and spring, within the limits.
    for j in range(7):
        total = wp.float64(bias[w, arm.dofs[j]]) + pull[j]
        for i in range(3):
            total += jac[i, j] * force[i] + jac[3 + i, j] * torque[i]
        for i in range(6):
            total -= jac[i, j] * felt[i]
        ctrl[w, arm.actuators[j]] = wp.clamp(float(total), arm.torque_low[j], arm.torque_high[j])
    # The fingers open or close at a fixed speed.
    for i in range(2):
        change = (
            float(2 * i - 1)
            * _GRIPPER_SPEED
            * wp.where(action[w, 6] == 0.0, 0.0, wp.sign(action[w, 6]))
        )
        gripper[w, i] = wp.clamp(gripper[w, i] + change, -1.0, 1.0)
        ctrl[w, arm.gripper_actuators[i]] = (
            arm.gripper_bias[i] + arm.gripper_weight[i] * gripper[w, i]
        )


@wp.kernel
def look(
    arm: Arm,
    qpos: wp.array2d[float],
    site_pos: wp.array2d[wp.vec3],
    body_quat: wp.array2d[wp.quat],
    seen_hand: wp.array2d[float],  # (N, 9)
):
    """What robosuite's sensors see of the hand: position, quaternion (w, x, y, z), fingers."""
    w = wp.tid()
    for i in range(3):
        seen_hand[w, i] = site_pos[w, arm.site][i]
    for i in range(4):
        seen_hand[w, 3 + i] = body_quat[w, arm.hand][i]
    for i in range(2):
        seen_hand[w, 7 + i] = qpos[w, arm.fingers[i]]


def arm_of(robot: dict[str, Any], model: Any) -> Arm:
    """The blueprint's robot, as the kernels take it."""
    joint_of = {int(address): joint for joint, address in enumerate(model.jnt_qposadr)}
    arm: Any = Arm()
    arm.joints = wp.array([joint_of[address] for address in robot["joints"]], dtype=int)
    arm.qpos = wp.array(robot["joints"], dtype=int)
    arm.site = robot["site"]
    arm.hand = robot["hand"]
    for name in ("dofs", "mass", "actuators", "gripper_actuators", "fingers"):
        setattr(arm, name, wp.array(robot[name], dtype=int))
    for name in ("torque_low", "torque_high", "gripper_bias", "gripper_weight", "rest"):
        setattr(arm, name, wp.array(robot[name], dtype=float))
    return arm
