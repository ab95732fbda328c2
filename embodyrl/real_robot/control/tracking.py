"""Motion that can always stop: jerk-limited tracking of a pose, inside joint limits and a workspace.

A tracked step is let through only if the stop that would follow it keeps all limits
(``_Joint.can_stop``, ``_overshoot``); else the tick belongs to the stop from the state before,
which had passed the same test. So no limit is ever broken, whatever the targets are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from ruckig import (
    ControlInterface,
    InputParameter,
    OutputParameter,
    Ruckig,
    RuckigError,
    Synchronization,
    Trajectory,
)

from embodyrl.errors import UserError
from embodyrl.real_robot.control import kinematics, limits
from embodyrl.real_robot.control.limits import RobotLimits
from embodyrl.real_robot.control.messages import Array, Target

BOX_SLACK = 0.005
"""How far (m) beyond the workspace a stop may lead. The reference never leaves it; without slack an arm that works at
the very wall, as a hand does that grasps from a table, would be braked at every rounding. An arm
that is pushed along a wall may come to twice as much, a little per tick, or it would stick
there."""
IK_RATE = 3.0
"""rad/s, how fast the fastest joint of the reference turns: about what the joints can do."""
POSTURE_RATE = 2.5
"""1/s, how fast redundant motion goes back to the home posture: as in the simulated tasks."""
Motion = tuple[list[float], list[float], list[float]]
"""Angles, velocities and accelerations of the seven joints. Floats, since numpy costs more than seven of anything."""


@dataclass(frozen=True)
class SafetyConfig:
    """Where and how the robot may move. The box has no default: whoever deploys must know it.

    Attributes:
        box_low: (3,) m, corner of the workspace of the tool centre point, in the base's frame; kept
            to within ``BOX_SLACK``, and twice that where the arm is pushed along a wall.
        box_high: (3,) m, the opposite corner.
        robot: model, a key of ``limits.ROBOTS``.
        tick: s between two commands.
        max_tilt: rad, how far the hand may turn from pointing down with its fingers along y.
        ee_speed: m/s, of the reference that is followed.
        ee_turn: rad/s, the same for its rotation.
        max_lead: rad, how far the reference may be ahead of the measured joints: a blocked arm
            stores up no jerk.
        max_error: rad between commanded and measured joints that is a fault, e.g. because the state
            is frozen.
        max_target_age: s without a fresh target until the filter holds.
        max_state_age: s without a fresh state until it is a fault.
        max_gap: s between two ticks after which the filter holds.
        max_force: N at the hand that is a fault.
        follow: share of the acceleration and jerk limits that tracking uses; stops may use all.
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
        if (
            len(self.box_low) != 3
            or len(self.box_high) != 3
            or not np.less(self.box_low, self.box_high).all()
        ):
            raise UserError(
                f"The workspace box {self.box_low} to {self.box_high} is not one: give x, y, z of "
                "both corners."
            )
        if self.resume not in ("person", "fresh_target"):
            raise UserError(f"resume is {self.resume!r}; it must be 'person' or 'fresh_target'.")
        if not 1e-3 <= self.tick <= 0.05:
            raise UserError(f"tick is {self.tick} s; the filter runs at 20 to 1000 Hz.")
        if not 0.0 < self.follow <= 1.0:
            raise UserError(
                f"follow is {self.follow}; it is a share of the limits, above 0 and at most 1."
            )


