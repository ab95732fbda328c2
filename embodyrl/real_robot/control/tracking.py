"""Tracking of a hand pose from which the arm can always stop inside the workspace.

Each tick moves a reference pose towards the target, turns it into joint angles by inverse
kinematics, and tracks these (``joint_tracking``). A step is accepted only if it keeps the hand's
speed, and if it and the stop that would follow it keep the workspace, the tilt and the lead
(``Tracker._take``). Otherwise the arm takes the first tick of the stop from the state before, which
had passed the same test.
"""

from __future__ import annotations

import math
from math import sumprod
from operator import sub

import numpy as np

from embodyrl.real_robot.control import kinematics, limits
from embodyrl.real_robot.control.joint_tracking import Motion, usable_deceleration
from embodyrl.real_robot.control.messages import Target
from embodyrl.real_robot.control.reference_tracking import ReferenceTracker
from embodyrl.real_robot.control.safety_config import BOX_SLACK, TILT_SLACK, SafetyConfig

IK_RATE = 3.0
"""rad/s of the reference's fastest joint: about what the joints can do."""
POSTURE_RATE = 2.5
"""1/s, how fast redundant motion returns to the home posture, as in the simulated tasks."""
SLIDE = 0.02
"""Share of the slack by which an arm at a boundary may go further out per tick, up to twice it."""
_REACHES = (0.95, 0.95, 0.71, 0.63, 0.23, 0.23, 0.0)
"""m from the axis of each joint to the tool centre point, at most."""
GRACE = 2.2
"""Share of the slack within which the arm may start: it may have stopped at the boundary."""
_DOWN = kinematics.hand_frame(np.zeros(3), kinematics.DOWN)


