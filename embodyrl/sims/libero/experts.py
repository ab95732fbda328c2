"""A scripted expert for LIBERO's pick-and-place goals: ``(On object place)`` and ``(In object region)``.

It reads the simulation, plans one grasp from the object's collision geometry (a pinch across its
narrowest side, or the rim of something hollow and wide), and then closes the loop on where gripper
and object are at every control step.
"""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's module is native and its wheel describes it only in part to a type checker.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodyrl.env import env_index
from embodyrl.errors import UserError
from embodyrl.sims.libero.grasp import Grasp, Workspace, plan_grasp

if TYPE_CHECKING:
    from embodyrl.sims.libero.env import LiberoEnv
    from embodyrl.sims.libero.native import Simulation
    from embodyrl.sims.libero.scene import Scene

POSITION_SCALE = 0.05  # metres that an action of 1 asks for
ROTATION_SCALE = 0.5  # radians that an action of 1 asks for
OPEN = -1.0
CLOSE = 1.0
UP = np.array([0.0, 0.0, 0.1])


@dataclass
class _Plan:
    """What one env's arm is doing: carrying ``item`` to ``place``."""

    item: str = ""
    place: str = ""
    grasp: Grasp | None = None
    phase: str = "above"
    steps: int = 0
    tries: int = 0
    safe_height: float = 0.0
    release_height: float = 0.0


