"""Faster versions of the slowest pieces of ManiSkill's control step on the CPU.

ManiSkill computes on tensors with one row; here are plain numbers. The controller does the same
float32 operations in the same order, so results are equal to the last bit. ``controller_for`` tries
that on the env that it is given. Where anything differs (another controller, another version of
ManiSkill), ManiSkill's own code stays in place. ``far_from_success`` saves most calls of
``evaluate``, and ``shortcut_grasp_check`` most of what the remaining ones cost.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

Quaternion = tuple[Any, Any, Any, Any]  # four np.float32, real part first


class EEDeltaPosController:
    """``pd_ee_delta_pos``: the arm's tool moves by an offset, and the gripper's joints mimic one.

    Args:
        base: a ManiSkill env with one robot under that controller.
    """

    def __init__(self, base: Any) -> None:
        arm, gripper = base.agent.controller.controllers.values()
        kinematics = arm.kinematics
        self._robot = arm.articulation._objs[0]
        self._root = arm.root_link._objs[0]
        self._tool = kinematics.end_link._objs[0]
        self._ik = functools.partial(
            kinematics.pmodel.compute_inverse_kinematics,
            kinematics.end_link_idx,
            active_qmask=kinematics.qmask.numpy(),
            max_iterations=100,
        )
        self._model_joints = kinematics.pmodel_active_joint_indices.numpy()
        self._solved_joints = kinematics.pmodel_controlled_joint_indices.numpy()
        self._arm_index = arm.active_joint_indices.numpy()
        self._joints = [joint._objs[0] for joint in (*arm.joints, *gripper.joints)]
        self._middle, self._half = _scale(arm, gripper)
        self._gain, self._offset = _mimic(gripper)
        self._pose = type(self._tool.entity_pose)

    def set_action(self, action: np.ndarray) -> None:
        """Sets the joints' targets.

        Args:
            action: (4,) float32 in [-1, 1]: the tool's offset in the base's frame, and the gripper.
        """
        # The tool's new pose in the base's frame.
        scaled = self._middle + self._half * np.clip(action, -1.0, 1.0)
        root = self._root.entity_pose
        tool = self._tool.entity_pose
        to_base = _conjugate(*root.q)
        position = scaled[:3] + (_rotate(to_base, -root.p) + _rotate(to_base, tool.p))
        rotation = _positive(_product(to_base, tuple(tool.q)))
        # The joint angles that reach it; where there are none, the arm stays where it is.
        qpos = self._robot.qpos
        solution, found, _ = self._ik(
            self._pose(position, rotation), initial_qpos=qpos[self._model_joints]
        )
        arm = solution[self._solved_joints].astype(np.float32) if found else qpos[self._arm_index]
        targets = np.concatenate([arm, scaled[3] * self._gain + self._offset])
        for joint, target in zip(self._joints, targets[:, None], strict=True):
            joint.drive_target = target

    def targets(self) -> np.ndarray:
        """The joints' targets as they are set now."""
        return np.concatenate([joint.drive_target for joint in self._joints])


def controller_for(base: Any, trials: int = 4) -> EEDeltaPosController | None:
    """The fast controller for this env, or None where ManiSkill's own must stay.

    Args:
        base: a ManiSkill env that has just been reset. Only the joints' targets are changed, and
            every action sets those anew.
        trials: random actions for which both controllers must set equal targets.
    """
    if not _is_ee_delta_pos(base):
        return None
    fast = EEDeltaPosController(base)
    for action in np.random.default_rng(0).uniform(-1.2, 1.2, (trials, 4)).astype(np.float32):
        base.agent.set_action(torch.from_numpy(action)[None])
        expected = fast.targets()
        fast.set_action(action)
        if not np.array_equal(expected, fast.targets()):
            return None
    return fast


MARGIN = 1e-3
"""Metres by which ``far_from_success`` must see a condition missed, more than rounding can make."""


def far_from_success(base: Any, task: str) -> bool:
    """Whether the task's ``evaluate`` need not run, because success is impossible.

    That is so when one of the conditions that it asks for is missed by more than ``MARGIN``.

    Args:
        base: ManiSkill's env.
        task: its registered id; always False for one that is not listed here.
    """
    if task == "PickCube-v1":
        return bool(np.linalg.norm(_between(base.goal_site, base.cube)) > base.goal_thresh + MARGIN)
    if task in ("PushCube-v1", "PullCube-v1"):
        return bool(
            np.linalg.norm(_between(base.goal_region, base.obj)[:2]) > base.goal_radius + MARGIN
        )
    if task == "StackCube-v1":
        return (
            abs(_between(base.cubeA, base.cubeB)[2] - 2 * float(base.cube_half_size[2]))
            > 0.005 + MARGIN
        )
    if task == "PlaceSphere-v1":
        return bool(np.linalg.norm(_between(base.obj, base.bin)[:2]) > 0.005 + MARGIN)
    return False