class Tracker(ReferenceTracker):
    """The commanded motion of a Franka."""

    def __init__(self, config: SafetyConfig) -> None:
        self.config = config
        safe = limits.limits_of(config.robot).inside()
        # The reference stays away from the ends of the joints, where the velocity limit is zero.
        dead = safe.offset**2 / (2.0 * usable_deceleration(safe)) + 2e-3
        # Joints that arrive at the same time keep the hand near the straight line.
        super().__init__(
            safe, safe.q_min + dead, safe.q_max - dead, config.tick, config.follow,
            config.max_lead, together=True,
        )  # fmt: skip
        # The angles beyond which a hand is tilted too far, or turns too fast, as traces.
        self._tilt_trace = 1.0 + 2.0 * math.cos(config.max_tilt)
        self._turn_trace = 1.0 + 2.0 * math.cos(config.ee_turn * config.tick)
        self._ddq_max = safe.ddq_max.tolist()
        self._half_over_jerk = (0.5 / safe.dddq_max).tolist()
        self._max_step = (config.ee_speed * config.tick) ** 2  # m^2 per tick

    def start_problem(self, q: list[float]) -> str:
        """Why the arm may not start at the angles q (7,); empty if it may."""
        for joint, (angle, low, high) in enumerate(
            zip(q, self._safe.q_min.tolist(), self._safe.q_max.tolist(), strict=True)
        ):
            if not low <= angle <= high:
                return f"joint {joint + 1} is at its end ({angle:.3f} rad)"
        # It may have stopped a little beyond the boundary.
        at = kinematics.frame(q)
        if not self._box_excess(at) <= GRACE * BOX_SLACK:
            return f"the hand is at {np.round(at[:3], 3).tolist()}, outside the workspace"
        if not (excess := self._tilt_excess(at)) <= GRACE * TILT_SLACK:
            return (
                f"the hand is turned by {self.config.max_tilt + excess:.2f} rad from pointing "
                f"down, more than safety.max_tilt ({self.config.max_tilt:g})"
            )
        return ""

    def start(self, q: list[float]) -> None:
        """Starts at rest at the joint angles q (7,)."""
        self._begin(q)
        self._excess = max(self._slack_used(kinematics.frame(self.motion[0])), 0.0)
        self.restart_reference()

    def restart_reference(self) -> None:
        """Puts the reference to where the arm is told to be now."""
        self._q_ref = self.motion[0]
        self._at = kinematics.frame(self.motion[0])  # of the commanded hand
        self._goal = self._at  # the reference pose

    def follow(self, measured: list[float], target: Target) -> None:
        """Moves on by one tick towards the target, or as far as the arm can still stop.

        Args:
            measured: (7,) joint angles.
            target: finite.
        """
        c = self.config
        # 1. Move the reference pose towards the target.
        self._move_reference(target)
        # 2. One step of inverse kinematics from the last reference angles towards that pose.
        q_ref = kinematics.ik_step(
            self._q_ref, self._goal, self._ref_low, self._ref_high,
            max_step=IK_RATE * c.tick, posture_gain=POSTURE_RATE * c.tick,
        )  # fmt: skip
        # 3. Keep the reference near the measured joints and inside the joint limits.
        q_ref = self._near(measured, q_ref)
        # 4. Jerk-limited tracking of the reference angles.
        motion = self._track(q_ref)
        # 5. Take the step if it keeps the bounds.
        self._take(motion, measured)

    def _take(self, motion: Motion, measured: list[float]) -> None:
        """Moves on to ``motion`` if it keeps the bounds, else by one tick of the hardest stop.

        The stop from an accepted step ends where it was foreseen, so braking does not increase what
        the stop uses of the slack. An arm at a boundary may use a little more each tick, so that it
        can slide along it.
        """
        at, axes = kinematics.chain(motion[0])
        if self._keeps_speed(at) and self._stop_keeps_speed(at, axes, motion):
            path = self._stopper.plan(motion)
            end = path.at_time(path.duration)[0]
            middle = path.at_time(0.5 * path.duration)[0]
            used = max(
                self._slack_used(at),
                self._slack_used(kinematics.frame(middle)),
                self._slack_used(kinematics.frame(end)),
                0.0,
            )
            may = max(min(self._excess + SLIDE, 2.0), self._excess, 1.0)
            if used <= may and self._keeps_lead(motion[0], end, measured):
                self.motion = motion
                self._at = at
                self._end = end
                self._excess = used
                return
        self.motion = self._joints.brake(self.motion)
        self._at = kinematics.frame(self.motion[0])

    def _keeps_speed(self, at: kinematics.Frame) -> bool:
        """Whether the hand moves and turns no faster than it may, from the last command to this."""
        before = self._at
        x = at[0] - before[0]
        y = at[1] - before[1]
        z = at[2] - before[2]
        if x * x + y * y + z * z > self._max_step:
            return False
        return kinematics.turn_trace(at, before) >= self._turn_trace

    def _stop_keeps_speed(
        self, at: kinematics.Frame, axes: tuple[kinematics.Axis, ...], motion: Motion
    ) -> bool:
        """Whether the hand stays slow enough in the stop that would follow.

        Each joint stops as soon as it can, so a joint that moved against another may leave the
        other one alone. Between two moments at which a joint comes to rest, all velocities are
        linear in time. So the hand's speed is largest at one of these moments.
        """
        c = self.config
        # Until its acceleration is gone, a joint's velocity still changes by a^2 / 2J.
        dq = [
            peak if (peak := rate + a * abs(a) * share) * a > 0.0 else rate
            for rate, a, share in zip(motion[1], motion[2], self._half_over_jerk, strict=True)
        ]
        size = list(map(abs, dq))
        if sumprod(size, _REACHES) <= c.ee_speed and sum(size) <= c.ee_turn:
            return True
        # When each joint comes to rest, and how fast it slows down; what moves longest comes first.
        moving = []
        columns = kinematics.jacobian_columns(at, axes)
        for rate, most, column in zip(dq, self._ddq_max, columns, strict=True):
            slows = most if rate > 0.0 else -most
            moving.append((rate / slows, slows, column))
        moving.sort(reverse=True)
        # The hand's velocity is v - t a, summed over the joints that still move at time t.
        speed = c.ee_speed * c.ee_speed
        turn = c.ee_turn * c.ee_turn
        vx = vy = vz = wx = wy = wz = 0.0
        ax = ay = az = bx = by = bz = 0.0
        for t, slows, (x, y, z, ux, uy, uz) in moving:
            # At the moment when this joint comes to rest.
            sx = vx - t * ax
            sy = vy - t * ay
            sz = vz - t * az
            if sx * sx + sy * sy + sz * sz > speed:
                return False
            sx = wx - t * bx
            sy = wy - t * by
            sz = wz - t * bz
            if sx * sx + sy * sy + sz * sz > turn:
                return False
            # Before that moment it moves, too.
            rate = t * slows
            vx += x * rate
            vy += y * rate
            vz += z * rate
            wx += ux * rate
            wy += uy * rate
            wz += uz * rate
            ax += x * slows
            ay += y * slows
            az += z * slows
            bx += ux * slows
            by += uy * slows
            bz += uz * slows
        # At the beginning all move.
        return vx * vx + vy * vy + vz * vz <= speed and wx * wx + wy * wy + wz * wz <= turn

    def _slack_used(self, at: kinematics.Frame) -> float:
        """How far the hand is beyond the workspace or the tilt, as a share of the slack."""
        box = self._box_excess(at) / BOX_SLACK
        if kinematics.tilt_trace(at) >= self._tilt_trace:
            return box
        return max(box, self._tilt_excess(at) / TILT_SLACK)

    def _box_excess(self, at: kinematics.Frame) -> float:
        """How far (m) the hand is outside the workspace; below 0 inside."""
        (x0, y0, z0) = self.config.box_low
        (x1, y1, z1) = self.config.box_high
        x, y, z, *_ = at
        return max(x - x1, y - y1, z - z1, x0 - x, y0 - y, z0 - z)

    def _tilt_excess(self, at: kinematics.Frame) -> float:
        """How far (rad) the hand is tilted beyond ``max_tilt``; below 0 where it is not."""
        cosine = 0.5 * (kinematics.tilt_trace(at) - 1.0)
        return math.acos(min(max(cosine, -1.0), 1.0)) - self.config.max_tilt

    def _move_reference(self, target: Target) -> None:
        """Moves the reference pose: inside the box, within the tilt, and at a bounded speed."""
        c = self.config
        goal = kinematics.hand_frame(target.position, target.rotation)
        # Rotation: towards the nearest rotation within max_tilt of pointing down.
        goal = kinematics.turned_at_most(_DOWN, goal, c.max_tilt)
        goal = kinematics.turned_at_most(self._goal, goal, c.ee_turn * c.tick)
        # Position: straight towards the nearest point of the box.
        x, y, z, *_ = self._goal
        dx, dy, dz = map(sub, kinematics.clamp(goal[:3], c.box_low, c.box_high), (x, y, z))
        length = math.hypot(dx, dy, dz)
        most = c.ee_speed * c.tick
        share = most / length if length > most else 1.0
        self._goal = (x + share * dx, y + share * dy, z + share * dz, *goal[3:])
