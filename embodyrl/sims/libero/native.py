"""``Simulation``: one LIBERO episode on MuJoCo, without robosuite.

robosuite's controller is compiled (``osc.py``), and goals and observations are computed from plain
numbers. States, successes and observations are those of ``scene.Scene``, which is bit for bit
robosuite's env. A test and ``benchmarks/libero_fidelity.py`` compare whole episodes.
"""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's module is native and its wheel describes it only in part to a type checker.
from __future__ import annotations

import copy
from typing import Any

import mujoco
import numpy as np

from embodyrl.sims.libero import osc
from embodyrl.sims.libero.blueprint import Blueprint, Item
from embodyrl.sims.libero.scene import MAX_OBJECTS, PRIVILEGED_DIM, Start, axis_angle
from embodyrl.sims.libero.suites import Task

_FAULTS = (
    mujoco.mjtWarning.mjWARN_BADQPOS,
    mujoco.mjtWarning.mjWARN_BADQVEL,
    mujoco.mjtWarning.mjWARN_BADQACC,
)


class Simulation:
    """One copy of a task's scene.

    Args:
        task: which.
        blueprint: of the task.
        model: its physics model. It is copied where a reset moves cabinets and stoves, whose poses
            are part of it; otherwise simulations share it.
    """

    def __init__(self, task: Task, blueprint: Blueprint, model: Any) -> None:
        self.task = task
        self.blueprint = blueprint
        self.model = copy.copy(model) if blueprint.fixtures else model
        self.data = data = mujoco.MjData(self.model)
        # What the compiled controller works on: where the arm is, what robosuite's controller has
        # in mind when an episode begins, MuJoCo's own memory, and its own memory.
        numbers: dict[str, Any] = {
            k: v if isinstance(v, int) else np.array(v) for k, v in blueprint.robot.items()
        }
        self.robot = osc.ControlledRobot(**numbers)
        nominal = {k: np.array(v, dtype=np.float64) for k, v in blueprint.nominal.items()}
        nominal |= {k: np.asfortranarray(nominal[k]) for k in ("jac", "mass")}
        self._nominal = osc.Sensed(**nominal)
        self._buffers = osc.Buffers(
            data.qpos,
            data.qvel,
            data.ctrl,
            data.qfrc_bias,
            data.M,
            data.site_xpos,
            data.site_xmat,
            data.xquat,
        )
        self.memory = osc.Memory(
            np.zeros(3),
            np.zeros((3, 3)),
            np.zeros(2),
            np.zeros(self.model.nq),
            np.zeros(9),
            np.zeros(3),
        )
        self._first = True  # whether the next control step is the episode's first
        self.nominal_mat = np.array(blueprint.nominal_mat)
        self._items = blueprint.items
        self._goals = [
            (goal[0], [self._items[name] for name in goal[1:]]) for goal in blueprint.goals
        ]
        self._observed = [self._items[name] for name in blueprint.observed]
        # For contacts: which geoms (ngeom,) belong to each item.
        self._touching = {
            name: np.isin(np.arange(self.model.ngeom), item.geoms)
            for name, item in self._items.items()
        }
        self._name_of = {id(item): name for name, item in self._items.items()}

    def start(self, start: Start) -> None:
        """Begins an episode as LIBERO's ``reset`` and ``set_init_state`` do."""
        m = self.model
        d = self.data
        b = self.blueprint
        # The initial state, with cabinets and stoves where it has them.
        mujoco.mj_resetData(m, d)
        m.body_pos[b.fixtures] = start.fixtures[:, :3]
        m.body_quat[b.fixtures] = start.fixtures[:, 3:]
        d.time = start.state[0]
        d.qpos[:] = start.state[1 : 1 + m.nq]
        d.qvel[:] = start.state[1 + m.nq :]
        mujoco.mj_forward(m, d)
        # LIBERO resets the controller at the robot's nominal pose, before it sets the state.
        memory = self.memory
        memory.goal_pos[:] = b.goal_pos
        memory.goal_mat[:] = b.goal_mat
        memory.gripper[:] = 0.0
        memory.velocity[:] = 0.0
        memory.seen_qpos[:] = d.qpos
        robot = self.robot
        memory.seen_hand[:] = np.concatenate(
            [d.site_xpos[robot.site], d.xquat[robot.hand], d.qpos[robot.fingers]]
        )
        self._first = True

    def step(self, action: np.ndarray) -> None:
        """One control step of 50 ms with an action (7,) float64 in [-1, 1].

        The compiled function holds no lock, so other threads run at the same time.
        """
        osc.control_step(
            self.model._address,
            self.data._address,
            self.blueprint.substeps,
            action,
            self.robot,
            self._buffers,
            self.memory,
            self._first,
            self._nominal,
        )
        self._first = False

    def read(self, world: dict[str, np.ndarray]) -> None:
        """Takes over the state of one of ``worlds.Worlds``.

        Args:
            world: its tensors' rows as arrays, by the names in MuJoCo and in ``osc.Memory``.
        """
        self.data.qpos[:] = world["qpos"]
        self.data.qvel[:] = world["qvel"]
        bodies = self.blueprint.fixtures
        for name in ("body_pos", "body_quat"):
            getattr(self.model, name)[bodies] = world[name][bodies]
        for name in osc.Memory._fields:
            getattr(self.memory, name)[:] = world[name]
        mujoco.mj_forward(self.model, self.data)
        self._first = False

    def broken(self) -> bool:
        """Whether MuJoCo found NaN or infinity and silently reset the simulation."""
        warning = self.data.warning
        return (
            any(warning[kind].number for kind in _FAULTS) or not np.isfinite(self.data.qpos).all()
        )

    @property
    def seen_qpos(self) -> np.ndarray:
        """(nq,) positions at the moment at which robosuite's cameras look."""
        return self.memory.seen_qpos

    @property
    def fixture_poses(self) -> np.ndarray:
        """(F, 7) positions and quaternions of cabinets and stoves."""
        bodies = self.blueprint.fixtures
        return np.hstack([self.model.body_pos[bodies], self.model.body_quat[bodies]])

    def glowing(self) -> list[bool]:
        """Which of the blueprint's burners are lit."""
        return [
            self._in_state(self._items[name], "turnon", any) for name in self.blueprint.burner_items
        ]

    def proprio(self) -> np.ndarray:
        """(8,) gripper position, axis-angle, finger joints."""
        hand = self.memory.seen_hand
        return np.concatenate([hand[:3], axis_angle(hand[3:7]), hand[7:]]).astype(np.float32)

    def privileged(self) -> np.ndarray:
        """(PRIVILEGED_DIM,) as ``Scene.privileged``."""
        d = self.data
        robot = self.robot
        out = np.zeros(PRIVILEGED_DIM, dtype=np.float32)
        eef = d.site_xpos[robot.site]
        own = [
            d.qpos[robot.joints],
            d.qvel[robot.dofs],
            d.qpos[robot.fingers],
            eef,
            d.xquat[robot.hand],
        ]
        out[:23] = np.concatenate(own)
        # Objects: position, quaternion, and position relative to the hand.
        for slot, item in enumerate(self._observed):
            if item.site >= 0:
                pos = d.site_xpos[item.site]
                quat = np.empty(4)
                mujoco.mju_mat2Quat(quat, d.site_xmat[item.site])
                # robosuite has the scalar last for sites, and first for bodies.
                quat = np.roll(quat if quat[0] >= 0 else -quat, -1)
            else:
                pos = d.xpos[item.body]
                quat = d.xquat[item.body]
            at = 23 + 10 * slot
            out[at : at + 10] = np.concatenate([pos, quat, pos - eef])
        # Joints of drawers, doors and knobs.
        at = 23 + 10 * MAX_OBJECTS
        joints = self.blueprint.observed_joints
        out[at : at + len(joints)] = d.qpos[joints]
        return out

    # What the scripted expert reads; ``Scene`` has the same methods.

    @property
    def hand_velocity(self) -> np.ndarray:
        """(3,) m/s."""
        return self.memory.velocity

    def position(self, name: str) -> np.ndarray:
        """(3,) of an object or a region."""
        return self._position(self._items[name]).copy()

    def body(self, name: str) -> int:
        """The body of an object, or of what a region belongs to; -1 for a region of the table."""
        return self._items[name].body

    def articulation(self, name: str) -> tuple[list[int], dict[str, tuple[float, float]]]:
        """Addresses in qpos of an item's joints, and ``Item.limits``."""
        return self._items[name].joints, self._items[name].limits

    def goals(self) -> list[tuple[str, ...]]:
        """The conjunction of predicates that is the task's goal."""
        return [tuple(goal) for goal in self.blueprint.goals]

    def reached(self, goal: tuple[str, ...]) -> bool:
        """Whether one of the goals holds now (body poses and contacts must be up to date)."""
        return self._holds(goal[0], [self._items[name] for name in goal[1:]])

    def success(self) -> bool:
        """Whether all goals hold, by the poses and contacts of the last physics step."""
        return all(self._holds(predicate, items) for predicate, items in self._goals)

    # LIBERO's predicates, with the same thresholds; the cheap conditions come first.

    def _holds(self, predicate: str, items: list[Item]) -> bool:
        first = items[0]
        if predicate == "on":
            return self._on(first, items[1])
        if predicate == "in":
            return self._in(first, items[1])
        if predicate == "up":
            return bool(self._position(first)[2] >= 1.0)
        any_or_all = any if predicate in ("open", "turnon") else all
        return self._in_state(first, predicate, any_or_all)

    def _in_state(self, item: Item, what: str, any_or_all: Any) -> bool:
        """Whether any or all joints of a drawer, door or knob are open, closed, on or off."""
        direction, threshold = item.limits[what]
        values = direction * self.data.qpos[item.joints]
        limit = direction * threshold
        return bool(any_or_all(values >= limit if what == "turnon" else values > limit))

    def _on(self, item: Item, place: Item) -> bool:
        pos = self._position(item)
        # On an object: above its middle, and in contact.
        if place.site < 0:
            below = self._position(place)
            close = np.linalg.norm(below[:2] - pos[:2]) < 0.03
            return bool(below[2] <= pos[2] and close and self._touch(place, item))
        # On a region: in its frame, a little above its top, and in contact with what it belongs to.
        mat = self.data.site_xmat[place.site].reshape(3, 3)
        size = np.array(place.size)
        delta = mat @ (pos - self.data.site_xpos[place.site])
        if not (
            size[2] - 0.005 < delta[2] < size[2] + 0.10 and (np.abs(delta[:2]) < size[:2]).all()
        ):
            return False
        return not place.parent or self._touch(self._items[place.parent], item)

    def _in(self, item: Item, place: Item) -> bool:
        """Whether the item's middle is in the region's bounding box, 1 cm deeper at the bottom."""
        pos = self._position(item)
        middle = self.data.site_xpos[place.site]
        half = np.abs(self.data.site_xmat[place.site].reshape(3, 3) @ np.array(place.size))
        low = middle - half
        low[2] -= 0.01
        return bool((pos > low).all() and (pos < middle + half).all())

    def _position(self, item: Item) -> np.ndarray:
        return self.data.site_xpos[item.site] if item.site >= 0 else self.data.xpos[item.body]

    def _touch(self, a: Item, b: Item) -> bool:
        """Whether any contact is between a geom of one and a geom of the other."""
        pairs = self.data.contact.geom
        in_a = self._touching[self._name_of[id(a)]][pairs]
        in_b = self._touching[self._name_of[id(b)]][pairs]
        return bool(((in_a[:, 0] & in_b[:, 1]) | (in_a[:, 1] & in_b[:, 0])).any())
