"""``Scene``: one LIBERO task in robosuite, stepped without robosuite's overhead.

robosuite runs all of MuJoCo's forward dynamics three times per physics step (before the controller,
in it, and in the step itself), and reads all observables every time. Here a physics step is
``mj_step1``, robosuite's own controller, and ``mj_step2``. The numbers are the same bit for bit (a
test compares whole episodes), at about three times the speed. Cameras are drawn only when asked
for.

A scene holds one simulation. Many envs share it by saving and loading ``Snapshot``s.
"""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's module is native and its wheel describes it only in part to a type checker.
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np

from embodyrl.sims.libero.robosuite_build import build, joint_limits, place_anew
from embodyrl.sims.libero.suites import Task, quiet
from embodyrl.sims.numpy_stream import private_numpy_stream

PROPRIO_DIM = 8  # position, axis-angle and fingers, as the published LIBERO policies take them
MAX_OBJECTS = 10
MAX_JOINTS = 8
PRIVILEGED_DIM = 23 + 10 * MAX_OBJECTS + MAX_JOINTS
LAYOUT = (
    ("robot", 0, PROPRIO_DIM + 23),
    ("hand", 0, 3),
    ("hand", PROPRIO_DIM + 16, 7),
    *(("object", PROPRIO_DIM + 23 + 10 * slot, 7) for slot in range(MAX_OBJECTS)),
)
"""``EnvSpec.layout``: see ``Scene.privileged``; slots that a task does not fill stay 0."""
_STATE = mujoco.mjtState.mjSTATE_INTEGRATION
# Attributes of robosuite's controller that last from one control step to the next.
_CONTROLLER = (
    "ee_pos",
    "ee_ori_mat",
    "ee_pos_vel",
    "ee_ori_vel",
    "joint_pos",
    "joint_vel",
    "J_pos",
    "J_ori",
    "J_full",
    "mass_matrix",
    "goal_pos",
    "goal_ori",
    "new_update",
)


@dataclass
class Start:
    """An initial state.

    Attributes:
        state: (1 + nq + nv,) time, qpos and qvel, as LIBERO flattens them.
        fixtures: (F, 7) poses of cabinets and stoves.
    """

    state: np.ndarray
    fixtures: np.ndarray


@dataclass
class Snapshot:
    """An episode as it is: all that its future depends on, and its present observation.

    Attributes:
        state: MuJoCo's.
        fixtures: (F, 7) poses of cabinets and stoves.
        controller: attributes of robosuite's controller.
        gripper: its command.
        seen_qpos: (nq,) when the cameras looked.
        proprio: (PROPRIO_DIM,).
        privileged: (PRIVILEGED_DIM,).
    """

    state: np.ndarray
    fixtures: np.ndarray
    controller: dict[str, Any]
    gripper: np.ndarray
    seen_qpos: np.ndarray
    proprio: np.ndarray
    privileged: np.ndarray


