"""The interface of a robot. ``ros``, ``libfranka``, ``twin`` and ``lerobot_arm`` implement it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from embodyrl.errors import UserError
from embodyrl.real_robot.control.messages import Command, RobotState


class NotReadyError(UserError):
    """A camera image is missing or too old."""


class Robot(Protocol):
    """An arm with a gripper and cameras. No method may block the control loop for long."""

    def state(self) -> RobotState:
        """The newest measured state, stamped by the control loop's clock."""
        ...

    def send(self, command: Command) -> None:
        """Sends the next command."""
        ...

    def observe(self, decoder: Any) -> dict[str, Any]:
        """What the policy sees now.

        Args:
            decoder: of the actions, which knows what the arm is told (``any_safety.Decoder``).

        Returns:
            ``images``, ``proprio`` and ``prompt``; see ``policy_link.server.check_observation``.

        Raises:
            NotReadyError: there is no fresh image.
        """
        ...

    def solved(self) -> bool:
        """Whether the task is solved; False where the robot cannot tell."""
        ...

    def pictures(self) -> dict[str, NDArray[np.uint8]]:
        """The newest images for a person: camera name -> (h, w, 3)."""
        ...

    def prompt(self) -> str:
        """The instruction that the policy is given."""
        ...

    def close(self) -> None:
        """Disconnects from the robot."""
        ...
