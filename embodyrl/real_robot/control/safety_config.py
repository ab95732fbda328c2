"""The settings of the safety filter: where and how the robot may move."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embodyrl.errors import UserError

BOX_SLACK = 0.005
"""How far (m) beyond the workspace a stop may lead.

The reference itself never leaves the workspace. Without slack, an arm that works at the boundary,
such as a hand that grasps from a table, would brake at every rounding error. An arm that is pushed
along the boundary may come to twice the slack, a little per tick; else it would stick there.
"""


@dataclass(frozen=True)
class SafetyConfig:
    """Where and how the robot may move. The box has no default: whoever deploys must know it.

    Attributes:
        box_low: (3,) m, lower corner of the workspace of the tool centre point, in the base's
            frame. It is kept to within ``BOX_SLACK``, and to twice that where the arm is pushed
            along the boundary.
        box_high: (3,) m, upper corner.
        robot: model, a key of ``limits.ROBOTS``.
        tick: s between two commands.
        max_tilt: rad, how far the hand may turn from pointing down with its fingers along y.
        ee_speed: m/s, largest speed of the reference's position.
        ee_turn: rad/s, largest turning rate of the reference.
        max_lead: rad, how far the reference may be ahead of the measured joints, so that a blocked
            arm does not jump when it comes free.
        max_error: rad between commanded and measured joints beyond which it is a fault.
        max_target_age: s without a fresh target after which the filter holds.
        max_state_age: s without a fresh state after which it is a fault.
        max_gap: s between two ticks after which the filter holds.
        max_force: N, external force at the hand beyond which it is a fault.
        follow: share of the acceleration and jerk limits that tracking uses; stops use all.
        resume: who ends a hold that a stale target caused: ``"person"``, or a ``"fresh_target"``.
        recover_reflex: whether ``clear`` may follow a reflex of the robot's own controller.
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
    max_force: float = 30.0
    follow: float = 0.8
    resume: str = "person"
    recover_reflex: bool = False

    def __post_init__(self) -> None:
        has_corners = len(self.box_low) == 3 and len(self.box_high) == 3
        if not has_corners or not np.less(self.box_low, self.box_high).all():
            raise UserError(
                f"The workspace {self.box_low} to {self.box_high} is not a box. Give x, y and z of "
                "its lower and its upper corner."
            )
        if self.resume not in ("person", "fresh_target"):
            raise UserError(f"resume is {self.resume!r}; it must be 'person' or 'fresh_target'.")
        if not 1e-3 <= self.tick <= 0.05:
            raise UserError(f"tick is {self.tick} s; the filter runs at 20 to 1000 Hz.")
        if not 0.0 < self.follow <= 1.0:
            raise UserError(
                f"follow is {self.follow}; it is a share of the limits, above 0 and at most 1."
            )