class ScriptedExpert:
    """Solves pick-and-place tasks.

    Args:
        env: a ``LiberoEnv`` in this process.
        noise: standard deviation of Gaussian noise on the six motion dimensions of each action.
        seed: of that noise; env k draws from seed + k.

    Raises:
        UserError: a task's goal is none that it can reach.
    """

    def __init__(self, env: LiberoEnv, noise: float = 0.0, seed: int = 0) -> None:
        self.env = env
        self.noise = noise
        self._rngs = [np.random.default_rng(seed + k) for k in range(env.spec.num_envs)]
        self._plans = [_Plan() for _ in range(env.spec.num_envs)]
        self._spaces: dict[int, Workspace] = {}

    def reset(self, env_ids: Tensor | Sequence[int] | None = None) -> None:
        """Begins anew in those envs; call it after their reset."""
        for k in env_index(env_ids, self.env.spec.num_envs):
            self._plans[k] = _Plan()

    def act(self) -> Tensor:
        """The next actions (N, 7) float32, zero in envs that have ended."""
        actions = torch.zeros(self.env.spec.num_envs, 7)
        for k in self.env._running.nonzero().flatten().tolist():
            scene = self.env.scene(k)
            mujoco.mj_kinematics(scene.model, scene.data)
            action = self._act(self._space(scene), self._plans[k])
            action[:6] += self.noise * self._rngs[k].normal(size=6)
            actions[k] = torch.from_numpy(action.clip(-1.0, 1.0))
        return actions

    def _space(self, scene: Scene | Simulation) -> Workspace:
        if id(scene) not in self._spaces or self._spaces[id(scene)].scene is not scene:
            self._spaces[id(scene)] = Workspace(scene)
        return self._spaces[id(scene)]

    def _act(self, space: Workspace, plan: _Plan) -> np.ndarray:
        if plan.grasp is None:
            self._choose(space, plan)
        assert plan.grasp is not None
        plan.steps += 1
        eef = space.eef()
        item = space.position(plan.item)
        grasp = plan.grasp
        place = space.position(plan.place)
        held = (
            np.linalg.norm(item[:2] - (eef - grasp.offset)[:2]) < 0.05
            and abs(item[2] - (eef - grasp.offset)[2]) < 0.05
        )
        # While it is carried, the object and not the gripper has to get to the place.
        carried = eef - item
        if plan.phase in ("lift", "carry", "lower") and not held:
            self._retry(space, plan)
            return self._move(space, eef + UP, grasp.yaw, OPEN)
        if plan.phase == "above":
            target = grasp.position.copy()
            high = np.array([*target[:2], plan.safe_height])
            near = np.linalg.norm(eef[:2] - target[:2])
            if near > 0.05 and eef[2] < plan.safe_height - 0.05:
                high[:2] = eef[:2]
            still = space.speed() < 0.03
            if near < 0.005 and still and np.linalg.norm(space.rotation_error(grasp.yaw)) < 0.05:
                self._next(plan, "descend")
            return self._move(
                space,
                high if near > 0.03 else np.array([*target[:2], target[2] + 0.06]),
                grasp.yaw,
                OPEN,
            )
        if plan.phase == "descend":
            if np.linalg.norm(eef - grasp.position) < 0.008 or plan.steps > 30:
                self._next(plan, "grasp")
            straight = np.linalg.norm((eef - grasp.position)[:2]) < 0.01
            target = np.array(
                [*grasp.position[:2], grasp.position[2] if straight else eef[2] + 0.01]
            )
            return self._move(space, target, grasp.yaw, OPEN)
        if plan.phase == "grasp":
            if plan.steps > 9:
                grasp.offset = eef - item
                self._next(plan, "lift")
            return self._move(space, grasp.position, grasp.yaw, CLOSE)
        if plan.phase == "lift":
            if eef[2] > plan.safe_height - 0.02 or plan.steps > 40:
                self._next(plan, "carry")
            return self._move(
                space, np.array([*eef[:2], plan.safe_height + 0.02]), grasp.yaw, CLOSE
            )
        if plan.phase == "carry":
            target = np.array([*(place + carried)[:2], plan.safe_height])
            if np.linalg.norm(eef[:2] - target[:2]) < 0.012 or plan.steps > 80:
                self._next(plan, "lower")
            return self._move(space, target, grasp.yaw, CLOSE)
        if plan.phase == "lower":
            target = place + carried
            target[2] = plan.release_height + eef[2] - space.points(plan.item)[:, 2].min() + 0.01
            if abs(eef[2] - target[2]) < 0.012 or plan.steps > 40:
                self._next(plan, "release")
            return self._move(space, target, grasp.yaw, CLOSE)
        if plan.phase == "release":
            if plan.steps > 8:
                self._next(plan, "retreat")
            return self._move(space, eef, grasp.yaw, OPEN)
        if plan.steps > 20:  # the episode goes on, so something is still missing
            self._retry(space, plan)
        return self._move(space, eef + UP, grasp.yaw, OPEN)

    def _choose(self, space: Workspace, plan: _Plan) -> None:
        """The first goal that is not yet reached, and a grasp for it."""
        scene = space.scene
        goals = scene.goals()
        if unknown := [goal for goal in goals if goal[0] not in ("on", "in") or len(goal) != 3]:
            raise UserError(
                f"The scripted expert cannot do {scene.task.name}: it knows the goals (On object "
                f"place) and (In object region), not {' '.join(unknown[0])}."
            )
        warmstart = scene.data.qacc_warmstart.copy()
        mujoco.mj_forward(scene.model, scene.data)
        scene.data.qacc_warmstart[:] = warmstart  # looking changes nothing
        missing = [goal for goal in goals if not scene.reached(goal)] or goals
        _, plan.item, plan.place = missing[0]
        plan.grasp = plan_grasp(space, plan.item, plan.tries)
        hanging = plan.grasp.position[2] - space.points(plan.item)[:, 2].min()
        surface, top = space.surface(plan.place)
        plan.release_height = max(surface, top - 0.05)  # into a box no deeper than the hand may go
        plan.safe_height = max(plan.grasp.position[2] + 0.10, top + hanging + 0.04)
        self._next(plan, "above")

    def _retry(self, space: Workspace, plan: _Plan) -> None:
        plan.tries = plan.tries + 1
        plan.grasp = None

    @staticmethod
    def _next(plan: _Plan, phase: str) -> None:
        plan.phase = phase
        plan.steps = 0

    @staticmethod
    def _move(space: Workspace, target: np.ndarray, yaw: float, gripper: float) -> np.ndarray:
        """Proportional control; full speed beyond about 3 cm."""
        rotation = space.rotation_error(yaw)
        delta = (target - space.eef()) / POSITION_SCALE * 1.6
        largest = np.abs(delta).max()
        return np.concatenate(
            [delta / max(1.0, largest), (rotation / ROTATION_SCALE).clip(-0.5, 0.5), [gripper]]
        )
