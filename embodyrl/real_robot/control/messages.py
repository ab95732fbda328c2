"""The data that policy, executor, safety filter and robot exchange, as plain numpy arrays.

Units are rad, rad/s, m and s. Positions and rotations are those of the tool centre point in the
base's frame. All stamps come from one monotonic clock, that of the control loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Mode(StrEnum):
    """What the safety filter is doing. All modes but RUN and HUMAN brake to a stop and stay so."""

    RUN = "run"
    """Follows the policy."""
    HOLD = "hold"
    """Waits, for example for a start or a fresh target."""
    HUMAN = "human"
    """Follows a person; the policy's targets are ignored."""
    FAULT = "fault"
    """The robot, its state or a target is wrong; left only by ``SafetyFilter.clear``."""
    ESTOP = "estop"
    """A person pressed stop; left only by ``SafetyFilter.clear``."""


@dataclass(frozen=True)
class RobotState:
    """What the robot measured.

    Attributes:
        stamp: when it was measured.
        q: (n,) joint angles; a Franka has n = 7 joints.
        dq: (n,) joint velocities.
        width: opening of the gripper, where it is none of the joints.
        force: (3,) external force at the hand in N, or None where the robot does not estimate it.
        force_stamp: when the force was measured; None where that was at ``stamp``.
        reflex: why the robot's own controller stopped the arm; empty while it runs.
        trouble: what is wrong with the connection to the robot; empty while all is well.
        hand: (3,) position of the tool centre point according to the robot, or None where the robot
            does not report it.
    """

    stamp: float
    q: Array
    dq: Array
    width: float = 0.0
    force: Array | None = None
    reflex: str = ""
    trouble: str = ""
    hand: Array | None = None
    force_stamp: float | None = None


@dataclass(frozen=True)
class Target:
    """Where the policy or a person wants the hand to be.

    Attributes:
        stamp: when it became due.
        position: (3,).
        rotation: (3, 3).
        width: opening of the gripper.
        human: whether it comes from a person.
    """

    stamp: float
    position: Array
    rotation: Array
    width: float
    human: bool = False


@dataclass(frozen=True)
class JointTarget:
    """Where the policy or a person wants the motors of an arm whose shape is not known.

    Attributes:
        stamp: when it became due.
        q: (n,) positions.
        human: whether it comes from a person.
        width: of no meaning; the gripper is one of the motors.
    """

    stamp: float
    q: Array
    human: bool = False
    width: float = 0.0


@dataclass(frozen=True)
class Command:
    """What the safety filter sends to the robot, one per tick.

    Attributes:
        stamp: when it was made.
        q: (n,) joint angles at the end of the tick.
        dq: (n,) joint velocities then.
        ddq: (n,) joint accelerations then.
        width: opening of the gripper.
        mode: mode of the filter.
        reason: why the filter is in that mode.
    """

    stamp: float
    q: Array
    dq: Array
    ddq: Array
    width: float
    mode: Mode
    reason: str = ""
