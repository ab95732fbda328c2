"""The interface of a robot. ``ros``, ``libfranka``, ``twin`` and ``lerobot_arm`` implement it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from embodyrl.errors import UserError
from embodyrl.real_robot.cameras.camera import Camera
from embodyrl.real_robot.control.messages import Command, RobotState
from embodyrl.real_robot.grippers.interface import Gripper


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
            ``images``, ``proprio`` and ``prompt``; see ``policy_link.server.check_observation``. A
            robot whose cameras measure depth adds ``depth``: camera -> (h, w) uint16 mm. It is for
            the log; no policy is shown it (``policy_sees``).

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


def policy_sees(seen: dict[str, Any]) -> dict[str, Any]:
    """What the policy is shown of an observation: all but the depth, which only the log holds."""
    return {key: value for key, value in seen.items() if key != "depth"}


@runtime_checkable
class HasDevices(Protocol):
    """A robot whose cameras and gripper run in real time, so that their rates can be measured."""

    def cameras(self) -> Mapping[str, Camera]:
        """The policy's cameras by name; their pictures have the policy's size."""
        ...

    def max_image_age(self) -> float:
        """s, age of the oldest picture that the policy may see."""
        ...

    def gripper(self) -> Gripper | None:
        """The gripper; None where there is none, or it comes with the arm's states."""
        ...
