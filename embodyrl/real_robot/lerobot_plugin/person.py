"""Our devices as a ``lerobot.teleoperators.Teleoperator``."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from lerobot.teleoperators import Teleoperator, TeleoperatorConfig

from embodyrl.errors import UserError
from embodyrl.real_robot.control.operator import HOLDS
from embodyrl.real_robot.lerobot_plugin.arm import EmbodyrlArm, connected_arm
from embodyrl.real_robot.record.teleop import LEROBOT, Teleop, open_teleop


@TeleoperatorConfig.register_subclass("embodyrl")
@dataclass(kw_only=True)
class EmbodyrlPersonConfig(TeleoperatorConfig):
    """What ``--teleop.KEY=`` takes.

    Attributes:
        device: page, keyboard, gamepad or its file, spacemouse, leader, or scripted: the task's
            expert, on the simulated arm.
        page: port of the page; 0 takes a free one.
    """

    device: str = "page"
    page: int = 0


class EmbodyrlPerson(Teleoperator):
    """See LeRobot's ``Teleoperator``. The arm is an ``EmbodyrlArm`` in the same process.

    LeRobot connects the arm after the teleoperator, so the device is opened by the first question.

    The stop of a page or device stops the arm. When an episode begins and ends, and what it is
    labelled, is LeRobot's matter.

    Args:
        config: settings.
    """

    config_class = EmbodyrlPersonConfig
    name = "embodyrl"

    def __init__(self, config: EmbodyrlPersonConfig) -> None:
        super().__init__(config)
        self.config = config
        self._opened = ExitStack()
        self._connected = False
        self._teleop: Teleop | None = None

    @property
    def action_features(self) -> dict[str, type]:
        """The arm's."""
        return connected_arm().action_features

    @property
    def feedback_features(self) -> dict[str, type]:
        """None."""
        return {}

    @property
    def is_connected(self) -> bool:
        """Whether it may be asked."""
        return self._connected

    @property
    def is_calibrated(self) -> bool:
        """Nothing is calibrated."""
        return True

    def connect(self, calibrate: bool = True) -> None:
        """See LeRobot's ``Teleoperator``.

        Raises:
            UserError: the device is LeRobot's.
        """
        if self.config.device.startswith(LEROBOT):
            raise UserError("Give LeRobot's own teleoperator as --teleop.type.")
        self._connected = True

    def _open(self, arm: EmbodyrlArm) -> Teleop:
        """The device, and the page beside it; opened when it is first asked.

        Raises:
            UserError: no such device.
        """
        if self._teleop is None:
            assert arm.connected is not None and arm.driver is not None
            device, file = self.config.device, arm.config.robot_file
            self._teleop = open_teleop(self._opened, device, arm.connected, self.config.page, file)
            self._teleop.begin(arm.driver.decoder)
        return self._teleop

    def calibrate(self) -> None:
        """Nothing to do."""

    def configure(self) -> None:
        """Nothing to do."""

    def get_action(self) -> dict[str, float]:
        """What the person asks for now; no motion while their device does not answer.

        Raises:
            UserError: no arm, or no such device.
        """
        arm = connected_arm()
        teleop = self._open(arm)
        driver, operator = arm.driver, teleop.operator
        assert arm.connected is not None and driver is not None
        # What is asked for at the page or the device's buttons.
        for wish in operator.wishes():
            if wish == "estop":
                driver.guard.estop()
            elif wish in HOLDS:
                driver.hold("stale: " + HOLDS[wish])
        # The motion that is asked for, while somebody answers.
        dims = arm.spec.action_dim
        action = operator.action(dims)
        if not operator.alive(driver.clock.now()):
            action = np.zeros(dims, np.float32)
            action[-1] = 1.0 if driver.decoder.width > 0.0 else -1.0
        if teleop.person:
            operator.show(driver.status(), arm.connected.robot.pictures())
        return dict(zip(arm.action_features, action.tolist(), strict=True))

    def send_feedback(self, feedback: dict[str, Any]) -> None:
        """Nothing to feel."""

    def disconnect(self) -> None:
        """Closes the device."""
        self._connected = False
        self._teleop = None
        self._opened.close()
