"""What is wrong with the messages that the safety filter gets, in words.

Each comparison is written so that a value that is not a number (NaN) fails it.
"""

from __future__ import annotations

import math

from embodyrl.real_robot.control.any_safety import Safety
from embodyrl.real_robot.control.joint_safety import JointSafetyConfig
from embodyrl.real_robot.control.limits import MAX_WIDTH
from embodyrl.real_robot.control.messages import JointTarget, RobotState, Target

WIDTH_ERROR = 0.02
"""m by which the measured opening of the gripper may be beyond what the gripper can do."""
AT_REST = 0.05
"""rad/s, measured velocity of a joint below which the arm counts as at rest."""


def age_problem(what: str, stamp: float, now: float, limit: float) -> str:
    """Why a message is not fresh; empty if it is.

    Args:
        what: the message, for the sentence.
        stamp: s, when it was measured.
        now: s, by the same clock. It may have been read a little before the message came.
        limit: s, the largest age, and how far a stamp may be in the future.
    """
    age = now - stamp
    if age < -limit:
        return f"the stamp of the {what} is {-age:.3f} s in the future"
    return "" if age <= limit else f"no fresh {what} for {age:.3f} s"


def state_problem(config: Safety, now: float, state: RobotState) -> str:
    """What is wrong with the robot or its state; empty while all is well."""
    if state.reflex:
        return f"reflex: {state.reflex}"
    if state.trouble:
        return state.trouble
    joints = config.robot_limits.q_min.shape
    if (
        state.q.shape != joints
        or state.dq.shape != joints
        or not math.isfinite(sum(state.q.tolist()) + sum(state.dq.tolist()))
    ):
        return f"the robot's state is not {joints[0]} finite angles and velocities"
    if not -WIDTH_ERROR <= state.width <= MAX_WIDTH + WIDTH_ERROR:
        return f"the measured opening of the gripper is {state.width} m, which cannot be"
    if wrong := age_problem("state of the robot", state.stamp, now, config.max_state_age):
        return wrong
    return "" if config.max_force is None else _force_problem(config, now, state)


def _force_problem(config: Safety, now: float, state: RobotState) -> str:
    """What is wrong with the force at the hand, or its measurement."""
    assert config.max_force is not None
    if state.force is None:
        return (
            f"the robot reports no force at the hand, but safety.max_force is {config.max_force:g} "
            "N. Give the robot's wrench (topics.wrench), or set safety.max_force to null: then "
            "nothing stops the arm when it pushes"
        )
    stamp = state.stamp if state.force_stamp is None else state.force_stamp
    if wrong := age_problem("force at the hand", stamp, now, config.max_state_age):
        return wrong
    force = math.hypot(*state.force.tolist()) if state.force.shape == (3,) else math.nan
    if not math.isfinite(force):
        return "the measured force at the hand is not three finite numbers"
    return "" if force <= config.max_force else f"force: {force:.0f} N at the hand"


class RepeatedForceCheck:
    """Notices a force that stays bit-identical under new stamps: a sensor that is frozen.

    A real sensor has noise in every sample. Args: see ``SafetyConfig``.
    """

    def __init__(self, config: Safety) -> None:
        self._limit = None if config.max_force is None else config.max_force_repeat
        self._last: list[float] = []
        self._since = 0.0  # when ``_last`` was first measured

    def problem(self, state: RobotState) -> str:
        """What is wrong with the force of the newest state; empty while it changes."""
        if self._limit is None or state.force is None:
            return ""
        stamp = state.stamp if state.force_stamp is None else state.force_stamp
        force = state.force.tolist()
        if force != self._last:
            self._last = force
            self._since = stamp
        same = stamp - self._since
        if same <= self._limit:
            return ""
        return (
            f"the measured force at the hand is exactly the same for {same:.2f} s. Its sensor or "
            "driver is frozen; where it has no noise, as in a simulator, set "
            "safety.max_force_repeat to null"
        )


def target_problem(config: Safety, target: Target | JointTarget) -> str:
    """What is wrong with a target; empty if it is finite, and of the arm's kind."""
    if isinstance(target, JointTarget) != isinstance(config, JointSafetyConfig):
        return f"a {type(target).__name__} is no target of this arm"
    if isinstance(target, JointTarget):
        if target.q.shape != config.robot_limits.q_min.shape:
            return f"target of shape {target.q.shape}"
        if not math.isfinite(sum(target.q.tolist())):
            return "the target is not finite"
        return "" if math.isfinite(target.stamp) else f"the target's stamp is {target.stamp}"
    return _pose_problem(target)


def _pose_problem(target: Target) -> str:
    """What is wrong with a pose; empty if it is finite, and its rotation is one."""
    if target.position.shape != (3,) or target.rotation.shape != (3, 3):
        return (
            f"target of shapes {target.position.shape} and {target.rotation.shape}, "
            "not (3,) and (3, 3)"
        )
    (a, b, c), (d, e, f), (g, h, i) = target.rotation.tolist()
    x, y, z = target.position.tolist()
    if not math.isfinite(a + b + c + d + e + f + g + h + i + x + y + z + target.width):
        return "the target is not finite"
    if not math.isfinite(target.stamp):
        return f"the target's stamp is {target.stamp}, not a time"
    # A rotation: its first two rows have unit length and are orthogonal, and the third is their
    # cross product.
    products = a * a + b * b + c * c - 1, d * d + e * e + f * f - 1, a * d + b * e + c * f
    third = b * f - c * e - g, c * d - a * f - h, a * e - b * d - i
    return "" if max(map(abs, (*products, *third))) < 1e-3 else "the target's rotation is not one"
