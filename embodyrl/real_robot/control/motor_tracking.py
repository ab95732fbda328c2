"""Tracking of motor positions, for an arm whose shape is not known."""

from __future__ import annotations

from embodyrl.real_robot.control.joint_safety import JointSafetyConfig
from embodyrl.real_robot.control.joint_tracking import Motion
from embodyrl.real_robot.control.kinematics import clamp
from embodyrl.real_robot.control.messages import JointTarget
from embodyrl.real_robot.control.reference_tracking import ReferenceTracker

RATE = 0.9
"""Share of the largest speed at which the reference moves, so that the motors can catch up."""


class MotorTracker(ReferenceTracker):
    """The commanded motion of an arm; the counterpart of ``tracking.Tracker``."""

    def __init__(self, config: JointSafetyConfig) -> None:
        self.config = config
        space = config.space
        super().__init__(
            config.robot_limits.inside(), space.low, space.high, config.tick, config.follow,
            config.max_lead, together=False,
        )  # fmt: skip
        self._step = RATE * config.speed * config.tick  # rad per tick

    def start_problem(self, q: list[float]) -> str:
        """Why the arm may not start at the positions q (n,); empty if it may."""
        safe = self._safe
        motors = self.config.space.motors
        ends = zip(motors, q, safe.q_min.tolist(), safe.q_max.tolist(), strict=True)
        for k, (motor, at, low, high) in enumerate(ends):
            if not low <= at <= high:
                unit = float(self.config.space.unit[k])
                return (
                    f"{motor.name} is at {at / unit:.1f} {motor.unit}, and safety.joints lets it be "
                    f"from {motor.low:g} to {motor.high:g}"
                )
        return ""

    def start(self, q: list[float]) -> None:
        """Starts at rest at the positions q (n,)."""
        self._begin(q)
        self.restart_reference()

    def restart_reference(self) -> None:
        """Puts the reference to where the arm is told to be now."""
        self._q_ref = self.motion[0]

    def follow(self, measured: list[float], target: JointTarget) -> None:
        """Moves on by one tick towards the target, or as far as the arm can still stop.

        Args:
            measured: (n,) positions.
            target: finite.
        """
        # Each motor keeps its lead by itself: a gripper that holds something stops no other.
        goal = clamp(target.q.tolist(), self._ref_low, self._ref_high)
        q_ref = _within(self._step, self._q_ref, goal)
        self._take(self._track(_within(self.config.max_lead, measured, q_ref)), measured)

    def _take(self, motion: Motion, measured: list[float]) -> None:
        """Moves on to ``motion``, but brakes each motor that would lead too far by it.

        The limits of the motors are kept by ``joint_tracking``.
        """
        q, dq, ddq = (list(row) for row in motion)
        path = self._stopper.plan(motion)
        end = list(path.at_time(path.duration)[0])
        leads = [
            self._leads(told, before, at)
            for told, before, at in zip(
                zip(end, q, strict=True),
                zip(self._end, self.motion[0], strict=True),
                measured,
                strict=True,
            )
        ]
        # Those motors take the first tick of the stop from the state before.
        if any(leads):
            stop = self._joints.brake(self.motion)
            for k in (k for k, leading in enumerate(leads) if leading):
                q[k], dq[k], ddq[k] = (row[k] for row in stop)
                end[k] = self._end[k]  # a stop ends where it was foreseen
        self.motion = (q, dq, ddq)
        self._end = end

    def _leads(self, told: tuple[float, float], before: tuple[float, float], at: float) -> bool:
        """Whether one of two places is too far from where the motor is, and further than before."""
        return any(
            abs(new - at) > self.config.max_lead and abs(new - at) > abs(old - at)
            for new, old in zip(told, before, strict=True)
        )


def _within(most: float, centre: list[float], x: list[float]) -> list[float]:
    """Each number of ``x``, at most ``most`` away from that of ``centre``."""
    return clamp(x, [c - most for c in centre], [c + most for c in centre])