class Tracker:
    """The motion of one arm: ``motion`` is where it was last told to be."""

    def __init__(self, config: SafetyConfig) -> None:
        self.config = config
        self.limits = safe = limits.find(config.robot).inside()
        self._low = np.array(config.box_low)
        self._high = np.array(config.box_high)
        # Where the velocity limit has fallen to zero, and a little before.
        dead = safe.offset**2 / (2.0 * _decel(safe)) + 2e-3
        self._ref_low = safe.q_min + dead
        self._ref_high = safe.q_max - dead
        # Joints that arrive together keep the hand near the straight way.
        self._joints = JointTracker(safe, config.tick, config.follow, together=True)
        self._stopper = Stopper(safe)

    def start(self, q: Array) -> None:
        """At rest at the joint angles q (7,)."""
        self.motion: Motion = (q.tolist(), [0.0] * 7, [0.0] * 7)
        self._outside = max(self._overshoot(self.motion), 0.0)
        self.aim()

    def aim(self) -> None:
        """The reference begins anew where the arm is told to be."""
        self._q_ref = np.array(self.motion[0])
        self._position, self._rotation, _ = kinematics.forward(self._q_ref)

    def brake(self) -> None:
        """One tick of the hardest stop; at rest it stays where it is."""
        self.motion = self._joints.brake(self.motion)

    def follow(self, measured: Array, target: Target) -> None:
        """One tick towards the target, or as far as one can still stop.

        Args:
            measured: (7,) joint angles.
            target: finite.
        """
        self.motion = self._tracked(self.motion, measured, target)

    def _tracked(self, before: Motion, measured: Array, target: Target) -> Motion:
        c = self.config
        self._move_reference(target)
        q_ref = kinematics.ik_step(
            self._q_ref, self._position, self._rotation, self._ref_low, self._ref_high,
            max_step=IK_RATE * c.tick, posture_gain=POSTURE_RATE * c.tick,
        )  # fmt: skip
        q_ref = _clamp(self._near(measured, q_ref), self._ref_low, self._ref_high)
        ahead = ((q_ref - self._q_ref) / c.tick).tolist()
        self._q_ref = q_ref
        motion = self._joints.follow(before, q_ref.tolist(), ahead)
        # The stop from an accepted motion ends where it was foreseen, so braking makes this no
        # larger. A little more each tick, up to twice the slack, lets an arm at the wall slide
        # along it.
        outside = max(self._overshoot(motion), 0.0)
        if outside > max(min(self._outside + 1e-4, 2 * BOX_SLACK), BOX_SLACK):
            return self._joints.brake(before)
        self._outside = outside
        return motion

    def _near(self, measured: Array, q_ref: Array) -> Array:
        """The reference, at most ``max_lead`` from the measured joints: all joints in proportion.

        Were each held back for itself they would lead the hand elsewhere, through a table perhaps.
        """
        lead = q_ref - measured
        far = float(np.abs(lead).max())
        return (
            q_ref if far <= self.config.max_lead else measured + lead * (self.config.max_lead / far)
        )

    def _move_reference(self, target: Target) -> None:
        """The pose that is followed: inside the box, never turned too far, and moving at a bounded speed."""
        c = self.config
        way = _clamp(target.position, self._low, self._high) - self._position
        length = math.sqrt(float(way @ way))
        if length > c.ee_speed * c.tick:
            way *= c.ee_speed * c.tick / length
        self._position = self._position + way
        goal = _turned_at_most(kinematics.DOWN, target.rotation, c.max_tilt)
        self._rotation = _turned_at_most(self._rotation, goal, c.ee_turn * c.tick)

    def _overshoot(self, motion: Motion) -> float:
        """How far (m) outside the workspace a stop from here would lead, half way or at its end; below 0 inside."""
        path = self._stopper.plan(motion)
        return max(
            self._outside_box(path.at_time(share * path.duration)[0]) for share in (0.5, 1.0)
        )

    def _outside_box(self, q: list[float]) -> float:
        """How far (m) outside the workspace the hand is at angles q (7,); below 0 inside."""
        (x0, y0, z0) = self.config.box_low
        (x1, y1, z1) = self.config.box_high
        x, y, z = kinematics.tip(q)
        return max(x - x1, y - y1, z - z1, x0 - x, y0 - y, z0 - z)


