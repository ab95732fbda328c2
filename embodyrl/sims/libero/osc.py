"""robosuite's OSC_POSE controller and MuJoCo's physics steps, as one compiled function.

Operational space control after Khatib (1987), "A unified approach for motion and force control of
robot manipulators". The order of the operations, the memory layouts and the single precision of the
rotation goal are those of robosuite 1.4. Contacts turn a difference in the last bit of a torque
into another episode, so a test holds the two equal. The function runs without Python's lock.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding
import mujoco
import numpy as np
from numba import njit, types

# MuJoCo's functions are called by name and not by address, so that the compiled function can be
# kept on disk.
llvmlite.binding.load_library_permanently(
    str(next(Path(mujoco.__file__).parent.glob("*mujoco.so*")))
)
_mj_step1 = types.ExternalFunction("mj_step1", types.void(types.intp, types.intp))
_mj_step2 = types.ExternalFunction("mj_step2", types.void(types.intp, types.intp))
_doubles = types.CPointer(types.double)
_mj_jac_site = types.ExternalFunction(
    "mj_jacSite", types.void(types.intp, types.intp, _doubles, _doubles, types.intc)
)

POSITION_SCALE = 0.05  # metres that an action of 1 asks for
ROTATION_SCALE = 0.5  # radians that an action of 1 asks for
STIFFNESS = 150.0
NULL_STIFFNESS = 10.0
GRIPPER_SPEED = 0.01


class ControlledRobot(NamedTuple):
    """Where the arm is in a model: indices int64, limits float64."""

    joints: np.ndarray  # (7,) in qpos
    dofs: np.ndarray  # (7,) in qvel
    mass: np.ndarray  # (7, 7) in MuJoCo's sparse inertia matrix
    actuators: np.ndarray  # (7,)
    gripper_actuators: np.ndarray  # (2,)
    fingers: np.ndarray  # (2,) in qpos
    site: int
    hand: int
    torque_low: np.ndarray  # (7,) N m
    torque_high: np.ndarray
    gripper_bias: np.ndarray  # (2,) of the affine map from [-1, 1] to the actuators' range
    gripper_weight: np.ndarray
    rest: np.ndarray  # (7,) joint angles that the null space is drawn to


class Buffers(NamedTuple):
    """MuJoCo's own memory of one ``MjData``."""

    qpos: np.ndarray
    qvel: np.ndarray
    ctrl: np.ndarray
    bias: np.ndarray
    inertia: np.ndarray
    site_pos: np.ndarray
    site_mat: np.ndarray
    body_quat: np.ndarray


class Memory(NamedTuple):
    """What the controller keeps from one step to the next, and what a step leaves to observe."""

    goal_pos: np.ndarray  # (3,)
    goal_mat: np.ndarray  # (3, 3)
    gripper: np.ndarray  # (2,)
    seen_qpos: np.ndarray  # (nq,) when the cameras look
    seen_hand: np.ndarray  # (9,) position, quaternion, fingers when the other sensors look
    velocity: np.ndarray  # (3,) of the hand


class Sensed(NamedTuple):
    """What the controller knows of the arm: pose and velocity of the hand, and the dynamics."""

    pos: np.ndarray  # (3,)
    mat: np.ndarray  # (3, 3)
    pos_vel: np.ndarray  # (3,)
    ori_vel: np.ndarray  # (3,)
    q: np.ndarray  # (7,)
    dq: np.ndarray  # (7,)
    jac: np.ndarray  # (6, 7), Fortran's order
    mass: np.ndarray  # (7, 7), Fortran's order


@njit(cache=True)
def _rotation(vector: Any) -> Any:
    """The matrix (3, 3) of a rotation vector, through a quaternion in single precision."""
    angle = math.sqrt(np.dot(vector, vector))
    quat = np.empty(4)
    quat[0] = np.cos(angle / 2.0)
    quat[1:] = vector / angle * np.sin(angle / 2.0)
    q = quat.astype(np.float32)
    q *= math.sqrt(2.0 / np.dot(q, q))
    s = np.outer(q, q)
    return np.array(
        [
            [1.0 - s[2, 2] - s[3, 3], s[1, 2] - s[3, 0], s[1, 3] + s[2, 0]],
            [s[1, 2] + s[3, 0], 1.0 - s[1, 1] - s[3, 3], s[2, 3] - s[1, 0]],
            [s[1, 3] - s[2, 0], s[2, 3] + s[1, 0], 1.0 - s[1, 1] - s[2, 2]],
        ]
    )


