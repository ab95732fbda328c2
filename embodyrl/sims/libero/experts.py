"""A scripted expert for LIBERO's goals: it plans which skill is next, and tries until it is done.

It reads the simulation. At every control step it looks where gripper and objects are, and moves
towards the target of the present phase. ``skills`` has a file for each kind of skill.
"""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's module is native and its wheel describes it only in part to a type checker.
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodyrl.env import env_index
from embodyrl.errors import UserError
from embodyrl.sims.libero.skills.joints import plan_joint
from embodyrl.sims.libero.skills.pick_place import plan_pick_place
from embodyrl.sims.libero.skills.plan import Attempt, Skill
from embodyrl.sims.libero.skills.push import is_pushed, plan_push
from embodyrl.sims.libero.skills.workspace import Workspace
from embodyrl.types import EnvSpec

if TYPE_CHECKING:
    from embodyrl.sims.libero.native import Simulation
    from embodyrl.sims.libero.scene import Scene

ORDER = ("open", "turnon", "turnoff", "push", "place", "close")
"""Kinds of skills, in the order in which a plan does them."""
_PLANNERS: dict[str, Callable[[Workspace, Skill, int], Attempt]] = {
    "open": plan_joint,
    "close": plan_joint,
    "turnon": plan_joint,
    "turnoff": plan_joint,
    "push": plan_push,
    "place": plan_pick_place,
}
OPEN_ENOUGH = 0.7  # of the opening that counts as open: then something can be put in


class ReadableEnv(Protocol):
    """What the expert reads of a ``LiberoEnv``."""

    spec: EnvSpec
    _running: Tensor

    def scene(self, k: int) -> Scene | Simulation:
        """The scene of env k in the state of its episode."""
        ...


class ScriptedExpert:
    """Solves tasks whose goals are ``On``, ``In``, ``Open``, ``Close``, ``Turnon``, ``Turnoff``.

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
        self._attempts: list[Attempt | None] = [None] * env.spec.num_envs
        self._tries: list[dict[Skill, int]] = [{} for _ in range(env.spec.num_envs)]
        self._workspaces: dict[int, Workspace] = {}  # by the identity of the scene

    def reset(self, env_ids: Tensor | Sequence[int] | None = None) -> None:
        """Begins anew in those envs; call it after their reset."""
        for k in env_index(env_ids, self.env.spec.num_envs):
            self._attempts[k] = None
            self._tries[k] = {}

    def act(self) -> Tensor:
        """The next actions (N, 7) float32, zero in envs that have ended."""
        actions = torch.zeros(self.env.spec.num_envs, 7)
        for k in self.env._running.nonzero().flatten().tolist():
            scene = self.env.scene(k)
            mujoco.mj_kinematics(scene.model, scene.data)
            action = self._attempt(k, self._workspace(scene)).next_action(self._workspace(scene))
            action[:6] += self.noise * self._rngs[k].normal(size=6)
            actions[k] = torch.from_numpy(action.clip(-1.0, 1.0))
        return actions

    def _attempt(self, k: int, space: Workspace) -> Attempt:
        """What env k's arm is doing; when that is over, the plan's next skill."""
        attempt = self._attempts[k]
        if attempt is None or attempt.over:
            skill = next_skill(space)
            tries = self._tries[k].get(skill, 0)
            self._tries[k][skill] = tries + 1
            attempt = self._attempts[k] = _PLANNERS[skill.kind](space, skill, tries)
        return attempt

    def _workspace(self, scene: Scene | Simulation) -> Workspace:
        known = self._workspaces.get(id(scene))
        # Python gives the identity of a deleted scene to a new one, so the scene is compared, too.
        if known is None or known.scene is not scene:
            known = self._workspaces[id(scene)] = Workspace(scene)
        return known


def next_skill(space: Workspace) -> Skill:
    """The first skill, by ``ORDER``, that a goal needs which is not yet reached.

    Where all are reached, it is one of the last goal's, so that the arm goes on until the env ends
    the episode.

    Raises:
        UserError: a goal that no skill reaches.
    """
    scene = space.scene
    goals = scene.goals()
    if unknown := [goal for goal in goals if goal[0] not in (*_PLANNERS, "on", "in")]:
        raise UserError(
            f"The scripted expert cannot do {scene.task.name}: it has no skill for the goal "
            f"({' '.join(unknown[0])}). Demonstrate another task, or record your own episodes."
        )
    # Goals are read from contacts, which this computes. The solver's start stays as it was, so
    # that looking changes nothing in the episode.
    warmstart = scene.data.qacc_warmstart.copy()
    mujoco.mj_forward(scene.model, scene.data)
    scene.data.qacc_warmstart[:] = warmstart
    missing = [goal for goal in goals if not scene.reached(goal)] or goals
    return min((_skill_for(space, goal) for goal in missing), key=lambda s: ORDER.index(s.kind))


def _skill_for(space: Workspace, goal: tuple[str, ...]) -> Skill:
    """What to do for a goal first: a drawer is opened before something is put in."""
    predicate, item, *place = goal
    if predicate not in ("on", "in"):
        return Skill(predicate, item)
    if predicate == "in" and not _is_open(space, place[0]):
        return Skill("open", place[0])
    return Skill("push" if is_pushed(space, item, place[0]) else "place", item, place[0])


def _is_open(space: Workspace, region: str) -> bool:
    """Whether something can be put into a region; what has no drawer or door always is."""
    joints, limits = space.scene.articulation(region)
    if not joints or "open" not in limits:
        return True
    direction, threshold = limits["open"]
    wanted = OPEN_ENOUGH * direction * threshold
    return all(direction * joint.position > wanted for joint in space.joints(region))
