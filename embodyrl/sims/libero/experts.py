"""A scripted expert for LIBERO's goals ``(On object place)`` and ``(In object region)``.

It reads the simulation and plans one grasp from the object's collision geometry: a pinch across its
narrowest side, or the rim of something hollow and wide. Then it goes through the phases above,
descend, grasp, lift, carry, lower, release, retreat. At every control step it looks where gripper
and object are and moves towards the phase's target.
"""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's module is native and its wheel describes it only in part to a type checker.
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodyrl.env import env_index
from embodyrl.errors import UserError
from embodyrl.sims.libero.grasp import Grasp, Workspace, plan_grasp
from embodyrl.types import EnvSpec

if TYPE_CHECKING:
    from embodyrl.sims.libero.native import Simulation
    from embodyrl.sims.libero.scene import Scene

POSITION_SCALE = 0.05  # metres that an action of 1 asks for
ROTATION_SCALE = 0.5  # radians that an action of 1 asks for
OPEN = -1.0
CLOSE = 1.0
UP = np.array([0.0, 0.0, 0.1])


class ReadableEnv(Protocol):
    """What the expert reads of a ``LiberoEnv``."""

    spec: EnvSpec
    _running: Tensor

    def scene(self, k: int) -> Scene | Simulation:
        """The scene of env k in the state of its episode."""
        ...


@dataclass
class _Plan:
    """What one env's arm is doing: carrying ``item`` to ``place``.

    Attributes:
        item: the object to carry.
        place: the object or region that it belongs on or in.
        grasp: how to hold the item; None before it is planned.
        phase: a key of ``_PHASES``.
        steps: control steps spent in the phase.
        tries: grasps that failed.
        safe_height: of the gripper, in metres, at which it hits nothing on its way.
        release_height: of the item's lowest point, in metres, at which it is let go.
    """

    item: str = ""
    place: str = ""
    grasp: Grasp | None = None
    phase: str = "above"
    steps: int = 0
    tries: int = 0
    safe_height: float = 0.0
    release_height: float = 0.0

    def begin(self, phase: str) -> None:
        """Goes on to another phase."""
        self.phase = phase
        self.steps = 0

    def retry(self) -> None:
        """Gives up this grasp; the next step plans another."""
        self.tries += 1
        self.grasp = None


@dataclass
class _Look:
    """What is where at this control step, (3,) each in metres."""

    space: Workspace
    grasp: Grasp
    hand: np.ndarray
    item: np.ndarray
    place: np.ndarray

    @property
    def held(self) -> bool:
        """Whether the item is still where the closed fingers took it."""
        expected = self.hand - self.grasp.offset
        beside = np.linalg.norm(self.item[:2] - expected[:2])
        return bool(beside < 0.05 and abs(self.item[2] - expected[2]) < 0.05)

    @property
    def hand_at_place(self) -> np.ndarray:
        """Where the hand must be for the item in it to be at the place."""
        return self.place + (self.hand - self.item)


class ScriptedExpert:
    """Solves pick-and-place tasks.

    Args:
        env: a ``LiberoEnv`` in this process.
        noise: standard deviation of Gaussian noise on the six motion dimensions of each action.
        seed: of that noise; env k draws from seed + k.

    Raises:
        UserError: a task's goal is none that it can reach.
    """

    def __init__(self, env: ReadableEnv, noise: float = 0.0, seed: int = 0) -> None:
        self.env = env
        self.noise = noise
        self._rngs = [np.random.default_rng(seed + k) for k in range(env.spec.num_envs)]
        self._plans = [_Plan() for _ in range(env.spec.num_envs)]
        self._workspaces: dict[int, Workspace] = {}  # by the identity of the scene

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
            action = _next_action(self._workspace(scene), self._plans[k])
            action[:6] += self.noise * self._rngs[k].normal(size=6)
            actions[k] = torch.from_numpy(action.clip(-1.0, 1.0))
        return actions

    def _workspace(self, scene: Scene | Simulation) -> Workspace:
        known = self._workspaces.get(id(scene))
        # Python gives the identity of a deleted scene to a new one, so the scene is compared, too.
        if known is None or known.scene is not scene:
            known = self._workspaces[id(scene)] = Workspace(scene)
        return known


def _next_action(space: Workspace, plan: _Plan) -> np.ndarray:
    """The action (7,) of the plan's phase; moves the plan on where the phase is over."""
    if plan.grasp is None:
        _plan_next_goal(space, plan)
    assert plan.grasp is not None
    plan.steps += 1
    look = _Look(
        space, plan.grasp, space.eef(), space.position(plan.item), space.position(plan.place)
    )
    # An item that slipped out of the hand is grasped again in another way.
    if plan.phase in ("lift", "carry", "lower") and not look.held:
        plan.retry()
        return _move(look, look.hand + UP, OPEN)
    return _PHASES[plan.phase](plan, look)


