"""franka-sim's arm in the scene of an embedded task: what is around an arm that has nothing around it.

franka-sim speaks libfranka's protocol and raises the reflexes, but has no objects and no cameras.
Here the arm of the MuJoCo scene goes where franka-sim's arm is measured to be, so that a policy
sees and moves what it was trained on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from embodyrl.real_robot.control.actions import DeltaDecoder
from embodyrl.real_robot.control.messages import Command, RobotState
from embodyrl.real_robot.control.tracking import SafetyConfig
from embodyrl.real_robot.env.twin import MujocoTwin
from embodyrl.real_robot.libfranka.config import Franka
from embodyrl.real_robot.libfranka.robot import LibfrankaRobot


class FrankaInScene(LibfrankaRobot):
    """See ``LibfrankaRobot``; pictures, gripper, objects and success are the scene's.

    Args:
        arm: franka-sim's.
        safety: of the filter.
        space: of the policy's actions.
        twin: the scene; ``close`` closes it too.
    """

    def __init__(self, arm: Franka, safety: SafetyConfig, space: Any, twin: MujocoTwin) -> None:
        self.twin = twin
        self.spec = twin.spec
        self._offset = 0.0
        super().__init__(arm, safety, space, {})

    def begin(self, init: int, seconds: float = 60.0) -> None:
        """Arranges initial state ``init``, and sends the arm to its posture."""
        self._recover(seconds)
        self.twin.begin(init)
        self._go(self.twin.data.qpos[:7], seconds)
        self._offset = self.now() - self.twin.now()

    def sleep_until(self, stamp: float) -> None:
        """See ``Clock``; the scene goes on as far."""
        super().sleep_until(stamp)
        state = super().state()
        self.twin.follow(np.array([self._tick]), state.q[None], state.dq[None])
        self.twin.sleep_until(stamp - self._offset)

    def state(self) -> RobotState:
        """See ``Robot``."""
        return replace(super().state(), width=self.twin.state().width)

    def send(self, command: Command) -> None:
        """See ``Robot``."""
        super().send(command)
        self.twin.grasp(command.width)

    def observe(self, decoder: DeltaDecoder) -> dict[str, Any]:
        """See ``Robot``."""
        return self.twin.observe(decoder)

    def pictures(self) -> dict[str, np.ndarray]:
        """See ``Robot``."""
        return self.twin.pictures()

    def prompt(self) -> str:
        """See ``Robot``."""
        return self.twin.prompt()

    def solved(self) -> bool:
        """See ``Robot``."""
        return self.twin.solved()

    def close(self) -> None:
        """See ``Robot``."""
        super().close()
        self.twin.close()