class JointTracker:
    """Jerk-limited tracking of seven joint angles from which the arm can always stop; it knows of no workspace.

    Args:
        limits: that no step breaks.
        tick: s, of a step.
        share: of the acceleration and jerk limits that tracking uses; stops may use all.
        together: whether all joints arrive at the same time.
    """

    def __init__(
        self, limits: RobotLimits, tick: float, share: float = 1.0, together: bool = False
    ) -> None:
        self._tick = tick
        self._ruckig = Ruckig(7, tick)
        self._stopper = Stopper(limits)
        way = Synchronization.Time if together else Synchronization.No
        self._in = _inputs(limits, share, way)
        self._out = OutputParameter(7)
        r = limits
        decel2 = 2.0 * _decel(limits)
        lead = tick + 2.0 * r.ddq_max / r.dddq_max
        room = (r.dq_max + r.offset) ** 2 / decel2
        rows = (r.q_min, r.q_max, r.dq_max, r.ddq_max, r.dddq_max, r.offset, decel2, lead, room)
        self._joints = [_Joint(*row) for row in np.stack(rows, axis=1).tolist()]

    def brake(self, before: Motion) -> Motion:
        """One tick of the hardest stop."""
        return self._stopper.plan(before).at_time(self._tick)

    def follow(self, before: Motion, q_ref: list[float], v_ref: list[float]) -> Motion:
        """One tick towards angles ``q_ref`` (7,) that move at ``v_ref`` (7,); a joint that could not stop brakes."""
        joints = self._joints
        inputs = self._in
        out = self._out
        caps = [
            joint.caps(q, dq) for joint, q, dq in zip(joints, before[0], before[1], strict=True)
        ]
        inputs.current_position, inputs.current_velocity, inputs.current_acceleration = before
        inputs.target_position = q_ref
        inputs.target_velocity = [
            joint.arrive(v, r - q, dq, cap)
            for joint, v, r, q, dq, cap in zip(
                joints, v_ref, q_ref, before[0], before[1], caps, strict=True
            )
        ]
        inputs.min_velocity = [low for low, _ in caps]
        inputs.max_velocity = [high for _, high in caps]
        try:
            if self._ruckig.update(inputs, out) < 0:
                return self.brake(before)
        except RuckigError:  # its search fails now and then on numbers near the rounding error
            return self.brake(before)
        q = out.new_position
        dq = out.new_velocity
        ddq = out.new_acceleration
        able = [joint.can_stop(*each) for joint, *each in zip(joints, q, dq, ddq, strict=True)]
        if not all(able):
            stop = self.brake(before)
            for k in range(7):
                if not able[k]:
                    q[k], dq[k], ddq[k] = (each[k] for each in stop)
        return q, dq, ddq


def _decel(limits: RobotLimits) -> Array:
    """How fast the velocity limit may fall: no faster than a stop slows down, at the acceleration limit."""
    return np.minimum(limits.decel, 0.9 * limits.ddq_max)


class Stopper:
    """The hardest stop within a robot's limits; each joint stops as soon as it can."""

    def __init__(self, limits: RobotLimits) -> None:
        self._ruckig = Ruckig(7)
        self._inputs = _inputs(limits, 1.0, Synchronization.No)
        self._path = Trajectory(7)
        self._inputs.control_interface = ControlInterface.Velocity
        self._inputs.target_velocity = [0.0] * 7

    def plan(self, motion: Motion) -> Trajectory:
        """The stop from ``motion``; valid until the next call."""
        inputs = self._inputs
        inputs.current_position, inputs.current_velocity, inputs.current_acceleration = motion
        self._ruckig.calculate(inputs, self._path)
        return self._path


def _inputs(limits: RobotLimits, share: float, way: Synchronization) -> InputParameter:
    inputs = InputParameter(7)
    inputs.synchronization = way
    inputs.max_velocity = limits.dq_max.tolist()
    inputs.max_acceleration = (share * limits.ddq_max).tolist()
    inputs.max_jerk = (share * limits.dddq_max).tolist()
    return inputs


