"""Checks a stream of commands against the robot's limits, from outside the filter that made it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from embodyrl.real_robot.control.limits import RobotLimits
from embodyrl.real_robot.control.messages import Command

_ROUNDING = 1e-7


@dataclass
class Watch:
    """Checks each command against the one before.

    Attributes:
        peak: largest share of each limit that was used; above 1 is a violation.
        ticks: commands seen.
    """

    limits: RobotLimits
    tick: float
    peak: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("q", "dq", "ddq", "dddq", "motion"), 0.0)
    )
    ticks: int = 0
    last: Command | None = None

    def see(self, command: Command) -> None:
        """Notes how near to each limit a command is, and whether it follows from the one before."""
        low, high = self.limits.velocity_bounds(command.q)
        share = {
            "q": float(np.abs((2 * command.q - self.limits.q_max - self.limits.q_min)
                              / (self.limits.q_max - self.limits.q_min)).max()),
            "dq": float(np.maximum((command.dq - _ROUNDING) / np.maximum(high, 1e-9),
                                   (command.dq + _ROUNDING) / np.minimum(low, -1e-9)).max()),
            "ddq": float(np.abs(command.ddq / self.limits.ddq_max).max()),
        }  # fmt: skip
        if self.last is not None:
            dt = self.tick
            before = self.last
            jerk = np.abs(command.ddq - before.ddq) / dt
            share["dddq"] = float((jerk / self.limits.dddq_max).max()) - _ROUNDING
            # Any motion whose jerk is bounded by J stays within J dt^3 / 6 of the parabola.
            miss = np.abs(command.q - before.q - before.dq * dt - before.ddq * dt * dt / 2)
            share["motion"] = float((miss / (self.limits.dddq_max * dt**3 / 6 + _ROUNDING)).max())
        for name, value in share.items():
            self.peak[name] = max(self.peak[name], value)
        self.last = command
        self.ticks += 1

    @property
    def violated(self) -> dict[str, float]:
        """The limits that were broken."""
        return {name: value for name, value in self.peak.items() if value > 1.0}
