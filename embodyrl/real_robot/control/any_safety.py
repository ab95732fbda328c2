"""What differs between an arm whose kinematics the safety filter knows and one of LeRobot's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from embodyrl.errors import UserError
from embodyrl.real_robot.control.actions import DeltaDecoder, action_space
from embodyrl.real_robot.control.joint_safety import JointSafetyConfig
from embodyrl.real_robot.control.joint_space import JointDecoder, JointSpace, joint_space
from embodyrl.real_robot.control.motor_tracking import MotorTracker
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.real_robot.control.tracking import Tracker

Safety = SafetyConfig | JointSafetyConfig
Decoder = DeltaDecoder | JointDecoder


def tracker_for(safety: Safety) -> Tracker | MotorTracker:
    """The tracker of an arm with these settings."""
    return MotorTracker(safety) if isinstance(safety, JointSafetyConfig) else Tracker(safety)


def decoder_for(metadata: Mapping[str, Any], control_hz: float, safety: Safety) -> Decoder:
    """A fresh decoder of a policy's actions.

    Args:
        metadata: what the policy's server says about it, or the facts of the data.
        control_hz: actions per second.
        safety: of the arm.

    Raises:
        UserError: the policy was trained for another kind of arm, or for other ranges.
    """
    if isinstance(safety, JointSafetyConfig):
        space = joint_space(metadata)
        require_motors(space, safety.space)
        return JointDecoder(space, control_hz)
    return DeltaDecoder(action_space(metadata), control_hz, safety.box_low, safety.box_high)


def require_motors(policy: JointSpace, arm: JointSpace) -> None:
    """Checks that a policy's numbers mean what the arm's do.

    Raises:
        UserError: naming the first difference.
    """
    # The order counts, too: it is that of the policy's numbers.
    for theirs, ours in zip(policy.motors, arm.motors, strict=False):
        if theirs != ours:
            raise UserError(
                f"The policy was trained with {theirs}, and safety.joints has {ours}: what it sees "
                "and does would mean something else. Give the ranges that its data were recorded "
                "with."
            )
    if policy.dims != arm.dims:
        raise UserError(
            f"The policy was trained with {policy.dims} motors, and safety.joints has {arm.dims}."
        )
