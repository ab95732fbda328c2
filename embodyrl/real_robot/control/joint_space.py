"""Actions of an arm that is told where its motors shall be, such as an SO-101.

An action of 1 is the upper end of a motor's range, and -1 its lower end. The policy sees where each
motor is, in the same units. The ranges are part of what a policy's numbers mean, so they stand in
``Conventions.state``, and a policy that was trained with others is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.errors import UserError
from embodyrl.real_robot.control.config_checks import require_number
from embodyrl.real_robot.control.messages import Array, Command, JointTarget, RobotState

CONTROL_MODE = "joint_pos"
SCALE = {"degrees": math.pi / 180.0, "percent": 0.01}
"""Unit of a motor -> what one of it is in the safety filter, which counts in rad.

A percent of a motor's range has no angle. As 0.01 it is of the same size: a range is about 1.
"""
_PART = re.compile(r"(\S+) (\S+) to (\S+) (degrees|percent):1")


@dataclass(frozen=True)
class Motor:
    """One motor, in LeRobot's units.

    Attributes:
        name: as LeRobot has it, without ``.pos``.
        low: smallest position that it is told.
        high: largest.
        unit: a key of ``SCALE``.
    """

    name: str
    low: float
    high: float
    unit: str

    def __str__(self) -> str:
        return f"{self.name} {self.low:.10g} to {self.high:.10g} {self.unit}"


@dataclass(frozen=True)
class JointSpace:
    """What an action and a proprio mean: a number in [-1, 1] for each motor.

    Attributes:
        motors: in the order of the numbers.
    """

    motors: tuple[Motor, ...]

    @property
    def dims(self) -> int:
        """A, and the length of the proprio."""
        return len(self.motors)

    @cached_property
    def unit(self) -> Array:
        """(A,) the filter's number for one of LeRobot's units."""
        return np.array([SCALE[motor.unit] for motor in self.motors])

    @cached_property
    def low(self) -> Array:
        """(A,) lower ends, as the filter counts."""
        return np.array([motor.low for motor in self.motors]) * self.unit

    @cached_property
    def high(self) -> Array:
        """(A,) upper ends, as the filter counts."""
        return np.array([motor.high for motor in self.motors]) * self.unit

    @property
    def state(self) -> tuple[str, ...]:
        """As ``Conventions.state``."""
        return tuple(f"{motor}:1" for motor in self.motors)

    def share(self, q: Array) -> NDArray[np.float32]:
        """Where positions (A,) of the filter are in their ranges: -1 to 1 inside."""
        middle = (self.low + self.high) / 2.0
        return ((q - middle) * 2.0 / (self.high - self.low)).astype(np.float32)

    def position(self, share: Array) -> Array:
        """The inverse of ``share``."""
        return (self.low + self.high) / 2.0 + share * (self.high - self.low) / 2.0


def joint_space(metadata: Mapping[str, Any]) -> JointSpace:
    """The motors of the policy that a server's metadata describes.

    Raises:
        UserError: it was not trained for an arm that is told joint positions.
    """
    # A motor is written as "NAME LOW to HIGH UNIT:1"; anything else is another arm's state.
    mode = str(metadata.get("control_mode", ""))
    parts = metadata.get("conventions", {}).get("state", [])
    found = [_PART.fullmatch(str(part)) for part in parts]
    if mode != CONTROL_MODE or not found or not all(found):
        raise UserError(
            f"Actions of {metadata.get('env', '')}/{mode} are no positions of motors, which an arm "
            "of LeRobot's takes. Its policies learn from data that `embodyrl record --robot "
            "lerobot` wrote."
        )
    try:
        motors = [Motor(m[1], float(m[2]), float(m[3]), m[4]) for m in found if m is not None]
        _check_ranges(motors)
    except ValueError as error:
        raise UserError(f"The ranges of the policy's motors are no numbers ({error}).") from error
    return JointSpace(tuple(motors))


def _check_ranges(motors: list[Motor]) -> None:
    """Checks ranges that another machine sent.

    Raises:
        ValueError: one is empty, or of no size that a motor has.
    """
    for motor in motors:
        if not -1e4 <= motor.low < motor.high <= 1e4:
            raise ValueError(str(motor)[:80])


class JointDecoder:
    """Turns actions into positions of the motors; the counterpart of ``actions.DeltaDecoder``.

    Over each control step the target moves from the last action's positions to this one's in a
    straight line.

    Args:
        space: of the actions.
        control_hz: actions per second.

    Attributes:
        q: (A,) the commanded positions.
        width: of no meaning; the gripper is one of the motors.
    """

    def __init__(self, space: JointSpace, control_hz: float) -> None:
        require_number("control_hz", control_hz, 1e-3, 1000.0, "actions per second")
        self.space = space
        self.period = 1.0 / control_hz
        self.width = 0.0

    def start(self, now: float, state: RobotState) -> None:
        """Starts at the measured positions."""
        self.q = np.clip(state.q, self.space.low, self.space.high)
        # The present step: where it began, and when.
        self._before = self.q
        self._since = now
        self._stamp = now

    def act(self, now: float, action: NDArray[np.float32], state: RobotState) -> None:
        """Takes an action (A,) that is due now; one that is not finite makes the targets so."""
        self._before = self.q
        self._since = now
        self.q = self.space.position(np.clip(action.astype(np.float64), -1.0, 1.0))

    def target(self, now: float, fresh: bool) -> JointTarget:
        """Where to be now; its stamp only advances while the actions are ``fresh``."""
        if fresh:
            self._stamp = now
        # The share of the control step that has passed.
        share = min(max((now - self._since) / self.period, 0.0), 1.0)
        return JointTarget(self._stamp, self._before + share * (self.q - self._before))

    def back_to(self, q: Array, command: Command) -> NDArray[np.float32]:
        """The action (A,) that goes back to the positions q (A,), with the gripper as it is told."""
        kept = [motor.name == "gripper" for motor in self.space.motors]
        return self.space.share(np.where(kept, command.q, q)).clip(-1.0, 1.0)

    def told(self) -> dict[str, str]:
        """Where the arm is told to be, for a person, in LeRobot's units."""
        values = (self.q / self.space.unit).tolist()
        named = zip(self.space.motors, values, strict=True)
        return {"told to be at": ", ".join(f"{m.name} {round(value)}" for m, value in named)}
