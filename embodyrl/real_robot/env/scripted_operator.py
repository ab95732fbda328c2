"""A scripted person beside the simulated arm, so that learning from corrections can be tried without people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.real_robot.control.ticker import Operator
from embodyrl.sims.mujoco.experts import ScriptedExpert

if TYPE_CHECKING:
    from embodyrl.real_robot.env.robot_env import RobotEnv


class Corrector(Operator):
    """Takes over in an episode that is not solved in time, and ends it as the task's scripted expert would.

    Args:
        env: of the simulated arm.
        patience: actions of an episode that the policy may take alone.
    """

    def __init__(self, env: RobotEnv, patience: int) -> None:
        self._env = env
        self._patience = patience
        self._expert = ScriptedExpert(env.twin)

    def wishes(self) -> list[str]:
        """See ``Operator``; asked once after each action."""
        if self._env.elapsed + 1 != self._patience:
            return []
        self._expert.reset()
        return ["takeover"]

    def alive(self, now: float) -> bool:
        """See ``Operator``."""
        return True

    def action(self, dims: int) -> NDArray[np.float32]:
        """See ``Operator``."""
        self._env.look()
        return self._expert.act()[0].numpy()

    def show(self, status: dict[str, Any], images: dict[str, NDArray[np.uint8]]) -> None:
        """See ``Operator``; nobody looks."""
