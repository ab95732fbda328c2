"""Scripted experts: each task is a list of waypoints for the tool.

The list begins again when the object slips out of the fingers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.env import env_index
from embodyrl.errors import UserError, did_you_mean
from embodyrl.sims.maniskill.engine import Engine
from embodyrl.sims.maniskill.scenes import TaskScenes
from embodyrl.types import EnvSpec

Array = NDArray[np.float32]
_UP = np.array([0.0, 0.0, 0.05], np.float32)
REACH = 0.1  # metres that a full action of pd_ee_delta_pos asks for


@dataclass(frozen=True)
class View:
    """Positions (n, 3) in metres: the tool, the object to move, and where it belongs."""

    tool: Array
    thing: Array
    goal: Array


@dataclass(frozen=True)
class Waypoint:
    """Where the tool goes next.

    Attributes:
        target: gives the point from the positions now.
        closed: whether the fingers are closed.
        tolerance: metres from the point within which it is reached; 0, for the last waypoint,
            never is.
        dwell: control steps to stay, e.g. until the fingers have closed.
        speed: largest part of a full action.
        holding: whether the object must be between the fingers; if it is not, the list starts
            again.
    """

    target: Callable[[View], Array]
    closed: bool = False
    tolerance: float = 0.0
    dwell: int = 0
    speed: float = 1.0
    holding: bool = False


@dataclass(frozen=True)
class Program:
    """How a task is done.

    Attributes:
        thing: the attribute of ManiSkill's env that holds the object.
        goal: the attribute that holds the goal.
        waypoints: where the tool goes, in order.
    """

    thing: str
    goal: str
    waypoints: Sequence[Waypoint]


def _at_thing(x: float = 0.0, z: float = 0.0) -> Callable[[View], Array]:
    return lambda v: v.thing + np.array([x, 0.0, z], np.float32)


def _on_table(x: float, z: float) -> Callable[[View], Array]:
    """A point beside the object, at height z over the table."""
    return lambda v: v.thing * [1, 1, 0] + [x, 0.0, z]


def _carry(x: float = 0.0, z: float = 0.0) -> Callable[[View], Array]:
    """Where the tool must be for the object in it to be at the goal, plus (x, 0, z)."""
    return lambda v: v.tool + v.goal - v.thing + [x, 0.0, z]


def _grasp(above: float) -> tuple[Waypoint, ...]:
    """Over the object, down to it, close the fingers."""
    return (
        Waypoint(_at_thing(z=above), tolerance=0.025),
        Waypoint(_at_thing(), tolerance=0.01),
        Waypoint(_at_thing(), closed=True, tolerance=0.05, dwell=2),
    )


def _slide(x_start: float, x_end: float) -> tuple[Waypoint, ...]:
    """Push or pull along the x axis with closed fingers, starting beside the object."""
    return (
        Waypoint(_on_table(x_start, 0.10), closed=True, tolerance=0.03),
        Waypoint(_on_table(x_start, 0.02), closed=True, tolerance=0.02),
        Waypoint(lambda v: v.goal * [1, 1, 0] + [x_end, 0.0, 0.02], closed=True, speed=0.5),
    )


def _put_down(above: float, rest: float) -> tuple[Waypoint, ...]:
    """Lift the held object to height ``above``, lower it to ``rest`` over the goal, open, leave."""
    return (
        Waypoint(
            lambda v: v.thing * [1, 1, 0] + [0.0, 0.0, above],
            closed=True,
            tolerance=0.03,
            holding=True,
        ),
        Waypoint(_carry(z=rest + 0.03), closed=True, tolerance=0.008, holding=True),
        Waypoint(_carry(z=rest), closed=True, tolerance=0.004, dwell=1, holding=True),
        Waypoint(lambda v: v.tool, tolerance=0.05, dwell=2),
        Waypoint(lambda v: v.tool + _UP, speed=0.5),
    )


PROGRAMS = {
    "PickCube-v1": Program(
        "cube", "goal_site", (*_grasp(0.07), Waypoint(_carry(), closed=True, holding=True))
    ),
    "PushCube-v1": Program("obj", "goal_region", _slide(-0.08, 0.0)),
    "PullCube-v1": Program("obj", "goal_region", _slide(0.06, 0.0)),
    "StackCube-v1": Program("cubeA", "cubeB", (*_grasp(0.07), *_put_down(0.12, 0.04))),
    "PlaceSphere-v1": Program("obj", "bin", (*_grasp(0.07), *_put_down(0.10, 0.026))),
}


class ReadableEnv(Protocol):
    """What the expert reads of a ``ManiSkillEnv``."""

    spec: EnvSpec
    scenes: TaskScenes
    device: torch.device


class ScriptedExpert:
    """Demonstrates the tasks, one control step at a time, in the process that simulates them.

    Args:
        env: the env whose simulator state is read; its control mode must be ``pd_ee_delta_pos``.
        noise: standard deviation of Gaussian noise on the motion (not on the gripper), in units of
            the action. Noisy demonstrations hold recoveries and, at large values, failures.
        seed: of that noise; env k draws from seed + k.

    Raises:
        UserError: there is no expert for a task or the control mode.
    """

    def __init__(self, env: ReadableEnv, noise: float = 0.0, seed: int = 0) -> None:
        for task in env.spec.tasks:
            if task not in PROGRAMS:
                raise UserError(
                    f"There is no scripted expert for {task}. {did_you_mean(task, PROGRAMS)}"
                )
        if env.spec.control_mode != "pd_ee_delta_pos" or env.spec.action_dim != 4:
            raise UserError(
                "The scripted experts act in pd_ee_delta_pos with one arm, not in "
                f"{env.spec.control_mode}."
            )
        self.env = env
        self.programs = [PROGRAMS[task] for task in env.spec.tasks]
        self.noise = noise
        self._rngs = [np.random.default_rng(seed + k) for k in range(env.spec.num_envs)]
        self._phase = np.zeros(env.spec.num_envs, dtype=np.int64)
        self._dwell = np.zeros(env.spec.num_envs, dtype=np.int64)

    def reset(self, env_ids: Tensor | Sequence[int] | None = None) -> None:
        """Starts the program of these envs (None: all) again; call it after their reset."""
        ids = env_index(env_ids, self.env.spec.num_envs)
        self._phase[ids] = self._dwell[ids] = 0

    def act(self) -> Tensor:
        """The next action of every env, (N, 4) float32 in [-1, 1]; zero before a first reset."""
        n = self.env.spec.num_envs
        motion = np.zeros((n, 3), np.float32)
        gripper = np.zeros((n, 1), np.float32)
        scenes = self.env.scenes
        for task, program in enumerate(self.programs):
            envs, places = scenes.members(task)
            if len(envs):
                motion[envs], gripper[envs, 0] = self._follow(
                    program, envs, _look(scenes.engines[task], program, places)
                )
        if self.noise:
            motion = motion + self.noise * np.stack([rng.standard_normal(3) for rng in self._rngs])
        action = np.concatenate([motion, gripper], axis=1).clip(-1.0, 1.0)
        return torch.from_numpy(action.astype(np.float32)).to(self.env.device)

    def _follow(self, program: Program, envs: NDArray[np.int64], view: View) -> tuple[Array, Array]:
        """Motion (n, 3) and gripper (n,) of the n ``envs``, which are in one task."""
        closed, tolerance, dwell_for, speed, holding = (
            np.array([getattr(point, key) for point in program.waypoints])
            for key in ("closed", "tolerance", "dwell", "speed", "holding")
        )
        phase = self._phase[envs]
        dwell = self._dwell[envs]
        # An object that is no longer between the fingers: start again.
        slipped = holding[phase] & (np.linalg.norm(view.thing - view.tool, axis=1) > 0.04)
        phase[slipped] = dwell[slipped] = 0
        # An env that is at its waypoint, and has stayed long enough, goes on to the next.
        every = np.arange(len(envs))
        targets = np.stack([point.target(view) for point in program.waypoints])
        there = np.linalg.norm(targets[phase, every] - view.tool, axis=1) < tolerance[phase]
        dwell = np.where(there, dwell + 1, 0)
        done = (dwell > dwell_for[phase]) & (phase < len(targets) - 1)
        phase += done
        dwell[done] = 0
        self._phase[envs] = phase
        self._dwell[envs] = dwell
        # Towards the waypoint. The motion is scaled as a whole and not clipped axis by axis, so
        # that the tool moves in a straight line.
        motion = (targets[phase, every] - view.tool) / REACH
        largest = np.maximum(np.abs(motion).max(axis=1), 1e-9)
        motion *= np.minimum(1.0, speed[phase] / largest)[:, None]
        return motion, np.where(closed[phase], -1.0, 1.0)


def _look(engine: Engine, program: Program, places: NDArray[np.int64]) -> View:
    """What the program reads of the scenes at ``places``."""
    return View(
        engine.tool()[places],
        engine.position(program.thing)[places],
        engine.position(program.goal)[places],
    )
