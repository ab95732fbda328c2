"""The settings of the safety filter of an arm whose shape it does not know: limits of its motors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from embodyrl.errors import UserError
from embodyrl.real_robot.control.config_checks import require_number
from embodyrl.real_robot.control.joint_space import JointSpace, Motor
from embodyrl.real_robot.control.limits import RobotLimits

SLACK = 0.02
"""How far beyond its range a motor may be when the arm starts: rad, or 2 percent.

The positions that are told stay inside the range, to within the rounding of the tracking.
"""
MOST_MOTORS = 32


@dataclass(frozen=True)
class JointSafetyConfig:
    """How far and how fast the motors may go. There is no workspace: the arm's shape is not known.

    The filter counts a motor in percent as 0.01 rad each, so that the same settings hold for all.

    Attributes:
        joints: name of each motor -> lowest and highest position, in LeRobot's units; in the order
            of the policy's numbers.
        home: name of each motor -> where it goes, slowly, before an episode; a motor that is not
            named stays, and with none the arm stays.
        percent: those of them that LeRobot counts from 0 to 100 or from -100 to 100; the others are
            in degrees.
        speed: rad/s, largest speed of a motor.
        acceleration: rad/s^2, largest acceleration of a motor.
        jerk: rad/s^3, largest jerk of a motor.
        tick: s between two commands.
        max_lead: rad by which the commanded motors may be ahead of the measured ones. A gripper that
            holds something is told no more than this beyond it.
        max_error: rad between commanded and measured motors beyond which it is a fault.
        max_target_age: s without a fresh target after which the filter holds.
        max_state_age: s without a fresh state after which it is a fault.
        max_gap: s between two ticks after which the filter holds.
        follow: share of the acceleration and jerk limits that tracking uses; stops use all.
        resume: who ends a hold that a stale target caused: ``"person"``, or a ``"fresh_target"``.

    Raises:
        UserError: a limit that is not a finite number, or that no such arm has.
    """

    joints: dict[str, Any] = field(default_factory=dict)
    home: dict[str, float] = field(default_factory=dict)
    percent: tuple[str, ...] = ("gripper",)
    speed: float = 1.0
    acceleration: float = 5.0
    jerk: float = 100.0
    tick: float = 0.02
    max_lead: float = 0.3
    max_error: float = 0.5
    max_target_age: float = 0.3
    max_state_age: float = 0.3
    max_gap: float = 0.1
    follow: float = 0.8
    resume: str = "person"

    # What only an arm has that the filter knows: force, and reflexes of its own controller.
    max_force = None
    max_force_repeat = None
    recover_reflex = False

    def __post_init__(self) -> None:
        self._check_joints()
        if self.resume not in ("person", "fresh_target"):
            raise UserError(f"resume is {self.resume!r}; it must be 'person' or 'fresh_target'.")
        require_number("safety.tick", self.tick, 1e-3, 0.05, "the filter runs at 20 to 1000 Hz")
        ages = f"seconds, at least a tick ({self.tick:g} s)"
        for key, low, high, why in (
            ("speed", 1e-2, 10.0, "rad/s"),
            ("acceleration", 1e-1, 10.0, "rad/s^2"),
            ("jerk", 10.0 * self.acceleration, 1e4, "rad/s^3, at least 10 times the acceleration"),
            ("max_lead", 1e-2, 1.0, "rad, and with more a blocked arm would jump when it is free"),
            ("max_error", self.max_lead, 1.5, "rad, and no less than safety.max_lead"),
            ("max_target_age", self.tick, 10.0, ages),
            ("max_state_age", self.tick, 10.0, ages),
            ("max_gap", self.tick, 10.0, ages),
            ("follow", 1e-3, 1.0, "it is a share of the limits"),
        ):
            require_number(f"safety.{key}", getattr(self, key), low, high, why)

    def _check_joints(self) -> None:
        """Checks the ranges.

        Raises:
            UserError: there are none, or one that cannot be.
        """
        if not isinstance(self.joints, Mapping) or not 0 < len(self.joints) <= MOST_MOTORS:
            raise UserError(
                "safety.joints must give each motor its range in LeRobot's units, such as "
                "{shoulder_pan: [-100, 100], gripper: [0, 100]}."
            )
        for name, ends in self.joints.items():
            two = isinstance(ends, list | tuple) and len(ends) == 2
            numbers = two and all(
                isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
                for x in ends
            )
            if not numbers or not ends[1] - ends[0] >= 5.0 or max(map(abs, ends)) > 1000.0:
                raise UserError(
                    f"safety.joints.{name} is {ends!r}; it must be the motor's lowest and highest "
                    "position, at least 5 units apart, such as [-100, 100]."
                )
        # An arm need not have the gripper that is in percent unless it says otherwise.
        named = () if self.percent == JointSafetyConfig.percent else self.percent
        for key, names in (("percent", named), ("home", self.home)):
            if unknown := [name for name in names if name not in self.joints]:
                raise UserError(f"safety.{key} names {unknown[0]}, which safety.joints has not.")
        # Home lies inside the ranges.
        for name, place in self.home.items():
            low, high = self.joints[name]
            require_number(f"safety.home.{name}", place, low, high, "the motor's range")

    @property
    def robot(self) -> str:
        """What the arm is called."""
        return "lerobot"

    @property
    def motors(self) -> tuple[str, ...]:
        """Names of the motors."""
        return tuple(self.joints)

    @cached_property
    def space(self) -> JointSpace:
        """What the policy's numbers mean."""
        units = {name: "percent" for name in self.percent}
        return JointSpace(
            tuple(
                Motor(str(name), float(low), float(high), units.get(name, "degrees"))
                for name, (low, high) in self.joints.items()
            )
        )

    @cached_property
    def robot_limits(self) -> RobotLimits:
        """The limits of the motors, as the filter counts."""
        row = np.ones(len(self.joints))
        return RobotLimits(
            name=self.robot,
            q_min=self.space.low - SLACK,
            q_max=self.space.high + SLACK,
            dq_max=self.speed * row,
            ddq_max=self.acceleration * row,
            dddq_max=self.jerk * row,
            # A motor can stop before its end at less than its largest acceleration.
            offset=min(0.05, math.sqrt(0.25 * self.acceleration * SLACK)) * row,
            decel=0.5 * self.acceleration * row,
            ee_speed=0.0,
            ee_turn=0.0,
        )