class _Joint(NamedTuple):
    """The limits of one joint, drawn in; the speed limit towards an end is sqrt(decel2 * room) - offset.

    All of it is floats and comparisons: seven joints a tick, and a call of ``min`` costs more than
    what it compares.
    """

    q_min: float
    q_max: float
    dq_max: float
    ddq_max: float
    dddq_max: float
    offset: float
    decel2: float
    lead: float
    """s that a joint goes on at its speed before a stop takes hold, at most."""
    open: float
    """rad from an end, beyond which the speed limit is the constant one."""

    def can_stop(self, q: float, dq: float, ddq: float) -> bool:
        """Whether the hardest stop from here keeps the velocity limit, and with it both ends of the joint."""
        return self._keeps(self.q_max - q, dq, ddq) and self._keeps(q - self.q_min, -dq, -ddq)

    def _keeps(self, room: float, v: float, a: float) -> bool:
        """The same for one end, ``room`` away, with v and a towards it.

        While the acceleration falls to -A the velocity rises to at most v + a^2/2J, and the joint
        goes at most that times (a + A)/J. From there on it slows down at A, faster than the limit
        falls (at most D v / (v + offset), with D < A).
        """
        if a < 0.0:
            a = 0.0
        peak = v + 0.5 * a * a / self.dddq_max
        if peak <= 0.0:
            return True
        room -= peak * (a + self.ddq_max) / self.dddq_max
        if room >= self.open:
            return peak <= self.dq_max
        return room > 0.0 and peak <= math.sqrt(self.decel2 * room) - self.offset

    def caps(self, q: float, dq: float) -> tuple[float, float]:
        """Velocities to track under, a little inside what ``can_stop`` asks, so that it seldom has to say no."""
        lead = dq * self.lead
        below = q - self.q_min
        above = self.q_max - q
        if lead > 0.0:
            above -= lead
        else:
            below += lead
        return -self._cap(below), self._cap(above)

    def _cap(self, room: float) -> float:
        if room >= self.open:
            return 0.95 * self.dq_max
        free = math.sqrt(self.decel2 * room) - self.offset if room > 0.0 else 0.0
        return 0.95 * (free if free > 1e-3 else 1e-3)

    def arrive(self, v: float, way: float, dq: float, caps: tuple[float, float]) -> float:
        """The velocity v of the reference, as far as it can be had by the time the arm is there.

        Asked to arrive faster than the ``way`` lets it become, ruckig would first move back for a
        run-up.
        """
        if -1e-6 < v < 1e-6:
            return 0.0
        if v > 0.0:
            square = (dq * dq if dq > 0.0 else 0.0) + (self.ddq_max * way if way > 0.0 else 0.0)
            top = 0.9 * caps[1]
            fast = v if v * v <= square else math.sqrt(square)
            return fast if fast < top else top
        square = (dq * dq if dq < 0.0 else 0.0) + (-self.ddq_max * way if way < 0.0 else 0.0)
        top = 0.9 * caps[0]
        fast = v if v * v <= square else -math.sqrt(square)
        return fast if fast > top else top


def _clamp(x: Array, low: Array | float, high: Array | float) -> Array:
    """np.clip at a third of its overhead."""
    return np.minimum(np.maximum(x, low), high)


def _turned_at_most(start: Array, goal: Array, angle: float) -> Array:
    """The rotation ``goal``, or where the way from ``start`` to it has gone through ``angle``."""
    if float(np.vdot(goal, start)) >= 1.0 + 2.0 * math.cos(angle):  # trace of goal @ start.T
        return goal
    turn = kinematics.rotation_vector(goal @ start.T)
    length = math.sqrt(float(turn @ turn))
    return goal if length <= angle else kinematics.exp_rotation(turn * (angle / length)) @ start
