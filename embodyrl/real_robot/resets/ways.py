"""What moves the arm in a reset: a script, or a policy whose task undoes the one of the episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.step_driver import StepDriver
from embodyrl.real_robot.resets.waypoints import Script, Waypoint

Look = Callable[[], dict[str, Any]]
"""What the policy sees now (``Robot.observe``)."""
Actions = Iterator[NDArray[np.float32]]
SPEED = 0.5
"""Largest part of an action with which a script moves the hand along one axis."""
NEAR = 0.01
"""m from a waypoint at which the commanded hand counts as there."""
SETTLED = 0.02
"""m from it at which the measured hand does."""


class Way(Protocol):
    """A way to bring the scene back."""

    name: str
    """For the log."""
    undoes: bool
    """Whether it plays the task that undoes the one of the episodes."""
    lets_go: bool
    """Whether the hand goes home with open fingers; else with those that the way leaves behind."""

    def __call__(self, driver: StepDriver, look: Look, number: int) -> Actions:
        """Yields actions (A,) until it has done what it can.

        Args:
            driver: of the arm, at rest; it takes each action before the next one is asked for.
            look: what the policy sees.
            number: of the reset.
        """
        ...


class HandOnly:
    """Leaves the scene as it is: only the hand goes home."""

    name = "home"
    undoes = False
    lets_go = True

    def __call__(self, driver: StepDriver, look: Look, number: int) -> Actions:
        """See ``Way``."""
        return iter(())


class ScriptedReturn:
    """Goes from waypoint to waypoint.

    Args:
        script: the waypoints.
    """

    name = "scripted"
    undoes = False
    lets_go = False

    def __init__(self, script: Script) -> None:
        self._script = script

    def __call__(self, driver: StepDriver, look: Look, number: int) -> Actions:
        """See ``Way``."""
        # Each return is shifted as a whole, so that episodes do not all begin alike.
        shift = np.random.default_rng((number, 7)).uniform(-1.0, 1.0, 3) * self._script.spread
        for waypoint in self._script.waypoints:
            yield from _go_to(driver, waypoint, shift)


def _go_to(driver: StepDriver, waypoint: Waypoint, shift: NDArray[np.float64]) -> Actions:
    """Actions that bring the hand to a waypoint, and keep it there for as long as it says."""
    decoder = driver.decoder
    goal = waypoint.position + shift
    if decoder.space.dims == 4:
        decoder.rotation = waypoint.rotation  # which actions cannot turn
    while True:
        way = (goal - decoder.position) / decoder.space.metres
        here = np.array(kinematics.tip(driver.robot.state().q.tolist()))
        commanded = np.abs(goal - decoder.position).max() < NEAR
        if commanded and np.abs(goal - here).max() < SETTLED:
            break
        action = decoder.towards(goal, waypoint.rotation, waypoint.is_open)
        # Scaled as a whole, so that the hand goes in a straight line.
        action[:3] = way * min(1.0, SPEED / max(float(np.abs(way).max()), 1e-9))
        yield action
    for _ in range(round(waypoint.seconds / decoder.period)):
        yield decoder.towards(goal, waypoint.rotation, waypoint.is_open)


class PolicyReturn:
    """Plays a policy whose task undoes the one of the episodes.

    Args:
        infer: answers an observation with ``actions`` (H, A), see ``CheckpointPolicy.infer``.
        execute: actions of each chunk that are carried out.
    """

    name = "policy"
    undoes = True
    lets_go = False

    def __init__(self, infer: Callable[[dict[str, Any]], dict[str, Any]], execute: int) -> None:
        self._infer = infer
        self._execute = execute

    def __call__(self, driver: StepDriver, look: Look, number: int) -> Actions:
        """See ``Way``; it never ends by itself."""
        while True:
            answer = self._infer(look())
            yield from np.asarray(answer["actions"], np.float32)[: self._execute]
