"""Scripted experts: each task is a list of waypoints for the tool.

The list begins again when the object slips out of the fingers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.env import env_index
from embodyrl.errors import UserError, did_you_mean
from embodyrl.functional.rotations import quaternion_matrices, rotation_vectors
from embodyrl.sims.maniskill.engine import Engine
from embodyrl.sims.maniskill.scenes import TaskScenes
from embodyrl.types import EnvSpec

Array = NDArray[np.floating[Any]]
_UP = np.array([0.0, 0.0, 0.05], np.float32)
REACH = np.array([0.1, 0.1, 0.1, -0.1, -0.1, -0.1])
"""Metres, and radians about the base's axes, that a full action asks for: ManiSkill's
``pd_ee_delta_pose`` multiplies turns with its lower bound."""
DOWN = np.array([0.0, 0.0, -1.0])
ON_AXIS = 0.003  # metres beside the axis of a hole from which a peg goes in
SLIPPED = 0.04  # metres from the fingers at which an object is no longer held


@dataclass(frozen=True)
class View:
    """Positions (n, 3) in metres: the tool, the object to move, and where it belongs.

    Attributes:
        tool_axes: (n, 3, 3), the tool's axes as columns: fingers close along the second, and reach
            along the third.
        thing_axes: of the object.
        goal_axes: of the object where it belongs.
    """

    tool: Array
    thing: Array
    goal: Array
    tool_axes: Array
    thing_axes: Array
    goal_axes: Array


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
        turn: gives the turn (n, 3) that the tool must still make, as rotation vectors in radians.
        turn_tolerance: radians within which that is made.
    """

    target: Callable[[View], Array]
    closed: bool = False
    tolerance: float = 0.0
    dwell: int = 0
    speed: float = 1.0
    holding: bool = False
    turn: Callable[[View], Array] | None = None
    turn_tolerance: float = 0.03


@dataclass(frozen=True)
class Program:
    """How a task is done.

    Attributes:
        thing: the attribute of ManiSkill's env that holds the object.
        goal: the attribute that holds the goal.
        waypoints: where the tool goes, in order.
        held_at: the point of the object that is between the fingers.
        control_mode: of the actions; ``pd_ee_delta_pose`` turns the tool.
    """

    thing: str
    goal: str
    waypoints: Sequence[Waypoint]
    held_at: Callable[[View], Array] = lambda v: v.thing
    control_mode: str = "pd_ee_delta_pos"


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


def _tail(v: View) -> Array:
    """The point of a peg where it is held, 7 cm behind its middle."""
    return v.thing - 0.07 * v.thing_axes[:, :, 0]


def _across(v: View) -> Array:
    """The turn after which the tool points down and the fingers close across the peg."""
    # Either end of the peg may be left: the nearer turn.
    along = v.thing_axes[:, :, 0] * [1, 1, 0]
    along /= np.maximum(np.linalg.norm(along, axis=1, keepdims=True), 1e-9)
    side = np.where((along * v.tool_axes[:, :, 0]).sum(1, keepdims=True) < 0, -1.0, 1.0)
    along = along * side
    down = np.broadcast_to(DOWN, along.shape)
    wanted = np.stack([along, np.cross(down, along), down], axis=2)
    return rotation_vectors(wanted @ v.tool_axes.swapaxes(1, 2))


def _align(v: View) -> Array:
    """The turn after which the held object lies as it does at the goal."""
    return rotation_vectors(v.goal_axes @ v.thing_axes.swapaxes(1, 2))


def _before_goal(v: View, distance: Array | float) -> Array:
    """Where the tool must be for the held object to be aligned, and that far before the goal."""
    turn = v.goal_axes @ v.thing_axes.swapaxes(1, 2)
    arm = (turn @ (v.tool - v.thing)[:, :, None])[:, :, 0]
    return v.goal - distance * v.goal_axes[:, :, 0] + arm


def _further_in(v: View) -> Array:
    """The same 2 cm further along the hole, where the object is on its axis; else where it is."""
    behind = (v.goal_axes.swapaxes(1, 2) @ (v.goal - v.thing)[:, :, None])[:, :, 0]
    on_axis = np.linalg.norm(behind[:, 1:], axis=1) < ON_AXIS
    distance = np.maximum(behind[:, 0] - np.where(on_axis, 0.02, 0.0), -0.03)
    # The arm hangs under what it holds: towards the axis it is asked for more than is missing.
    beside = (v.goal_axes[:, :, 1:] @ behind[:, 1:, None])[:, :, 0]
    return _before_goal(v, distance[:, None]) + 2.0 * beside


_INSERT_PEG = (
    Waypoint(lambda v: _tail(v) + 2 * _UP, tolerance=0.02, turn=_across),
    Waypoint(_tail, tolerance=0.006, turn=_across),
    Waypoint(_tail, closed=True, tolerance=0.05, dwell=2),
    Waypoint(
        lambda v: _before_goal(v, 0.15),
        closed=True,
        tolerance=0.01,
        dwell=1,
        holding=True,
        turn=_align,
    ),
    Waypoint(_further_in, closed=True, holding=True, turn=_align),
)