def _between(a: Any, b: Any) -> np.ndarray:
    """(3,) from b to a, in metres."""
    return a._objs[0].pose.p - b._objs[0].pose.p


def shortcut_grasp_check(base: Any) -> None:
    """Makes ``is_grasping`` answer False at once while a finger does not touch the object.

    ManiSkill asks that both fingers press with at least ``min_force``. It works out the angles of
    the forces even where there is no force, and that is most of what ``evaluate`` costs.
    """
    from mani_skill.agents.robots import Panda
    from mani_skill.utils.sapien_utils import get_pairwise_contact_impulse

    agent: Any = base.agent
    if not isinstance(agent, Panda) or type(agent).is_grasping is not Panda.is_grasping:
        return
    slow = agent.is_grasping
    links: list[Any] = [agent.finger1_link, agent.finger2_link]
    fingers = [link._bodies[0].entity for link in links]

    def is_grasping(object: Any, min_force: float = 0.5, max_angle: int = 85) -> Tensor:
        if min_force > 0:
            contacts = base.scene.px.get_contacts()
            target = object._bodies[0].entity
            if not all(
                np.any(get_pairwise_contact_impulse(contacts, finger, target)) for finger in fingers
            ):
                return torch.zeros(1, dtype=torch.bool)
        return slow(object, min_force, max_angle)

    agent.is_grasping = is_grasping


def _is_ee_delta_pos(base: Any) -> bool:
    """Whether the env has the controllers and settings that ``EEDeltaPosController`` repeats."""
    from mani_skill.agents.controllers.pd_ee_pose import PDEEPosController
    from mani_skill.agents.controllers.pd_joint_pos import PDJointPosMimicController

    parts = getattr(getattr(base.agent, "controller", None), "controllers", None)
    if not isinstance(parts, dict) or [type(p) for p in parts.values()] != [
        PDEEPosController,
        PDJointPosMimicController,
    ]:
        return False
    arm, gripper = (part.config for part in parts.values())
    return bool(
        arm.use_delta
        and not (arm.use_target or arm.interpolate or gripper.use_delta or gripper.interpolate)
        and arm.frame == "root_translation"
        and arm.normalize_action
        and gripper.normalize_action
        and base.agent.single_action_space.shape == (4,)
    )


def _scale(*controllers: Any) -> tuple[np.ndarray, np.ndarray]:
    """Middle and half width of the ranges that actions in [-1, 1] are scaled to."""
    low = np.concatenate([c.action_space_low.numpy() for c in controllers])
    high = np.concatenate([c.action_space_high.numpy() for c in controllers])
    return np.float32(0.5) * (high + low), np.float32(0.5) * (high - low)


def _mimic(gripper: Any) -> tuple[np.ndarray, np.ndarray]:
    """Each gripper joint's factor and offset from the commanded width."""
    gain = np.ones(len(gripper.joints), np.float32)
    offset = np.zeros(len(gripper.joints), np.float32)
    for i, joint in enumerate(gripper.mimic_joint_indices.tolist()):
        gain[joint] = gripper._multiplier[i]
        offset[joint] = gripper._offset[i]
    return gain, offset


# Quaternions as ManiSkill computes them, in float32 and in the same order of operations.


def _conjugate(w: Any, x: Any, y: Any, z: Any) -> Quaternion:
    return w, -x, -y, -z


def _product(a: Quaternion, b: Quaternion) -> Quaternion:
    aw, ax, ay, az = a
    bw, bx, by, bz = b
    return (
        aw * bw - ax * bx - ay * by - az * bz,
        aw * bx + ax * bw + ay * bz - az * by,
        aw * by - ax * bz + ay * bw + az * bx,
        aw * bz + ax * by - ay * bx + az * bw,
    )


def _rotate(q: Quaternion, point: np.ndarray) -> np.ndarray:
    turned = _product(_product(q, (np.float32(0), *point)), _conjugate(*q))
    return np.array(turned[1:], dtype=np.float32)


def _positive(q: Quaternion) -> np.ndarray:
    """The quaternion of the same rotation with a real part of at least 0."""
    out = np.array(q, dtype=np.float32)
    return -out if out[0] < 0 else out
