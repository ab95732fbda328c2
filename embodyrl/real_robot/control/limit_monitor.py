"""Checks a stream of commands against the robot's limits, independently of the safety filter."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from embodyrl.real_robot.control.limits import RobotLimits
from embodyrl.real_robot.control.messages import Command

_ROUNDING = 1e-7


@dataclass
class LimitMonitor:
    """Checks each command, and whether it follows from the one before.

    Attributes:
        limits: of the robot.
        tick: s between two commands.
        peak: for each limit the largest share that was used; above 1 is a violation.
        ticks: number of commands seen.
        last: the command before; None where the next one need not follow from it.
    """

    limits: RobotLimits
    tick: float
    peak: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("q", "dq", "ddq", "dddq", "motion"), 0.0)
    )
    ticks: int = 0
    last: Command | None = None

    def see(self, command: Command) -> None:
        """Notes how close to each limit a command is."""
        limits = self.limits
        # Angle, as the distance from the middle of the range; velocity, against limits that depend
        # on the angle; acceleration.
        low, high = limits.velocity_bounds(command.q)
        from_middle = (2 * command.q - limits.q_max - limits.q_min) / (limits.q_max - limits.q_min)
        upwards = (command.dq - _ROUNDING) / np.maximum(high, 1e-9)
        downwards = (command.dq + _ROUNDING) / np.minimum(low, -1e-9)
        share = {
            "q": float(np.abs(from_middle).max()),
            "dq": float(np.maximum(upwards, downwards).max()),
            "ddq": float(np.abs(command.ddq / limits.ddq_max).max()),
        }
        if self.last is not None:
            dt = self.tick
            before = self.last
            # Jerk, as the change of the acceleration.
            jerk = np.abs(command.ddq - before.ddq) / dt
            share["dddq"] = float((jerk / limits.dddq_max).max()) - _ROUNDING
            # A motion whose jerk is at most J stays within J dt^3 / 6 of the parabola that the last
            # angles, velocities and accelerations predict.
            miss = np.abs(command.q - before.q - before.dq * dt - before.ddq * dt * dt / 2)
            share["motion"] = float((miss / (limits.dddq_max * dt**3 / 6 + _ROUNDING)).max())
        for name, value in share.items():
            # A value that is not a number stays, and is a violation.
            if value > self.peak[name] or math.isnan(value):
                self.peak[name] = value
        self.last = command
        self.ticks += 1

    @property
    def violated(self) -> dict[str, float]:
        """The limits that were broken, with the share that was used."""
        return {name: value for name, value in self.peak.items() if not value <= 1.0}
