"""Brings an arm of LeRobot's to where its episodes begin."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from embodyrl.errors import UserError
from embodyrl.real_robot.commands.signals import interrupt_is_estop
from embodyrl.real_robot.control.clocks import Clock
from embodyrl.real_robot.control.input_checks import AT_REST
from embodyrl.real_robot.control.joint_safety import JointSafetyConfig
from embodyrl.real_robot.control.messages import JointTarget
from embodyrl.real_robot.control.operator import Operator
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.step_driver import watch_home
from embodyrl.real_robot.control.ticker import INTERRUPTED
from embodyrl.real_robot.lerobot_arm.robot import LeRobotArm

SLOW = 0.3
"""Share of the largest speed."""
NEAR = 0.05
"""rad from home at which a motor that hangs under its load counts as there."""
PATIENCE = 30.0
"""s that the way may take."""
LOOK = 0.1
"""s between two looks at the page."""
STANDS = 1e-6
"""rad/s, velocity of the commands below which they are at rest."""
GOES = "told to run"
"""Reason of the filter's mode while nothing has stopped the arm."""


class WayHome:
    """``ConnectedRobot.begin``: moves to ``safety.home``, by the safety filter, and waits for rest.

    The first call leaves the arm alone: the pre-flight check comes before any motion.

    Args:
        robot: connected.
        clock: of its stamps.
        safety: of the arm.
        person: says who may stop it at a page now, if anybody.
    """

    def __init__(
        self,
        robot: LeRobotArm,
        clock: Clock,
        safety: JointSafetyConfig,
        person: Callable[[], Operator | None] = lambda: None,
    ) -> None:
        self._robot = robot
        self._person = person
        self._clock = clock
        self._safety = replace(safety, speed=SLOW * safety.speed)
        self._calls = 0

    def __call__(self, init: int) -> None:
        """Brings the arm home.

        Raises:
            UserError: it may not start, or does not come home.
        """
        self._calls += 1
        home = self._safety.home
        if self._calls == 1 or not home:
            return
        # 1. Start a filter of its own, at rest.
        space = self._safety.space
        guard = SafetyFilter(self._safety)
        self._rest()
        now = self._clock.now()
        state = self._robot.state()
        guard.start(now, state)
        guard.run(now)
        # 2. Where to: motors that are not named stay where they are.
        named = [home.get(motor.name, np.nan) for motor in space.motors] * space.unit
        stays = np.clip(state.q, space.low, space.high)
        goal = JointTarget(now, np.where(np.isnan(named), stays, named))
        # 3. Move there, and wait until the arm is measured there, at rest. Ctrl-C brakes it first.
        with interrupt_is_estop(guard):
            self._move(guard, goal)
        if guard.reason == INTERRUPTED:
            raise KeyboardInterrupt

    def _move(self, guard: SafetyFilter, goal: JointTarget) -> None:
        """Moves to ``goal``; where something stops the arm, until the commands are at rest.

        Raises:
            UserError: something did, or the arm is not measured there in time.
        """
        end = self._clock.now() + PATIENCE
        late = False
        shown = -LOOK
        while True:
            state = self._robot.state()
            now = self._clock.now()
            command = guard.tick(now, state, replace(goal, stamp=now))
            self._robot.send(command)
            if (person := self._person()) is not None and now >= shown + LOOK:
                status = {"task": self._robot.prompt(), "open": True, "numbers": {}, "events": []}
                watch_home(person, guard, self._robot, status)
                shown = now
            stopped = guard.reason != GOES
            if stopped and np.abs(command.dq).max() < STANDS:
                break
            told = np.abs(command.q - goal.q).max() < 1e-3
            near = np.abs(state.q - goal.q).max() < NEAR
            if not stopped and told and near and self._at_rest():
                return
            if now > end and not stopped:
                late = True
                guard.hold(now, "it took too long")
            self._clock.sleep_until(now + self._safety.tick)
        if late:
            raise UserError(
                f"The arm did not come home within {PATIENCE:.0f} s. Is something in its way, or a "
                "motor too weak to hold safety.home?"
            )
        if guard.reason != INTERRUPTED:
            raise UserError(f"The arm did not come home: {guard.reason}.")

    def _at_rest(self) -> bool:
        return float(np.abs(self._robot.state().dq).max()) <= AT_REST

    def _rest(self) -> None:
        """Waits until the arm rests; the filter says so where it never does."""
        end = time.monotonic() + 3.0
        while not self._at_rest() and time.monotonic() < end:
            time.sleep(0.02)
