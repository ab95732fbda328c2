"""franka-sim's arm in the scene of an embedded task.

franka-sim speaks libfranka's protocol and raises the robot's reflexes, but has no objects and no
cameras. Here the arm of the MuJoCo scene goes where franka-sim's arm is measured to be, so that a
policy sees and moves what it was trained on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from embodyrl.real_robot.control.actions import DeltaDecoder
from embodyrl.real_robot.control.messages import Command, RobotState
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.real_robot.libfranka.config import Franka
from embodyrl.real_robot.libfranka.robot import LibfrankaRobot
from embodyrl.real_robot.twin.mujoco_twin import MujocoTwin


class FrankaSimInScene(LibfrankaRobot):
    """See ``LibfrankaRobot``; images, gripper, objects and success are those of the scene.

    Args:
        arm: settings of franka-sim's arm.
        safety: settings of the safety filter.
        space: of the policy's actions.
        twin: the scene; ``close`` closes it too.
    """

    def __init__(self, arm: Franka, safety: SafetyConfig, space: Any, twin: MujocoTwin) -> None:
        self.twin = twin
        self.spec = twin.spec
        self._offset = 0.0
        super().__init__(arm, safety, space, {})

    def begin(self, init: int, seconds: float = 60.0) -> None:
        """Arranges initial state ``init`` and moves the arm to the posture that belongs to it."""
        self._recover(seconds)
        self.twin.begin(init)
        self._go(self.twin.data.qpos[:7], seconds)
        # From the scene's time to that of the arm.
        self._offset = self.now() - self.twin.now()

    def go_on(self, init: int, back: bool) -> None:
        """See ``MujocoTwin.go_on``."""
        self.twin.go_on(init, back)

    @property
    def at_back(self) -> bool:
        """See ``MujocoTwin.at_back``."""
        return self.twin.at_back

    def sleep_until(self, stamp: float) -> None:
        """See ``Clock``; the scene moves on by the same time."""
        super().sleep_until(stamp)
        # The scene's arm follows the measured angles, one tick late.
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