@njit(cache=True)
def _torques(now: Any, goal_pos: Any, goal_mat: Any, bias: Any, rest: Any) -> Any:
    """Joint torques (7,) that move the hand to the goal, and the elbow towards ``rest``."""
    # A critically damped spring from the hand to the goal: a force and a torque.
    damping = 2.0 * np.sqrt(STIFFNESS)
    force = (goal_pos - now.pos) * STIFFNESS + (-now.pos_vel) * damping
    error = np.zeros(3)
    for axis in range(3):
        a = now.mat[:, axis]
        b = goal_mat[:, axis]
        error[0] += a[1] * b[2] - a[2] * b[1]
        error[1] += a[2] * b[0] - a[0] * b[2]
        error[2] += a[0] * b[1] - a[1] * b[0]
    torque = (0.5 * error) * STIFFNESS + (-now.ori_vel) * damping
    # The inertia that is felt at the hand, (J M^-1 J^T)^-1: for both together, and for translation
    # and rotation by themselves, which decouples them.
    jac = now.jac
    jac_pos = jac.T[:, :3].copy().T
    jac_ori = jac.T[:, 3:].copy().T
    inverse = np.linalg.inv(now.mass)
    full = np.linalg.pinv(np.dot(np.dot(jac, inverse), jac.transpose()))
    pos = np.linalg.pinv(np.dot(np.dot(jac_pos, inverse), jac_pos.transpose()))
    ori = np.linalg.pinv(np.dot(np.dot(jac_ori, inverse), jac_ori.transpose()))
    # Torques of the spring, gravity, and a pull to the rest pose in the null space of the hand.
    null = np.eye(7) - np.dot(np.dot(inverse, jac.transpose()).dot(full), jac)
    wrench = np.concatenate((np.dot(pos, force), np.dot(ori, torque)))
    out = np.dot(jac.T, wrench) + bias
    pull = np.dot(
        now.mass, NULL_STIFFNESS * (rest - now.q) - np.sqrt(NULL_STIFFNESS) * 2.0 * now.dq
    )
    return out + np.dot(null.transpose(), pull)


@njit(cache=True)
def _sense(model: int, data: int, robot: Any, buffers: Any, jac: Any) -> Any:
    """Reads a ``Sensed`` from MuJoCo's memory; ``jac`` (6, nv) is overwritten."""
    nv = buffers.qvel.shape[0]
    _mj_jac_site(model, data, jac[:3].ctypes, jac[3:].ctypes, robot.site)
    arm = np.empty((7, 6))
    mass = np.empty((7, 7))
    q = np.empty(7)
    dq = np.empty(7)
    for i in range(7):
        for j in range(6):
            arm[i, j] = jac[j, robot.dofs[i]]
        for j in range(7):
            mass[i, j] = buffers.inertia[robot.mass[i, j]]
        q[i] = buffers.qpos[robot.joints[i]]
        dq[i] = buffers.qvel[robot.dofs[i]]
    return Sensed(
        buffers.site_pos[robot.site].copy(),
        buffers.site_mat[robot.site].copy().reshape(3, 3),
        np.dot(jac[:3], buffers.qvel[:nv]),
        np.dot(jac[3:], buffers.qvel[:nv]),
        q,
        dq,
        arm.T,
        mass.T,
    )


@njit(nogil=True, cache=True)
def control_step(
    model: int,
    data: int,
    substeps: int,
    action: Any,
    robot: Any,
    buffers: Any,
    memory: Any,
    first: bool,
    nominal: Any,
) -> None:
    """One control step: ``substeps`` physics steps under the controller.

    Args:
        model: address of the ``mjModel``.
        data: address of the ``mjData``, whose memory ``buffers`` is.
        substeps: physics steps.
        action: (7,) float64 in [-1, 1].
        robot: a ``ControlledRobot``.
        buffers: a ``Buffers``.
        memory: a ``Memory``, updated.
        first: whether this is an episode's first control step. robosuite's controller then still
            uses what it sensed before the initial state was set, which is ``nominal``.
        nominal: a ``Sensed``.
    """
    jac = np.zeros((6, buffers.qvel.shape[0]))
    bias = np.empty(7)
    sign = np.sign(action[6])
    for substep in range(substeps):
        # MuJoCo's first half: positions and velocities are up to date, forces are still to come.
        _mj_step1(model, data)
        now = nominal
        if not (first and substep == 0):
            now = _sense(model, data, robot, buffers, jac)
        # The action sets the goal, relative to the hand. Without a rotation the earlier one stays.
        if substep == 0:
            turn = action[3:6] * ROTATION_SCALE
            if turn[0] != 0.0 or turn[1] != 0.0 or turn[2] != 0.0:
                memory.goal_mat[:] = np.dot(_rotation(turn), now.mat)
            memory.goal_pos[:] = now.pos + action[:3] * POSITION_SCALE
        # Torques of the arm, within the limits.
        for i in range(7):
            bias[i] = buffers.bias[robot.dofs[i]]
        torques = _torques(now, memory.goal_pos, memory.goal_mat, bias, robot.rest)
        for i in range(7):
            buffers.ctrl[robot.actuators[i]] = min(
                max(torques[i], robot.torque_low[i]), robot.torque_high[i]
            )
        # The fingers open or close at a fixed speed.
        for i in range(2):
            change = (2 * i - 1) * GRIPPER_SPEED * sign
            memory.gripper[i] = min(max(memory.gripper[i] + change, -1.0), 1.0)
            command = robot.gripper_bias[i] + robot.gripper_weight[i] * memory.gripper[i]
            buffers.ctrl[robot.gripper_actuators[i]] = command
        # robosuite's sensors and cameras look once a control step, at the last physics step but
        # one. They see body poses from before it ...
        seen = substep == substeps - 2
        if seen:
            memory.seen_qpos[:] = buffers.qpos
        _mj_step2(model, data)
        # ... and joints from after it.
        if seen:
            memory.seen_hand[:3] = buffers.site_pos[robot.site]
            memory.seen_hand[3:7] = buffers.body_quat[robot.hand]
            for i in range(2):
                memory.seen_hand[7 + i] = buffers.qpos[robot.fingers[i]]
        memory.velocity[:] = now.pos_vel
