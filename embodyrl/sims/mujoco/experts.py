"""Scripted experts: each task is a list of waypoints, which N envs follow at once.

The list starts again when something slips.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.sims.mujoco import kinematics, scene
from embodyrl.sims.mujoco.config import POS_SCALE, ROT_SCALE
from embodyrl.sims.mujoco.tasks import Task, View
from embodyrl.types import EnvSpec

Array = NDArray[np.float64]
_UP = np.array([0.0, 0.0, 0.1])
_FORWARD = np.array([0.1, 0.0, 0.0])


@dataclass(frozen=True)
class Waypoint:
    """Where the hand goes next: ``goal`` (n, 3), closed or open, and what counts as there."""

    goal: Callable[[View], Array]
    closed: bool = False
    tolerance: float = 0.012
    dwell: int = 0
    """Steps to stay once there, e.g. until the fingers have closed."""
    speed: float = 1.0
    keep: Callable[[View], NDArray[np.bool_]] | None = None
    """(n,) what must stay true on the way, e.g. that the block is in the hand.

    Otherwise the list starts again.
    """
    needless: Callable[[View], NDArray[np.bool_]] | None = None
    """(n,) where the waypoint is left out, e.g. because the block is in the hand already."""


def _block(dz: float = 0.0, number: int = 0) -> Callable[[View], Array]:
    """``dz`` above a block; number 0 is the one that the instruction names."""
    return lambda v: v.blocks[:, number] + [0.0, 0.0, dz]


def _behind(back: float, z: float) -> Callable[[View], Array]:
    """A point at height z, ``back`` m behind the block as seen from the zone."""

    def goal(v: View) -> Array:
        away = v.blocks[:, 0] - v.goal
        away[:, 2] = 0.0
        away /= np.maximum(np.sqrt((away**2).sum(-1, keepdims=True)), 1e-6)
        point = v.blocks[:, 0] + back * away
        point[:, 2] = z
        return point

    return goal


def _held(v: View) -> NDArray[np.bool_]:
    """Whether the block is between the fingers."""
    return np.sqrt(((v.blocks[:, 0] - v.ee) ** 2).sum(-1)) < 0.04


def _lifted(v: View) -> NDArray[np.bool_]:
    """Whether the hand holds the block above the table."""
    high = v.blocks[:, 0, 2] - scene.BLOCK_HALF > 0.015
    return _held(v) & high & (v.opening < 2 * scene.BLOCK_HALF + 0.006)


def _in_line(v: View) -> NDArray[np.bool_]:
    """Whether the hand is close behind the block on the line to the zone."""
    ahead = v.blocks[:, 0, :2] - v.ee[:, :2]
    way = v.goal[:, :2] - v.blocks[:, 0, :2]
    along = way / np.maximum(np.sqrt((way**2).sum(-1, keepdims=True)), 1e-6)
    aside = np.abs(ahead[:, 0] * along[:, 1] - ahead[:, 1] * along[:, 0])
    return (aside < 0.03) & ((ahead * along).sum(-1) > 0.0)


def _over_goal(dz: float) -> Callable[[View], Array]:
    """Where the hand must be for the held block to lie ``dz`` above the goal on the table."""
    rest = np.array([0.0, 0.0, scene.BLOCK_HALF + dz])
    return lambda v: v.ee + v.goal * [1, 1, 0] + rest - v.blocks[:, 0]


def _over_second(dz: float) -> Callable[[View], Array]:
    """Where the hand must be for the held block to be ``dz`` above the second one."""
    return lambda v: v.ee + v.blocks[:, 1] + [0.0, 0.0, dz] - v.blocks[:, 0]


_GRASP = (
    Waypoint(_block(0.07), tolerance=0.025, needless=_lifted),
    Waypoint(_block(0.0), tolerance=0.010, needless=_lifted),
    Waypoint(_block(0.0), closed=True, tolerance=0.05, dwell=4, needless=_lifted),
)
PROGRAMS: dict[str, Sequence[Waypoint]] = {
    "reach": (Waypoint(lambda v: v.goal, tolerance=0.0),),
    "pick": (
        Waypoint(_block(0.07), tolerance=0.025),
        Waypoint(_block(0.0), tolerance=0.010),
        Waypoint(_block(0.0), closed=True, tolerance=0.05, dwell=4),
        Waypoint(lambda v: v.ee + _UP, closed=True, tolerance=0.0, keep=_held),
    ),
    "push": (
        Waypoint(_behind(0.075, 0.09), closed=True, tolerance=0.03),
        Waypoint(_behind(0.060, 0.025), closed=True, tolerance=0.015),
        Waypoint(_behind(-0.06, 0.025), closed=True, tolerance=0.0, speed=0.5, keep=_in_line),
    ),
    "stack": (
        Waypoint(_block(0.07), tolerance=0.025),
        Waypoint(_block(0.0), tolerance=0.010),
        Waypoint(_block(0.0), closed=True, tolerance=0.05, dwell=4),
        Waypoint(
            lambda v: v.blocks[:, 0] * [1, 1, 0] + [0, 0, 0.13],
            closed=True,
            tolerance=0.03,
            keep=_held,
        ),
        Waypoint(
            _over_second(2 * scene.BLOCK_HALF + 0.04), closed=True, tolerance=0.01, keep=_held
        ),
        Waypoint(
            _over_second(2 * scene.BLOCK_HALF + 0.002), closed=True, tolerance=0.008, keep=_held
        ),
        Waypoint(lambda v: v.ee, tolerance=0.05, dwell=3),
        Waypoint(lambda v: v.ee + _UP, tolerance=0.0),
    ),
    "open_drawer": (
        Waypoint(lambda v: v.handle + _UP, tolerance=0.025),
        Waypoint(lambda v: v.handle + 0.1 * _UP, tolerance=0.015),
        Waypoint(lambda v: v.handle + 0.1 * _UP, closed=True, tolerance=0.05, dwell=4),
        Waypoint(lambda v: v.ee - _FORWARD, closed=True, tolerance=0.0, speed=0.7),
    ),
    "put_back": (
        *_GRASP,
        Waypoint(_over_goal(0.07), closed=True, tolerance=0.025, keep=_held),
        Waypoint(_over_goal(0.002), closed=True, tolerance=0.012, keep=_held),
        Waypoint(lambda v: v.ee, tolerance=0.05, dwell=3),
        Waypoint(lambda v: v.ee + _UP, tolerance=0.0),
    ),
}


class ReadableEnv(Protocol):
    """What the expert reads of a ``MujocoEnv``, which describes these attributes."""

    spec: EnvSpec
    tasks: list[Task]
    device: torch.device

    @property
    def task_ids(self) -> NDArray[np.int64]: ...  # noqa: D102
    @property
    def commanded(self) -> Array: ...  # noqa: D102
    @property
    def commanded_rotation(self) -> Array: ...  # noqa: D102
    def view(self, rows: NDArray[np.int64] | None = None) -> View: ...  # noqa: D102


class ScriptedExpert:
    """Demonstrates every task of a ``MujocoEnv``, one control step at a time.

    Example: ``expert.reset(ids)`` after ``env.reset(ids)``, then
    ``env.step(expert.act()[:, None])``.
    """

    def __init__(self, env: ReadableEnv, noise: float = 0.0, seed: int = 0) -> None:
        """Follows ``env``.

        Args:
            env: the env to demonstrate in; its simulator state is read.
            noise: standard deviation of Gaussian noise on the motion (not on the gripper), in units
                of the action. Noisy demonstrations hold recoveries and, at large values, failures.
            seed: of that noise; env k draws from its own stream.
        """
        self._env = env
        self._noise = noise
        self._rngs = [np.random.default_rng((seed, k)) for k in range(env.spec.num_envs)]
        self._phase = np.zeros(env.spec.num_envs, dtype=np.int64)
        self._dwell = np.zeros(env.spec.num_envs, dtype=np.int64)

    def reset(self, env_ids: Tensor | Sequence[int] | None = None) -> None:
        """Starts the programs of these envs (indices or mask; None: all) from the beginning."""
        rows = slice(None) if env_ids is None else torch.as_tensor(env_ids).numpy()
        self._phase[rows] = 0
        self._dwell[rows] = 0

    def act(self) -> Tensor:
        """The next action of every env, (N, A) float32 in [-1, 1]."""
        env = self._env
        action = np.zeros((env.spec.num_envs, env.spec.action_dim))
        for number, task in enumerate(env.tasks):
            rows = (env.task_ids == number).nonzero()[0]
            if len(rows):
                self._follow(PROGRAMS[task.name], rows, action)
        if self._noise:
            motion = env.spec.action_dim - 1
            action[:, :motion] += self._noise * np.stack(
                [rng.standard_normal(motion) for rng in self._rngs]
            )
        return torch.as_tensor(np.clip(action, -1, 1), dtype=torch.float32, device=env.device)

    def _follow(self, program: Sequence[Waypoint], rows: NDArray[np.int64], action: Array) -> None:
        """Writes the actions of ``rows``, whose envs all follow the same program."""
        view = self._env.view(rows)
        commanded = self._env.commanded[rows]
        goals = np.stack([waypoint.goal(view) for waypoint in program])
        closed, dwell, speed, tolerance = (
            np.array([getattr(waypoint, name) for waypoint in program])
            for name in ("closed", "dwell", "speed", "tolerance")
        )
        # Where the condition of the current waypoint is broken, start again.
        every = np.arange(len(rows))
        for number, waypoint in enumerate(program):
            if waypoint.keep is not None:
                slipped = rows[(self._phase[rows] == number) & ~waypoint.keep(view)]
                self._phase[slipped] = self._dwell[slipped] = 0
        # What is needless is left out, waypoint by waypoint.
        for number, waypoint in enumerate(program):
            if waypoint.needless is not None:
                done = rows[(self._phase[rows] == number) & waypoint.needless(view)]
                self._phase[done] += 1
                self._dwell[done] = 0
        # Who is at the waypoint, and has stayed long enough, goes on to the next.
        phase = self._phase[rows]
        there = np.sqrt(((goals[phase, every] - view.ee) ** 2).sum(-1)) < tolerance[phase]
        self._dwell[rows] = np.where(there, self._dwell[rows] + 1, 0)
        done = self._dwell[rows] > dwell[phase]
        self._phase[rows] = phase = np.minimum(phase + done, len(program) - 1)
        self._dwell[rows[done]] = 0
        # Towards the waypoint. The motion is scaled as a whole and not clipped axis by axis, so
        # that the hand moves in a straight line.
        error = goals[phase, every] - commanded
        largest = np.maximum(np.abs(error).max(axis=-1), 1e-9) / POS_SCALE
        action[rows, :3] = error / POS_SCALE * np.minimum(1.0, speed[phase] / largest)[:, None]
        # With rotation control, keep pointing down.
        if action.shape[1] == 7:
            down = np.broadcast_to(kinematics.DOWN, (len(rows), 3, 3))
            turn = kinematics.rotation_error(down, self._env.commanded_rotation[rows])
            action[rows, 3:6] = np.clip(turn / ROT_SCALE, -1, 1)
        action[rows, -1] = np.where(closed[phase], -1.0, 1.0)
