"""Jerk-limited tracking of joint angles from which the arm can always stop.

``JointTracker`` accepts a step of a joint only if the hardest stop from there keeps the joint's
limits (``_Joint.can_stop``). Otherwise the joint takes the first tick of the stop from the state
before, which had passed the same test. By induction no limit is ever broken, whatever the
reference does. Online trajectories come from ruckig (Berscheid and Kroeger, 2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from ruckig import (
    ControlInterface,
    InputParameter,
    Ruckig,
    RuckigError,
    Synchronization,
    Trajectory,
)

from embodyrl.real_robot.control.limits import RobotLimits
from embodyrl.real_robot.control.messages import Array

Motion = tuple[list[float], list[float], list[float]]
"""Angles, velocities and accelerations of the joints.

They are lists of floats: for so few numbers, numpy's overhead costs more than the arithmetic.
"""


class JointTracker:
    """Tracks joint angles within their limits; it knows of no workspace.

    Args:
        limits: that no step breaks.
        tick: s per step.
        share: share of the acceleration and jerk limits that tracking uses; stops use all.
        together: whether all joints arrive at the same time.
    """

    def __init__(
        self, limits: RobotLimits, tick: float, share: float = 1.0, together: bool = False
    ) -> None:
        self._tick = tick
        self._n = len(limits.q_min)
        self._ruckig = Ruckig(self._n)
        self._stopper = Stopper(limits)
        way = Synchronization.Time if together else Synchronization.No
        self._in = _ruckig_inputs(limits, share, way)
        self._path = Trajectory(self._n)
        # One row of constants per joint, in the order of the fields of ``_Joint``.
        r = limits
        decel2 = 2.0 * usable_deceleration(limits)
        lead = tick + 2.0 * r.ddq_max / r.dddq_max
        room = (r.dq_max + r.offset) ** 2 / decel2
        rows = (r.q_min, r.q_max, r.dq_max, r.ddq_max, r.dddq_max, r.offset, decel2, lead, room)
        self._joints = [_Joint(*row) for row in np.stack(rows, axis=1).tolist()]

    def brake(self, before: Motion) -> Motion:
        """The motion one tick into the hardest stop."""
        return self._stopper.plan(before).at_time(self._tick)

    def follow(self, before: Motion, q_ref: list[float], v_ref: list[float]) -> Motion:
        """The motion one tick further towards a moving reference.

        Args:
            before: the motion now.
            q_ref: (n,) rad, angles of the reference.
            v_ref: (n,) rad/s, its velocities.

        Returns:
            The next motion. A joint that could not stop from there brakes instead.
        """
        joints = self._joints
        inputs = self._in
        # Velocity limits for this tick: they fall as a joint comes near one of its ends.
        lows = []
        highs = []
        arrivals = []
        for joint, q, dq, to, v in zip(joints, *before[:2], q_ref, v_ref, strict=True):
            low, high = joint.caps(q, dq)
            lows.append(low)
            highs.append(high)
            arrivals.append(joint.arrive(v, to - q, dq, low, high))
        # One tick of the time-optimal jerk-limited trajectory to the reference.
        inputs.current_position, inputs.current_velocity, inputs.current_acceleration = before
        inputs.target_position = q_ref
        inputs.target_velocity = arrivals
        inputs.min_velocity = lows
        inputs.max_velocity = highs
        try:
            if self._ruckig.calculate(inputs, self._path) < 0:
                return self.brake(before)
        except RuckigError:  # ruckig's search fails now and then, near the rounding error
            return self.brake(before)
        q, dq, ddq = self._path.at_time(self._tick)
        # Joints that could not stop from there take the first tick of the stop instead.
        able = [joint.can_stop(p, v, a) for joint, p, v, a in zip(joints, q, dq, ddq, strict=True)]
        if not all(able):
            stop = self.brake(before)
            for k in range(self._n):
                if not able[k]:
                    q[k], dq[k], ddq[k] = (each[k] for each in stop)
        return q, dq, ddq


class Stopper:
    """The hardest stop within a robot's limits; each joint stops as soon as it can."""

    def __init__(self, limits: RobotLimits) -> None:
        count = len(limits.q_min)
        self._ruckig = Ruckig(count)
        self._inputs = _ruckig_inputs(limits, 1.0, Synchronization.No)
        self._path = Trajectory(count)
        self._inputs.control_interface = ControlInterface.Velocity
        self._inputs.target_velocity = [0.0] * count

    def plan(self, motion: Motion) -> Trajectory:
        """The stop from ``motion``; valid until the next call."""
        inputs = self._inputs
        inputs.current_position, inputs.current_velocity, inputs.current_acceleration = motion
        self._ruckig.calculate(inputs, self._path)
        return self._path


