"""A real robot whose policy plays two tasks in turn: its instruction and its success are in turn, too."""

from __future__ import annotations

from typing import Any

from embodyrl.real_robot.control.actions import DeltaDecoder
from embodyrl.real_robot.control.messages import Command, RobotState
from embodyrl.real_robot.control.robot import Robot
from embodyrl.real_robot.resets.between import Between


class InTurn(Robot):
    """See ``Robot``; what is asked for is of the present task.

    Args:
        robot: the real one.
        between: knows which task is played.
        prompt: instruction of the task that undoes the other.
    """

    def __init__(self, robot: Robot, between: Between, prompt: str) -> None:
        self._robot = robot
        self._between = between
        self._prompt = prompt

    def state(self) -> RobotState:
        """See ``Robot``."""
        return self._robot.state()

    def send(self, command: Command) -> None:
        """See ``Robot``."""
        self._robot.send(command)

    def observe(self, decoder: DeltaDecoder) -> dict[str, Any]:
        """See ``Robot``."""
        return self._robot.observe(decoder) | {"prompt": self.prompt()}

    def prompt(self) -> str:
        """See ``Robot``."""
        return self._prompt if self._between.state.back else self._robot.prompt()

    def solved(self) -> bool:
        """See ``Robot``; the judge may ask for what the policy sees, which a topic does not."""
        if not self._between.state.back:
            return self._robot.solved()
        judge = self._between.judge
        return judge is not None and judge(dict)

    def pictures(self) -> dict[str, Any]:
        """See ``Robot``."""
        return self._robot.pictures()

    def close(self) -> None:
        """See ``Robot``."""
        self._robot.close()