PROGRAMS = {
    "PickCube-v1": Program(
        "cube", "goal_site", (*_grasp(0.07), Waypoint(_carry(), closed=True, holding=True))
    ),
    "PushCube-v1": Program("obj", "goal_region", _slide(-0.08, 0.0)),
    "PullCube-v1": Program("obj", "goal_region", _slide(0.06, 0.0)),
    "StackCube-v1": Program("cubeA", "cubeB", (*_grasp(0.07), *_put_down(0.12, 0.04))),
    "PlaceSphere-v1": Program("obj", "bin", (*_grasp(0.07), *_put_down(0.10, 0.026))),
    "PegInsertionSide-v1": Program(
        "peg", "goal_pose", _INSERT_PEG, held_at=_tail, control_mode="pd_ee_delta_pose"
    ),
}


class ReadableEnv(Protocol):
    """What the expert reads of a ``ManiSkillEnv``."""

    spec: EnvSpec
    scenes: TaskScenes
    device: torch.device


class ScriptedExpert:
    """Demonstrates the tasks, one control step at a time, in the process that simulates them.

    Args:
        env: the env whose simulator state is read; its control mode must be the program's.
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
        # A gripper, and three or six numbers that move the tool. All tasks of an env have one mode.
        task, self._moves = env.spec.tasks[0], env.spec.action_dim - 1
        mode = PROGRAMS[task].control_mode
        if env.spec.control_mode != mode or self._moves != (3 if mode.endswith("pos") else 6):
            raise UserError(
                f"The scripted expert of {task} acts in {mode} with one arm, not in "
                f"{env.spec.control_mode}. Set env.control_mode={mode}."
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
        """The next action of every env, in [-1, 1]; zero before a first reset.

        (N, 4) float32, or (N, 7) where the tool turns.
        """
        n = self.env.spec.num_envs
        motion = np.zeros((n, self._moves))
        gripper = np.zeros((n, 1))
        scenes = self.env.scenes
        for task, program in enumerate(self.programs):
            envs, places = scenes.members(task)
            if len(envs):
                view = _look(scenes.engines[task], program, places)
                motion[envs], gripper[envs, 0] = self._follow(program, envs, view)
        if self.noise:
            drawn = [rng.standard_normal(self._moves) for rng in self._rngs]
            motion = motion + self.noise * np.stack(drawn)
        action = np.concatenate([motion, gripper], axis=1).clip(-1.0, 1.0)
        return torch.from_numpy(action.astype(np.float32)).to(self.env.device)

    def _follow(self, program: Program, envs: NDArray[np.int64], view: View) -> tuple[Array, Array]:
        """Motion (n, 3 or 6) and gripper (n,) of the n ``envs``, which are in one task."""
        points = program.waypoints
        closed, tolerance, turn_tolerance, dwell_for, speed, holding = (
            np.array([getattr(point, key) for point in points])
            for key in ("closed", "tolerance", "turn_tolerance", "dwell", "speed", "holding")
        )
        phase = self._phase[envs]
        dwell = self._dwell[envs]
        # An object that is no longer between the fingers: start again.
        away = np.linalg.norm(program.held_at(view) - view.tool, axis=1)
        slipped = holding[phase] & (away > SLIPPED)
        phase[slipped] = dwell[slipped] = 0
        # An env that is at its waypoint, and has stayed long enough, goes on to the next.
        every = np.arange(len(envs))
        motions = np.stack([point.target(view) - view.tool for point in points])
        turns = np.stack([point.turn(view) if point.turn else 0 * view.tool for point in points])
        there = np.linalg.norm(motions[phase, every], axis=1) < tolerance[phase]
        there &= np.linalg.norm(turns[phase, every], axis=1) < turn_tolerance[phase]
        dwell = np.where(there, dwell + 1, 0)
        done = (dwell > dwell_for[phase]) & (phase < len(points) - 1)
        phase += done
        dwell[done] = 0
        self._phase[envs] = phase
        self._dwell[envs] = dwell
        # Towards the waypoint. The motion is scaled as a whole and not clipped axis by axis, so
        # that the tool moves in a straight line.
        both = np.concatenate([motions, turns], axis=2)[phase, every]
        motion = (both / REACH)[:, : self._moves]
        largest = np.maximum(np.abs(motion).max(axis=1), 1e-9)
        motion *= np.minimum(1.0, speed[phase] / largest)[:, None]
        return motion, np.where(closed[phase], -1.0, 1.0)


def _look(engine: Engine, program: Program, places: NDArray[np.int64]) -> View:
    """What the program reads of the scenes at ``places``."""
    poses = [engine.tool(), engine.pose(program.thing), engine.pose(program.goal)]
    poses = [pose[places] for pose in poses]
    positions = [pose[:, :3] for pose in poses]
    return View(*positions, *(quaternion_matrices(pose[:, 3:]) for pose in poses))