def _plan_next_goal(space: Workspace, plan: _Plan) -> None:
    """Takes the first goal that is not yet reached, and plans a grasp for it."""
    scene = space.scene
    goals = scene.goals()
    if unknown := [goal for goal in goals if goal[0] not in ("on", "in") or len(goal) != 3]:
        raise UserError(
            f"The scripted expert cannot do {scene.task.name}: it knows the goals (On object "
            f"place) and (In object region), not {' '.join(unknown[0])}."
        )
    # Goals are read from contacts, which this computes. The solver's start stays as it was, so
    # that looking changes nothing in the episode.
    warmstart = scene.data.qacc_warmstart.copy()
    mujoco.mj_forward(scene.model, scene.data)
    scene.data.qacc_warmstart[:] = warmstart
    missing = [goal for goal in goals if not scene.reached(goal)] or goals
    _, plan.item, plan.place = missing[0]

    plan.grasp = plan_grasp(space, plan.item, plan.tries)
    hanging = plan.grasp.position[2] - space.points(plan.item)[:, 2].min()
    surface, top = space.surface(plan.place)
    plan.release_height = max(surface, top - 0.05)  # into a box no deeper than the hand may go
    plan.safe_height = max(plan.grasp.position[2] + 0.10, top + hanging + 0.04)
    plan.begin("above")


def _above(plan: _Plan, look: _Look) -> np.ndarray:
    """Goes to a point above the grasp, at a safe height, and turns the hand."""
    target = look.grasp.position
    distance = np.linalg.norm(look.hand[:2] - target[:2])
    waypoint = np.array([*target[:2], plan.safe_height])
    # A low hand that is far away goes straight up first.
    if distance > 0.05 and look.hand[2] < plan.safe_height - 0.05:
        waypoint[:2] = look.hand[:2]
    turned = np.linalg.norm(look.space.rotation_error(look.grasp.yaw)) < 0.05
    if distance < 0.005 and look.space.speed() < 0.03 and turned:
        plan.begin("descend")
    if distance <= 0.03:
        waypoint = np.array([*target[:2], target[2] + 0.06])
    return _move(look, waypoint, OPEN)


def _descend(plan: _Plan, look: _Look) -> np.ndarray:
    """Goes straight down; while it is off to the side, it rises slightly and corrects that."""
    target = look.grasp.position
    if np.linalg.norm(look.hand - target) < 0.008 or plan.steps > 30:
        plan.begin("grasp")
    straight = np.linalg.norm((look.hand - target)[:2]) < 0.01
    height = target[2] if straight else look.hand[2] + 0.01
    return _move(look, np.array([*target[:2], height]), OPEN)


def _grasp(plan: _Plan, look: _Look) -> np.ndarray:
    """Closes the fingers, and then notes where in the hand the item is."""
    if plan.steps > 9:
        look.grasp.offset = look.hand - look.item
        plan.begin("lift")
    return _move(look, look.grasp.position, CLOSE)


def _lift(plan: _Plan, look: _Look) -> np.ndarray:
    if look.hand[2] > plan.safe_height - 0.02 or plan.steps > 40:
        plan.begin("carry")
    return _move(look, np.array([*look.hand[:2], plan.safe_height + 0.02]), CLOSE)


def _carry(plan: _Plan, look: _Look) -> np.ndarray:
    """Moves sideways until the item, and not the hand, is above the place."""
    target = np.array([*look.hand_at_place[:2], plan.safe_height])
    if np.linalg.norm(look.hand[:2] - target[:2]) < 0.012 or plan.steps > 80:
        plan.begin("lower")
    return _move(look, target, CLOSE)


def _lower(plan: _Plan, look: _Look) -> np.ndarray:
    """Goes down until the item's lowest point is just above the surface."""
    target = look.hand_at_place
    lowest = look.space.points(plan.item)[:, 2].min()
    target[2] = plan.release_height + look.hand[2] - lowest + 0.01
    if abs(look.hand[2] - target[2]) < 0.012 or plan.steps > 40:
        plan.begin("release")
    return _move(look, target, CLOSE)


def _release(plan: _Plan, look: _Look) -> np.ndarray:
    if plan.steps > 8:
        plan.begin("retreat")
    return _move(look, look.hand, OPEN)


def _retreat(plan: _Plan, look: _Look) -> np.ndarray:
    """Rises; if the episode goes on all the same, some goal is still missing."""
    if plan.steps > 20:
        plan.retry()
    return _move(look, look.hand + UP, OPEN)


_PHASES: dict[str, Callable[[_Plan, _Look], np.ndarray]] = {
    "above": _above,
    "descend": _descend,
    "grasp": _grasp,
    "lift": _lift,
    "carry": _carry,
    "lower": _lower,
    "release": _release,
    "retreat": _retreat,
}


def _move(look: _Look, target: np.ndarray, gripper: float) -> np.ndarray:
    """The action (7,) of a proportional controller; full speed beyond about 3 cm."""
    rotation = look.space.rotation_error(look.grasp.yaw)
    delta = (target - look.hand) / POSITION_SCALE * 1.6
    largest = np.abs(delta).max()
    return np.concatenate(
        [delta / max(1.0, largest), (rotation / ROTATION_SCALE).clip(-0.5, 0.5), [gripper]]
    )
