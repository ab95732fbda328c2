"""Between two episodes: the arm comes to rest, and out of the way of whoever arranges the scene."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from embodyrl.real_robot.connect_robot import ConnectedRobot
from embodyrl.real_robot.control.actions import DeltaDecoder
from embodyrl.real_robot.control.input_checks import AT_REST
from embodyrl.real_robot.control.operator import Operator
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.step_driver import StepDriver

REST = 3.0
"""s that the arm may take to be measured at rest after an episode."""


def wait_for_rest(connected: ConnectedRobot) -> None:
    """Waits until the arm is measured at rest; the safety filter says so where it never is."""
    end = connected.clock.now() + REST
    moving = True
    while moving and connected.clock.now() < end:
        connected.clock.sleep_until(connected.clock.now() + 0.05)
        moving = float(np.abs(connected.robot.state().dq).max()) > AT_REST


def go_home(
    connected: ConnectedRobot,
    decoder: DeltaDecoder,
    home: tuple[float, float, float],
    person: Operator | None = None,
) -> None:
    """Moves the hand to ``home`` (3,) m, with the commands of the safety filter.

    Args:
        connected: at rest.
        decoder: of actions, fresh.
        home: in the base's frame.
        person: who may stop it; None where nobody is at a page.

    Raises:
        UserError: the arm may not start from where it is.
    """
    guard = SafetyFilter(replace(connected.safety, resume="fresh_target"))
    driver = StepDriver(connected.robot, connected.clock, guard, decoder, not connected.simulated)
    driver.start()
    try:
        driver.go_home(home, person=person)
    finally:
        driver.stop()
    if driver.broken:
        print(f"  The arm did not come home: {driver.broken}.", flush=True)
