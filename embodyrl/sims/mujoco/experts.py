"""Scripted experts: each task is a list of waypoints, followed by N envs at once and restarted when something slips."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.sims.mujoco import kinematics, scene
from embodyrl.sims.mujoco.env import POS_SCALE, ROT_SCALE, MujocoEnv
from embodyrl.sims.mujoco.tasks import View

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
    """(n,) what must stay true on the way, e.g. that the block is in the hand; otherwise the list starts again."""


def _block(dz: float = 0.0, number: int = 0) -> Callable[[View], Array]:
    return lambda v: v.blocks[:, number] + [0.0, 0.0, dz]


def _behind(back: float, z: float) -> Callable[[View], Array]:
    """A point at height z behind the block, seen from the zone."""

    def goal(v: View) -> Array:
        away = v.blocks[:, 0] - v.goal
        away[:, 2] = 0.0
        away /= np.maximum(np.sqrt((away**2).sum(-1, keepdims=True)), 1e-6)
        point = v.blocks[:, 0] + back * away
        point[:, 2] = z
        return point

    return goal


def _held(v: View) -> NDArray[np.bool_]:
    return np.sqrt(((v.blocks[:, 0] - v.ee) ** 2).sum(-1)) < 0.04


def _in_line(v: View) -> NDArray[np.bool_]:
    """Whether the hand is close behind the block on the line to the zone."""
    ahead = v.blocks[:, 0, :2] - v.ee[:, :2]
    way = v.goal[:, :2] - v.blocks[:, 0, :2]
    along = way / np.maximum(np.sqrt((way**2).sum(-1, keepdims=True)), 1e-6)
    aside = np.abs(ahead[:, 0] * along[:, 1] - ahead[:, 1] * along[:, 0])
    return (aside < 0.03) & ((ahead * along).sum(-1) > 0.0)


def _over_second(dz: float) -> Callable[[View], Array]:
    """Where the hand must be for the held block to be over the second one: the grasp's own offset is kept."""
    return lambda v: v.ee + v.blocks[:, 1] + [0.0, 0.0, dz] - v.blocks[:, 0]


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
}


class ScriptedExpert:
    """Demonstrates every task of a ``MujocoEnv``, one control step at a time.

    Example: ``expert.reset(ids)`` after ``env.reset(ids)``, then
    ``env.step(expert.act()[:, None])``.
    """

    def __init__(self, env: MujocoEnv, noise: float = 0.0, seed: int = 0) -> None:
        """Follows ``env``.

        Args:
            env: the env to demonstrate in; its simulator state is read.
            noise: standard deviation of Gaussian noise on the motion (the gripper's command stays
                clean), in units of the action; noisy demonstrations hold recoveries and, at large
                values, failures.
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
        view = self._env.view(rows)
        commanded = self._env.commanded[rows]
        goals = np.stack([waypoint.goal(view) for waypoint in program])
        closed, dwell, speed, tolerance = (
            np.array([getattr(waypoint, name) for waypoint in program])
            for name in ("closed", "dwell", "speed", "tolerance")
        )
        every = np.arange(len(rows))
        for number, waypoint in enumerate(program):
            if waypoint.keep is not None:
                slipped = rows[(self._phase[rows] == number) & ~waypoint.keep(view)]
                self._phase[slipped] = self._dwell[slipped] = 0
        phase = self._phase[rows]
        there = np.sqrt(((goals[phase, every] - view.ee) ** 2).sum(-1)) < tolerance[phase]
        self._dwell[rows] = np.where(there, self._dwell[rows] + 1, 0)
        done = self._dwell[rows] > dwell[phase]
        self._phase[rows] = phase = np.minimum(phase + done, len(program) - 1)
        self._dwell[rows[done]] = 0
        error = goals[phase, every] - commanded
        # Scaled as a whole, not clipped axis by axis: the hand moves in a straight line.
        largest = np.maximum(np.abs(error).max(axis=-1), 1e-9) / POS_SCALE
        action[rows, :3] = error / POS_SCALE * np.minimum(1.0, speed[phase] / largest)[:, None]
        if action.shape[1] == 7:
            down = np.broadcast_to(kinematics.DOWN, (len(rows), 3, 3))
            turn = kinematics.rotation_error(down, self._env.commanded_rotation[rows])
            action[rows, 3:6] = np.clip(turn / ROT_SCALE, -1, 1)
        action[rows, -1] = np.where(closed[phase], -1.0, 1.0)