def usable_deceleration(limits: RobotLimits) -> Array:
    """(n,) rad/s^2, how fast the velocity limit may fall towards a joint's end.

    It stays below the acceleration limit, so that a braking joint slows down faster than its
    velocity limit falls.
    """
    return np.minimum(limits.decel, 0.9 * limits.ddq_max)


def _ruckig_inputs(limits: RobotLimits, share: float, way: Synchronization) -> InputParameter:
    """Ruckig's limits: ``share`` of those of acceleration and jerk."""
    inputs = InputParameter(len(limits.q_min))
    inputs.synchronization = way
    inputs.max_velocity = limits.dq_max.tolist()
    inputs.max_acceleration = (share * limits.ddq_max).tolist()
    inputs.max_jerk = (share * limits.dddq_max).tolist()
    return inputs


@dataclass(slots=True)
class _Joint:
    """The limits of one joint, drawn in; the velocity limit is sqrt(decel2 * room) - offset.

    ``room`` is the angle that is left to the end of the joint. The methods use plain comparisons,
    because they run for each joint at each tick and a call of ``min`` costs more than the comparison.
    """

    q_min: float
    q_max: float
    dq_max: float
    ddq_max: float
    dddq_max: float
    offset: float
    decel2: float
    """Twice the deceleration at which the velocity limit falls, rad/s^2."""
    lead: float
    """Longest time (s) for which a joint keeps its velocity before a stop takes hold."""
    open: float
    """rad from an end, beyond which the velocity limit is the constant ``dq_max``."""

    def can_stop(self, q: float, dq: float, ddq: float) -> bool:
        """Whether the hardest stop from here keeps the velocity limit, and so both ends.

        With A and J the limits of acceleration and jerk, a stop has two phases. While the
        acceleration falls from a to -A, the velocity rises to at most v + a^2 / 2J, and the joint
        moves by at most that peak times (a + A) / J. From then on it decelerates at A, faster than
        the velocity limit falls (at most D v / (v + offset), with D < A). So it is enough to check
        the peak velocity against the limit at the end of the first phase.
        """
        rise = 0.5 * ddq * ddq / self.dddq_max
        up = self.q_max - q
        down = q - self.q_min
        # Written so that values that are not numbers (NaN) are refused.
        if ddq > 0.0:
            return self._keeps(up, dq + rise, ddq) and self._keeps(down, -dq, 0.0)
        return self._keeps(up, dq, 0.0) and self._keeps(down, rise - dq, -ddq)

    def _keeps(self, room: float, peak: float, a: float) -> bool:
        """``can_stop`` for one end, ``room`` away, with peak velocity and a towards that end."""
        if peak <= 0.0:  # the joint moves away from this end
            return True
        room -= peak * (a + self.ddq_max) / self.dddq_max
        if room >= self.open:
            return peak <= self.dq_max
        return room > 0.0 and peak <= math.sqrt(self.decel2 * room) - self.offset

    def caps(self, q: float, dq: float) -> tuple[float, float]:
        """Velocity limits (lowest, highest) for tracking.

        They lie a little inside those of ``can_stop``, so that it seldom has to refuse a step.
        """
        # The joint moves on by about ``lead`` before a stop takes hold.
        lead = dq * self.lead
        below = q - self.q_min
        above = self.q_max - q
        if lead > 0.0:
            above -= lead
        else:
            below += lead
        top = 0.95 * self.dq_max
        low = top if below >= self.open else self._cap(below)
        high = top if above >= self.open else self._cap(above)
        return -low, high

    def _cap(self, room: float) -> float:
        """Largest velocity towards an end that is ``room`` away, and near."""
        free = math.sqrt(self.decel2 * room) - self.offset if room > 0.0 else 0.0
        return 0.95 * (free if free > 1e-3 else 1e-3)

    def arrive(self, v: float, way: float, dq: float, low: float, high: float) -> float:
        """The velocity to arrive at the reference with: its own, as far as that can be reached.

        Asked to arrive faster than the distance allows, ruckig would first move back for a run-up.

        Args:
            v: rad/s, velocity of the reference.
            way: rad from the joint to the reference.
            dq: rad/s, velocity of the joint.
            low: lowest velocity of ``caps``.
            high: largest velocity of ``caps``.
        """
        if -1e-6 < v < 1e-6:
            return 0.0
        # v^2 = dq^2 + 2 a s, with half of the acceleration limit, over the distance ``way``.
        if v > 0.0:
            square = (dq * dq if dq > 0.0 else 0.0) + (self.ddq_max * way if way > 0.0 else 0.0)
            top = 0.9 * high
            fast = v if v * v <= square else math.sqrt(square)
            return fast if fast < top else top
        square = (dq * dq if dq < 0.0 else 0.0) + (-self.ddq_max * way if way < 0.0 else 0.0)
        top = 0.9 * low
        fast = v if v * v <= square else -math.sqrt(square)
        return fast if fast > top else top
