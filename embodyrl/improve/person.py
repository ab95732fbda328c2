"""The person beside the arm during a round: one who helps, or one who only watches and labels."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.improve.config import ImproveConfig
from embodyrl.improve.scripted_helper import ScriptedHelper
from embodyrl.real_robot.commands.deployment import Deployment
from embodyrl.real_robot.control.operator import WATCHING, WISHES, Operator
from embodyrl.real_robot.control.robot import Robot
from embodyrl.real_robot.record.teleop import Teleop, open_teleop

LOOK_EVERY = 0.1
"""s between two looks at the person while the arm waits for them."""


@dataclass
class Person:
    """Who is there.

    Attributes:
        operator: None where nobody is.
        begin: called at the beginning of an episode.
        ask: shows what a person must do, and waits until it is done.
    """

    operator: Operator | None
    begin: Callable[[Any], None] = lambda decoder: None
    ask: Callable[[str], None] = lambda sentence: None


class Beside(Operator):
    """Between a person's device and the control loop: what they may ask for, and what they see.

    Args:
        teleop: their device.
        robot: that they move.
        can: what they may ask for.
    """

    def __init__(self, teleop: Teleop, robot: Robot, can: tuple[str, ...]) -> None:
        self._teleop = teleop
        self._robot = robot
        self._can = can
        self._refused = ""  # why their last takeover was refused

    def wishes(self) -> list[str]:
        """See ``Operator``."""
        found = []
        for wish in self._teleop.operator.wishes():
            # A leader must stand where the robot does before it is followed.
            if wish == "takeover" and wish in self._can:
                self._refused = self._teleop.ready(self._robot.state())
                if self._refused:
                    print(f"  {self._refused}", flush=True)
                    continue
            if wish in self._can:
                found.append(wish)
        return found

    def alive(self, now: float) -> bool:
        """See ``Operator``."""
        return self._teleop.operator.alive(now)

    def action(self, dims: int) -> NDArray[np.float32]:
        """See ``Operator``."""
        return self._teleop.operator.action(dims)

    def show(self, status: dict[str, Any], images: dict[str, NDArray[np.uint8]]) -> None:
        """See ``Operator``; what is wrong with their device comes first."""
        said = self._refused or self._teleop.problem()
        shown = {**status, "can": self._can, **({"reason": said} if said else {})}
        self._teleop.operator.show(shown, images)

    def ask(self, sentence: str) -> None:
        """Shows a sentence and live pictures until the person says run."""
        operator = self._teleop.operator
        operator.wishes()  # those from before do not count
        reason = f"{sentence} Then press run."
        print(f"  {reason}", flush=True)
        status = {"mode": "hold", "reason": reason, "task": self._robot.prompt(), "open": True}
        while "run" not in operator.wishes():
            shown = {**status, "can": ["run"], "numbers": {}, "events": []}
            operator.show(shown, self._robot.pictures())
            time.sleep(LOOK_EVERY)


def open_person(
    opened: ExitStack, config: ImproveConfig, deployment: Deployment, helps: bool
) -> Person:
    """Who is beside the arm in a stage.

    Args:
        opened: disconnects their device in the end.
        config: says who.
        deployment: what they stand beside.
        helps: whether they may take over; otherwise they watch and label.
    """
    connected = deployment.connected
    if config.helper == "scripted":
        if not helps:
            return Person(None)
        execution = deployment.execution
        seconds = deployment.client.metadata["max_episode_steps"] / execution.control_hz
        scripted = ScriptedHelper(connected.robot, config.scripted, seconds, config.seed)
        return Person(scripted, scripted.begin)
    teleop = open_teleop(opened, config.helper, connected, config.page, config.robot_file)
    beside = Beside(teleop, connected.robot, WISHES if helps else WATCHING)
    return Person(beside, teleop.begin, beside.ask)
