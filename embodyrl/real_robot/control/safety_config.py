"""The settings of the safety filter: where and how the robot may move."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from embodyrl.errors import UserError
from embodyrl.real_robot.control import limits
from embodyrl.real_robot.control.config_checks import require_number

BOX_SLACK = 0.005
"""How far (m) beyond the workspace a stop may lead.

The reference itself never leaves the workspace. Without slack, an arm that works at the boundary,
such as a hand that grasps from a table, would brake at every rounding error. An arm that is pushed
along the boundary may come to twice the slack, a little per tick; else it would stick there.
"""
TILT_SLACK = 0.02
"""How far (rad) beyond ``max_tilt`` a stop may lead; twice that as for ``BOX_SLACK``."""
REACH = 2.0
"""m from the base, beyond which no corner of a workspace makes sense: the arm reaches 1.2 m."""


@dataclass(frozen=True)
class SafetyConfig:
    """Where and how the robot may move. The box has no default: whoever deploys must know it.

    All bounds hold for the commands that are sent. ``control.fuzz`` measures by how much the hand
    may pass them for a moment while the arm brakes, and ``BoundMonitor`` states it.

    Attributes:
        box_low: (3,) m, lower corner of the workspace of the tool centre point, in the base's
            frame. It is kept to within ``BOX_SLACK``, and to twice that where the arm is pushed
            along the boundary.
        box_high: (3,) m, upper corner.
        robot: model, a key of ``limits.ROBOTS``.
        tick: s between two commands.
        max_tilt: rad, how far the hand may turn from pointing down with its fingers along y. It is
            kept to within ``TILT_SLACK``, and to twice that where the arm is pushed along it.
        ee_speed: m/s, largest speed of the hand.
        ee_turn: rad/s, largest turning rate of the hand.
        max_lead: rad, how far the commanded joints, and the place where a stop would bring them,
            may be ahead of the measured ones, so that a blocked arm does not jump when it comes
            free. Beyond it the arm brakes or comes back.
        max_error: rad between commanded and measured joints beyond which it is a fault.
        max_target_age: s without a fresh target after which the filter holds.
        max_state_age: s without a fresh state, or without a fresh force where ``max_force`` is
            given, after which it is a fault.
        max_gap: s between two ticks after which the filter holds.
        max_force: N, external force at the hand beyond which it is a fault. The robot must report
            the force. None goes without a force stop.
        max_force_repeat: s for which the force may stay bit-identical under new stamps, after which
            it is a fault: a sensor that repeats its last value would notice no push. None where
            the force has no noise, as that of some simulators.
        follow: share of the acceleration and jerk limits that tracking uses; stops use all.
        resume: who ends a hold that a stale target caused: ``"person"``, or a ``"fresh_target"``.
        recover_reflex: whether ``clear`` may follow a reflex of the robot's own controller.

    Raises:
        UserError: a limit that is not a finite number, or beyond what the robot may do.
    """

    box_low: tuple[float, float, float]
    box_high: tuple[float, float, float]
    robot: str = "fr3"
    tick: float = 0.01
    max_tilt: float = 0.6
    ee_speed: float = 1.0
    ee_turn: float = 2.0
    max_lead: float = 0.2
    max_error: float = 0.3
    max_target_age: float = 0.1
    max_state_age: float = 0.05
    max_gap: float = 0.03
    max_force: float | None = 30.0
    max_force_repeat: float | None = 0.5
    follow: float = 0.8
    resume: str = "person"
    recover_reflex: bool = False

    @cached_property
    def robot_limits(self) -> limits.RobotLimits:
        """Of the robot's model."""
        return limits.limits_of(self.robot)

    @property
    def motors(self) -> tuple[str, ...]:
        """Names of joints that are not ``ROBOT_joint1`` and so on; a Franka has none."""
        return ()

    def __post_init__(self) -> None:
        self._check_box()
        if self.resume not in ("person", "fresh_target"):
            raise UserError(f"resume is {self.resume!r}; it must be 'person' or 'fresh_target'.")
        if not isinstance(self.recover_reflex, bool):
            raise UserError(f"recover_reflex is {self.recover_reflex!r}; it must be true or false.")
        robot = limits.limits_of(self.robot)
        fast = f"the data sheet of the {robot.name} allows no more"
        require_number("safety.tick", self.tick, 1e-3, 0.05, "the filter runs at 20 to 1000 Hz")
        ages = f"seconds, at least a tick ({self.tick:g} s)"
        for key, low, high, why in (
            ("max_tilt", 1e-3, math.pi, "rad, and pi is every direction"),
            ("ee_speed", 1e-3, robot.ee_speed, f"m/s, and {fast}"),
            ("ee_turn", 1e-3, robot.ee_turn, f"rad/s, and {fast}"),
            ("max_lead", 1e-3, 0.5, "rad, and with more a blocked arm would jump when it is free"),
            ("max_error", 1e-3, 1.0, "rad, and with more a blocked arm would go unnoticed"),
            ("max_target_age", self.tick, 10.0, ages),
            ("max_state_age", self.tick, 10.0, ages),
            ("max_gap", self.tick, 10.0, ages),
            ("follow", 1e-3, 1.0, "it is a share of the limits"),
        ):
            require_number(f"safety.{key}", getattr(self, key), low, high, why)
        if self.max_force is not None:
            why = "N at the hand, or null for no force stop"
            require_number("safety.max_force", self.max_force, 0.1, 100.0, why)
        if self.max_force_repeat is not None:
            why = "seconds, or null where the force has no noise"
            require_number("safety.max_force_repeat", self.max_force_repeat, 0.1, 10.0, why)

    def _check_box(self) -> None:
        words = f"The workspace {self.box_low} to {self.box_high} is not a box"
        what_to_do = "Give x, y and z of its lower and its upper corner."
        has_corners = len(self.box_low) == 3 and len(self.box_high) == 3
        if not has_corners or not np.less(self.box_low, self.box_high).all():
            raise UserError(f"{words}. {what_to_do}")
        if not (np.abs([self.box_low, self.box_high]) <= REACH).all():
            raise UserError(f"{words} within {REACH:g} m of the robot's base. {what_to_do}")
