"""The limits of arms, and those of Franka's as data.

The FR3's come from its data sheet, including velocity limits that fall towards the ends of each
joint. Where published values differ, the tighter one is taken. The Panda (FER) has the constant
limits of its data sheet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from embodyrl.errors import UserError, did_you_mean
from embodyrl.real_robot.control.messages import Array

MAX_WIDTH = 0.08
"""m between the open fingers of the Franka hand."""


@dataclass(frozen=True)
class RobotLimits:
    """Limits of one robot model; arrays are (n,), one value per joint, in rad and s.

    Attributes:
        name: the model.
        q_min: smallest angles.
        q_max: largest angles.
        dq_max: largest velocities.
        ddq_max: largest accelerations.
        dddq_max: largest jerks.
        offset: rad/s, see ``velocity_bounds``.
        decel: rad/s^2, see ``velocity_bounds``.
        ee_speed: m/s, largest speed of the hand.
        ee_turn: rad/s, largest turning rate of the hand.
    """

    name: str
    q_min: Array
    q_max: Array
    dq_max: Array
    ddq_max: Array
    dddq_max: Array
    offset: Array
    decel: Array
    ee_speed: float
    ee_turn: float

    def velocity_bounds(self, q: Array) -> tuple[Array, Array]:
        """Lowest (negative) and largest allowed velocities (..., n) at the angles q (..., n).

        Towards the upper end dq <= min(dq_max, max(0, -offset + sqrt(2 decel (q_max - q)))), and
        the same mirrored at the lower end (FR3's data sheet).
        """
        up = -self.offset + np.sqrt(np.maximum(0.0, 2.0 * self.decel * (self.q_max - q)))
        down = -self.offset + np.sqrt(np.maximum(0.0, 2.0 * self.decel * (q - self.q_min)))
        return -np.clip(down, 0.0, self.dq_max), np.clip(up, 0.0, self.dq_max)

    def inside(self, margin: float = 1e-3) -> RobotLimits:
        """The same limits drawn in by ``margin``: rad for angles, a share for everything else."""
        keep = 1.0 - margin
        return replace(
            self,
            q_min=self.q_min + margin,
            q_max=self.q_max - margin,
            dq_max=self.dq_max * keep,
            ddq_max=self.ddq_max * keep,
            dddq_max=self.dddq_max * keep,
        )


def _row(*values: float) -> Array:
    row = np.array(values if len(values) == 7 else values * 7)
    row.setflags(write=False)
    return row


FR3 = RobotLimits(
    name="fr3",
    q_min=_row(-2.7437, -1.7837, -2.9007, -3.0421, -2.8065, 0.5445, -3.0159),
    q_max=_row(2.7437, 1.7837, 2.9007, -0.1518, 2.8065, 4.5169, 3.0159),
    dq_max=_row(2.62, 2.62, 2.62, 2.62, 5.26, 4.18, 5.26),
    ddq_max=_row(10.0),
    dddq_max=_row(5000.0),
    offset=_row(0.30, 0.20, 0.20, 0.30, 0.35, 0.35, 0.35),
    decel=_row(6.0, 2.585, 3.5, 4.0, 17.0, 5.5, 17.0),
    ee_speed=3.0,
    ee_turn=2.5,
)
# The Panda's data sheet has no velocity limit that depends on the angle. ``offset`` and ``decel``
# are ours: with them a joint can stop before its end at less than its largest acceleration.
PANDA = RobotLimits(
    name="panda",
    q_min=_row(-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973),
    q_max=_row(2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973),
    dq_max=_row(2.175, 2.175, 2.175, 2.175, 2.61, 2.61, 2.61),
    ddq_max=_row(15.0, 7.5, 10.0, 12.5, 15.0, 20.0, 20.0),
    dddq_max=_row(7500.0, 3750.0, 5000.0, 6250.0, 7500.0, 10000.0, 10000.0),
    offset=_row(0.1),
    decel=_row(7.0),
    ee_speed=1.7,
    ee_turn=2.5,
)
ROBOTS = {limits.name: limits for limits in (FR3, PANDA)}


def limits_of(name: str) -> RobotLimits:
    """The limits of a robot model.

    Raises:
        UserError: an unknown name.
    """
    if name not in ROBOTS:
        raise UserError(f"There is no robot {name!r}. {did_you_mean(name, ROBOTS)}")
    return ROBOTS[name]