class Scene:
    """A built task.

    Args:
        task: which.
        models: compiled MuJoCo models by their XML; scenes with the same objects share one (a model
            takes .4 GB).
    """

    def __init__(self, task: Task, models: dict[str, Any]) -> None:
        self.task = task
        with quiet(), private_numpy_stream(0):
            self.env = build(task, models)
        self.sim = self.env.sim
        self.xml = self.env.scene_xml
        self.model = self.sim.model._model
        self.data = self.sim.data._data
        self.robot = self.env.robots[0]
        # The controller, and its state at the robot's nominal pose, in which every episode begins.
        self._nominal = self.robot.controller
        self.nominal_state = {
            name: np.copy(getattr(self._nominal, name))
            for name in _CONTROLLER
            if name != "new_update"
        }
        self.substeps = int(self.env.control_timestep / self.env.model_timestep)
        self._eef_site = self.model.site(self._nominal.eef_name).id
        self._hand = self.model.body(self.robot.robot_model.eef_name).id
        self._gripper_qpos = self.robot._ref_gripper_joint_pos_indexes
        self.fixtures = [self.env.obj_body_id[name] for name in self.env.fixtures_dict]
        # The privileged state: joints of drawers, doors and knobs, and the objects, those that the
        # goal speaks of first.
        arm = set(self.robot._ref_joint_pos_indexes) | set(self._gripper_qpos)
        kinds = [int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE)]
        single = [
            int(self.model.jnt_qposadr[j])
            for j in range(self.model.njnt)
            if self.model.jnt_type[j] in kinds
        ]
        self.observed_joints = [address for address in single if address not in arm][:MAX_JOINTS]
        of_interest = [
            name for name in self.env.obj_of_interest if name in self.env.object_states_dict
        ]
        others = [name for name in self.env.objects_dict if name not in of_interest]
        self.observed = [*of_interest, *others][:MAX_OBJECTS]
        self._objects = [self.env.object_states_dict[name] for name in self.observed]
        # Actuators and their limits, read once and not in every physics step.
        self._arm_actuators = self.robot._ref_joint_actuator_indexes
        self._torque_low, self._torque_high = self.robot.torque_limits
        self._gripper_actuators = self.robot._ref_joint_gripper_actuator_indexes
        limits = self.model.actuator_ctrlrange[self._gripper_actuators]
        self.gripper_bias = 0.5 * (limits[:, 1] + limits[:, 0])
        self.gripper_weight = 0.5 * (limits[:, 1] - limits[:, 0])
        self._nominal.update = self._update_controller  # without a forward pass of its own
        self._seen_qpos = self.data.qpos.copy()
        self._proprio = self._read_proprio()

    def draw(self, seed: list[int]) -> Start:
        """An initial state by the task's own placement samplers.

        The arm's joints have the noise that they have in the official states.
        """
        robot = self.robot
        noise = robot.initialization_noise
        with quiet(), private_numpy_stream(seed):
            robot.initialization_noise = {"magnitude": 0.02, "type": "gaussian"}
            # A new controller would cost four forward passes, and no placement depends on it.
            robot._load_controller = lambda: None
            try:
                place_anew(self.env)
            finally:
                robot.initialization_noise = noise
                del robot._load_controller
        return Start(self.sim.get_state().flatten(), self.fixture_poses())

    def start(self, start: Start) -> None:
        """Begins an episode as LIBERO's ``reset`` and ``set_init_state`` do."""
        mujoco.mj_resetData(self.model, self.data)
        self.set_fixtures(start.fixtures)
        self.sim.set_state_from_flattened(start.state)
        mujoco.mj_forward(self.model, self.data)
        # LIBERO resets the controller at the robot's nominal pose, before the initial state is set.
        for name, value in self.nominal_state.items():
            setattr(self._nominal, name, np.copy(value))
        self._nominal.new_update = False
        self.robot.gripper.current_action = np.zeros(self.robot.gripper.dof)
        self._seen_qpos = self.data.qpos.copy()
        self._proprio = self._read_proprio()

    def step(self, action: np.ndarray) -> bool:
        """One control step of 50 ms with an action (7,) in [-1, 1].

        Returns:
            Whether the goal is reached.
        """
        controller = self._nominal
        data = self.data
        for substep in range(self.substeps):
            mujoco.mj_step1(self.model, data)
            # The action sets the goal once; robosuite's controller follows it in every substep.
            if substep == 0:
                controller.set_goal(action[:6])
            torques = controller.run_controller()
            data.ctrl[self._arm_actuators] = np.clip(torques, self._torque_low, self._torque_high)
            gripper = self.robot.gripper.format_action(action[6:])
            data.ctrl[self._gripper_actuators] = self.gripper_bias + self.gripper_weight * gripper
            # robosuite's sensors and cameras look once a control step, at the last physics step but
            # one. They see body poses from before it, and joints from after it.
            seen = substep == self.substeps - 2
            if seen:
                self._seen_qpos = data.qpos.copy()
            mujoco.mj_step2(self.model, data)
            if seen:
                self._proprio = self._read_proprio()
        return bool(self.env._check_success())

    def broken(self) -> bool:
        """Whether MuJoCo found NaN or infinity and silently reset the simulation."""
        warning = self.data.warning
        kinds = (
            mujoco.mjtWarning.mjWARN_BADQPOS,
            mujoco.mjtWarning.mjWARN_BADQVEL,
            mujoco.mjtWarning.mjWARN_BADQACC,
        )
        return any(warning[kind].number for kind in kinds) or not np.isfinite(self.data.qpos).all()

    def save(self) -> Snapshot:
        """The episode as it is now."""
        state = np.empty(mujoco.mj_stateSize(self.model, _STATE))
        mujoco.mj_getState(self.model, self.data, state, _STATE)
        controller = {name: np.copy(getattr(self._nominal, name)) for name in _CONTROLLER}
        gripper = np.copy(self.robot.gripper.current_action)
        return Snapshot(
            state,
            self.fixture_poses(),
            controller,
            gripper,
            self._seen_qpos,
            self._proprio,
            self.privileged(),
        )

    def load(self, snapshot: Snapshot) -> None:
        """Continues an episode; body poses are up to date only after the next step."""
        self.set_fixtures(snapshot.fixtures)
        mujoco.mj_setState(self.model, self.data, snapshot.state, _STATE)
        for name, value in snapshot.controller.items():
            setattr(self._nominal, name, bool(value) if name == "new_update" else np.copy(value))
        self.robot.gripper.current_action = np.copy(snapshot.gripper)
        self._seen_qpos = snapshot.seen_qpos
        self._proprio = snapshot.proprio
        for warning in self.data.warning:
            warning.number = 0

    def pose_for_drawing(self, snapshot: Snapshot) -> None:
        """Puts all bodies where the cameras saw them; call ``load`` before the next step."""
        self.set_fixtures(snapshot.fixtures)
        mujoco.mj_setState(self.model, self.data, snapshot.state, _STATE)
        self.data.qpos[:] = snapshot.seen_qpos
        mujoco.mj_kinematics(self.model, self.data)
        mujoco.mj_comPos(self.model, self.data)
        mujoco.mj_camlight(self.model, self.data)
        self.env._post_process()  # burners glow

    def _read_proprio(self) -> np.ndarray:
        """(8,) gripper position, axis-angle, finger joints."""
        fingers = self.data.qpos[self._gripper_qpos]
        quat = self.data.xquat[self._hand]
        return np.concatenate(
            [self.data.site_xpos[self._eef_site], axis_angle(quat), fingers]
        ).astype(np.float32)

    def privileged(self) -> np.ndarray:
        """(PRIVILEGED_DIM,) the robot, then the objects of the goal, then others, then joints.

        The robot is joint angles and velocities, fingers, and the hand's pose. An object is its
        position, its quaternion, and its position relative to the hand. The joints are those of
        drawers, doors and knobs. See ``LAYOUT``.
        """
        data = self.data
        out = np.zeros(PRIVILEGED_DIM, dtype=np.float32)
        eef = data.site_xpos[self._eef_site]
        joints = self.robot._ref_joint_pos_indexes
        fingers = self._gripper_qpos
        velocity = data.qvel[self.robot._ref_joint_vel_indexes]
        out[:23] = np.concatenate(
            [data.qpos[joints], velocity, data.qpos[fingers], eef, data.xquat[self._hand]]
        )
        for slot, item in enumerate(self._objects):
            pose = item.get_geom_state()
            at = 23 + 10 * slot
            out[at : at + 10] = np.concatenate([pose["pos"], pose["quat"], pose["pos"] - eef])
        at = 23 + 10 * MAX_OBJECTS
        out[at : at + len(self.observed_joints)] = data.qpos[self.observed_joints]
        return out

    @property
    def hand_velocity(self) -> np.ndarray:
        """(3,) m/s."""
        return self._nominal.ee_pos_vel

    @property
    def nominal_mat(self) -> np.ndarray:
        """(3, 3) rotation of the hand in the arm's nominal pose."""
        return np.array(self._nominal.initial_ee_ori_mat)

    def position(self, name: str) -> np.ndarray:
        """(3,) of an object or a region."""
        return np.array(self.env.object_states_dict[name].get_geom_state()["pos"])

    def body(self, name: str) -> int:
        """The body of an object, or of what a region belongs to; -1 for a region of the table."""
        state = self.env.object_states_dict[name]
        owner = state.parent_name if state.object_state_type == "site" else name
        return self.env.obj_body_id.get(owner, -1)

    def articulation(self, name: str) -> tuple[list[int], dict[str, tuple[float, float]]]:
        """Addresses in qpos of an item's joints, and ``Item.limits``."""
        state = self.env.object_states_dict[name]
        owner = state.parent_name if state.object_state_type == "site" else name
        joints = self.env.get_object(name).joints or []
        addresses = [int(self.model.jnt_qposadr[self.model.joint(joint).id]) for joint in joints]
        return addresses, joint_limits(self.env.get_object(owner) if owner else None)

    def goals(self) -> list[tuple[str, ...]]:
        """Predicates that must all hold, e.g. ``("on", "akita_black_bowl_1", "plate_1")``."""
        return [tuple(goal) for goal in self.env.parsed_problem["goal_state"]]

    def reached(self, goal: tuple[str, ...]) -> bool:
        """Whether one of the goals holds now (body poses and contacts must be up to date)."""
        return bool(self.env._eval_predicate(list(goal)))

    def fixture_poses(self) -> np.ndarray:
        """(F, 7) positions and quaternions of cabinets and stoves."""
        return np.hstack([self.model.body_pos[self.fixtures], self.model.body_quat[self.fixtures]])

    def set_fixtures(self, poses: np.ndarray) -> None:
        """Moves cabinets and stoves."""
        self.model.body_pos[self.fixtures] = poses[:, :3]
        self.model.body_quat[self.fixtures] = poses[:, 3:]

    def _update_controller(self, force: bool = False) -> None:
        """Robosuite's ``Controller.update`` without its forward pass: ``mj_step1`` has just run."""
        c = self._nominal
        data = self.data
        if not (c.new_update or force):
            return
        jac = np.zeros((6, self.model.nv))
        mujoco.mj_jacSite(self.model, data, jac[:3], jac[3:], self._eef_site)
        mass = np.empty((self.model.nv, self.model.nv))
        mujoco.mj_fullM(self.model, data, mass)
        dofs = c.qvel_index
        c.ee_pos = data.site_xpos[self._eef_site].copy()
        c.ee_ori_mat = data.site_xmat[self._eef_site].reshape(3, 3).copy()
        c.ee_pos_vel = jac[:3] @ data.qvel
        c.ee_ori_vel = jac[3:] @ data.qvel
        c.joint_pos = data.qpos[c.qpos_index]
        c.joint_vel = data.qvel[dofs]
        c.J_pos = jac[:3, dofs]
        c.J_ori = jac[3:, dofs]
        c.J_full = np.vstack([c.J_pos, c.J_ori])
        c.mass_matrix = mass[dofs, :][:, dofs]
        c.new_update = False


def axis_angle(quat: np.ndarray) -> np.ndarray:
    """The rotation vector (3,) of a quaternion (w, x, y, z).

    Its angle is in [0, 2 pi), as in published LIBERO data.
    """
    w = float(np.clip(quat[0], -1.0, 1.0))
    sine = np.sqrt(1.0 - w * w)
    return np.zeros(3) if np.isclose(sine, 0.0) else quat[1:] * (2.0 * np.arccos(w)) / sine
