"""A leader with the motors of the arm: the arm is told to be where the leader is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from embodyrl.real_robot.control.joint_space import JointSpace
from embodyrl.real_robot.control.messages import Array, RobotState
from embodyrl.real_robot.control.operator import Operator
from embodyrl.real_robot.operator.leader import AngleSource, Leader, LeaderOperator


class MotorLeader(LeaderOperator):
    """A person with a leader of LeRobot's, and the page for everything else.

    Args:
        config: says how near the leader must be when following begins.
        page: stop, start and labels.
        source: of the leader's positions.
        space: of the arm's actions.

    Raises:
        UserError: the leader does not answer.
    """

    def __init__(
        self, config: Leader, page: Operator, source: AngleSource, space: JointSpace
    ) -> None:
        self._space = space
        super().__init__(config, page, source)

    @property
    def q(self) -> Array:
        """(n,) where the leader's motors are, within the ranges of the arm's."""
        return np.clip(self._angles, self._space.low, self._space.high)

    def ready(self, state: RobotState) -> str:
        """Why following may not begin; empty where the leader stands as the arm does."""
        if self.problem():
            return self.problem()
        away = self.q - np.clip(state.q, self._space.low, self._space.high)
        # A gripper is followed from wherever it is.
        arm = [motor.name != "gripper" for motor in self._space.motors]
        worst = int(np.abs(np.where(arm, away, 0.0)).argmax())
        if not arm[worst] or abs(float(away[worst])) <= self._config.max_difference:
            return ""
        motor = self._space.motors[worst]
        unit = float(self._space.unit[worst])
        return (
            f"{motor.name} of the leader is at {round(self.q[worst] / unit)} {motor.unit}, and the "
            f"arm's at {round(state.q[worst] / unit)} (at most "
            f"{round(self._config.max_difference / unit)} apart): bring it there, then start"
        )

    def action(self, dims: int) -> NDArray[np.float32]:
        """See ``Operator``."""
        return self._space.share(self.q).clip(-1.0, 1.0)
