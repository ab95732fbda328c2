"""What goes between policy, executor, safety filter and robot: plain numpy data.

Units are rad, rad/s, m and s; positions and rotations are those of the tool centre point in the
base's frame. All stamps are of one monotonic clock, that of the process that runs the ticker.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Mode(StrEnum):
    """What the safety filter is doing; all but RUN and HUMAN decelerate to a stop and stay there."""

    RUN = "run"
    """Follows the policy."""
    HOLD = "hold"
    """Waits: not started yet, or no fresh target came."""
    HUMAN = "human"
    """Follows a person; the policy's targets are ignored."""
    FAULT = "fault"
    """Something is wrong with the robot, the state or the targets; left only by ``SafetyFilter.clear``."""
    ESTOP = "estop"
    """A person pressed stop; left only by ``SafetyFilter.clear``."""


@dataclass(frozen=True)
class RobotState:
    """What the robot measured.

    Attributes:
        stamp: when.
        q: (7,) joint angles.
        dq: (7,) joint velocities.
        width: of the gripper's opening.
        force: (3,) external force at the hand in N, or None where the robot does not estimate it.
        reflex: what the robot's own controller stopped for; empty while it runs.
        trouble: what is wrong with the way by which states come and commands go; empty while all is
            well.
        hand: (3,) where the robot believes its tool centre point to be, or None where it does not
            say.
    """

    stamp: float
    q: Array
    dq: Array
    width: float = 0.0
    force: Array | None = None
    reflex: str = ""
    trouble: str = ""
    hand: Array | None = None


@dataclass(frozen=True)
class Target:
    """Where the policy or a person wants the hand to be.

    Attributes:
        stamp: when it became due.
        position: (3,).
        rotation: (3, 3).
        width: of the gripper's opening.
        human: whether a person gave it.
    """

    stamp: float
    position: Array
    rotation: Array
    width: float
    human: bool = False


@dataclass(frozen=True)
class Command:
    """What the filter lets through to the robot, one per tick.

    Attributes:
        stamp: when.
        q: (7,) joint angles to be at by the end of the tick.
        dq: (7,) their velocities then.
        ddq: (7,) their accelerations then.
        width: of the gripper's opening.
        mode: of the filter.
        reason: why it is in that mode.
    """

    stamp: float
    q: Array
    dq: Array
    ddq: Array
    width: float
    mode: Mode
    reason: str = ""
