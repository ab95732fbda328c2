"""Checks a stream of commands against the bounds of the safety config, by the hand that they move.

It uses none of the filter's own checks: the hand comes from the commanded joints by forward
kinematics, whatever the filter's reference was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from embodyrl.real_robot.control import kinematics, limits
from embodyrl.real_robot.control.joint_tracking import Stopper
from embodyrl.real_robot.control.messages import Array, Command
from embodyrl.real_robot.control.safety_config import BOX_SLACK, TILT_SLACK, SafetyConfig

BOX_BULGE = 0.005
"""m by which a braking hand may leave the workspace beyond twice ``BOX_SLACK``."""
TILT_BULGE = 0.01
"""rad by which a braking hand may be tilted beyond twice ``TILT_SLACK``."""
SPEED_BULGE = 0.02
"""m/s by which a braking hand may be faster than 1.05 ``ee_speed``.

Each joint stops as soon as it can. Where one moved against another, the hand may be faster for a
moment when the first has stopped. The filter foresees this to within the time in which the
accelerations change.
"""
TURN_BULGE = 0.05
"""rad/s by which a braking hand may turn faster than 1.05 ``ee_turn``."""
_ROUNDING = 1e-7


@dataclass
class BoundMonitor:
    """Checks each command of a filter.

    Attributes:
        config: of the filter.
        peak: for each bound the largest value that was seen, in the config's unit: ``box`` (m
            outside), ``tilt`` (rad beyond ``max_tilt``), ``speed`` and ``turn`` (of the hand),
            ``lead`` (rad by which a command that did not brake increased a lead to more than
            ``max_lead``), and ``braking_speed`` and ``braking_turn``, of the hand while it brakes.
        last: the command before.
    """

    config: SafetyConfig
    peak: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("box", "tilt", "speed", "turn", "lead", "braking_speed", "braking_turn"), 0.0
        )
    )
    last: Command | None = None

    def __post_init__(self) -> None:
        self._pose = np.zeros(3), np.eye(3)  # of the hand at the command before
        self._stopper = Stopper(limits.limits_of(self.config.robot).inside())

    def see(self, command: Command, measured: Array) -> None:
        """Notes how close to each bound a command is.

        Args:
            command: of the filter.
            measured: (7,) rad, the joints from which the filter made it.
        """
        c = self.config
        position, rotation, _ = kinematics.forward(command.q)
        self._note("box", float(np.max(position - c.box_high)))
        self._note("box", float(np.max(c.box_low - position)))
        tilt = float(np.linalg.norm(kinematics.rotation_vector(rotation @ kinematics.DOWN.T)))
        self._note("tilt", tilt - c.max_tilt)
        if self.last is not None:
            before, turned = self._pose
            moved = float(np.linalg.norm(position - before)) / c.tick
            turn = float(np.linalg.norm(kinematics.rotation_vector(rotation @ turned.T))) / c.tick
            brakes = self._brakes(command)
            self._note("braking_speed" if brakes else "speed", moved)
            self._note("braking_turn" if brakes else "turn", turn)
            lead = float(np.abs(command.q - measured).max())
            if not brakes and not lead <= float(np.abs(self.last.q - measured).max()) + _ROUNDING:
                self._note("lead", lead)
        self.last = command
        self._pose = position, rotation

    def _brakes(self, command: Command) -> bool:
        """Whether the command is the first tick of the hardest stop from the one before."""
        last = self.last
        assert last is not None
        path = self._stopper.plan((last.q.tolist(), last.dq.tolist(), last.ddq.tolist()))
        stop = path.at_time(self.config.tick)[0]
        return bool(np.abs(command.q - stop).max() <= _ROUNDING)

    def _note(self, name: str, value: float) -> None:
        # A value that is not a number stays, and is a violation.
        if value > self.peak[name] or math.isnan(value):
            self.peak[name] = value

    @property
    def violated(self) -> dict[str, float]:
        """The bounds that were broken, with the largest value that was seen."""
        c = self.config
        allowed = {
            "box": 2 * BOX_SLACK + BOX_BULGE,
            "tilt": 2 * TILT_SLACK + TILT_BULGE,
            "speed": c.ee_speed + _ROUNDING,
            "turn": c.ee_turn + _ROUNDING,
            "lead": c.max_lead + _ROUNDING,
            "braking_speed": 1.05 * c.ee_speed + SPEED_BULGE,
            "braking_turn": 1.05 * c.ee_turn + TURN_BULGE,
        }
        return {name: value for name, value in self.peak.items() if not value <= allowed[name]}
