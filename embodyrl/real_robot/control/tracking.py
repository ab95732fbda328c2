"""Tracking of a hand pose from which the arm can always stop inside the workspace.

Each tick moves a reference pose towards the target, turns it into joint angles by inverse
kinematics, and tracks these (``joint_tracking``). A step is accepted only if it keeps the hand's
speed, and if it and the stop that would follow it keep the workspace, the tilt and the lead
(``Tracker._take``). Otherwise the arm takes the first tick of the stop from the state before, which
had passed the same test.
"""

from __future__ import annotations

import math
from operator import mul

import numpy as np

from embodyrl.real_robot.control import kinematics, limits
from embodyrl.real_robot.control.joint_tracking import Motion, usable_deceleration
from embodyrl.real_robot.control.messages import Array, Target
from embodyrl.real_robot.control.reference_tracking import ReferenceTracker, clamp
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


class Tracker(ReferenceTracker):
    """The commanded motion of a Franka."""

    def __init__(self, config: SafetyConfig) -> None:
        self.config = config
        safe = limits.limits_of(config.robot).inside()
        self._low = np.array(config.box_low)
        self._high = np.array(config.box_high)
        # The reference stays away from the ends of the joints, where the velocity limit is zero.
        dead = safe.offset**2 / (2.0 * usable_deceleration(safe)) + 2e-3
        # Joints that arrive at the same time keep the hand near the straight line.
        super().__init__(
            safe, safe.q_min + dead, safe.q_max - dead, config.tick, config.follow,
            config.max_lead, together=True,
        )  # fmt: skip
        # The angles below which a hand is tilted too far, or turns too fast, as traces.
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

    def start(self, q: Array) -> None:
        """Starts at rest at the joint angles q (7,)."""
        self._begin(q)
        self._excess = max(self._slack_used(kinematics.frame(self.motion[0])), 0.0)
        self.restart_reference()

    def restart_reference(self) -> None:
        """Puts the reference to where the arm is told to be now."""
        self._q_ref = np.array(self.motion[0])
        self._position, self._rotation, _ = kinematics.forward(self._q_ref)
        self._at = kinematics.frame(self.motion[0])  # of the commanded hand

    def follow(self, measured: Array, target: Target) -> None:
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
            self._q_ref, self._position, self._rotation, self._ref_low, self._ref_high,
            max_step=IK_RATE * c.tick, posture_gain=POSTURE_RATE * c.tick,
        )  # fmt: skip
        # 3. Keep the reference near the measured joints and inside the joint limits.
        q_ref = self._near(measured, q_ref)
        # 4. Jerk-limited tracking of the reference angles.
        motion = self._track(q_ref)
        # 5. Take the step if it keeps the bounds.
        self._take(motion, measured)

    def _take(self, motion: Motion, measured: Array) -> None:
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
            if used <= may and self._keeps_lead(motion[0], end, measured.tolist()):
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
        dq = []
        for rate, a, share in zip(motion[1], motion[2], self._half_over_jerk, strict=True):
            peak = rate + a * abs(a) * share
            dq.append(peak if peak * a > 0.0 else rate)
        size = list(map(abs, dq))
        if sum(map(mul, size, _REACHES)) <= c.ee_speed and sum(size) <= c.ee_turn:
            return True
        # The hand's velocity is v - t a, summed over the joints that still move at time t.
        moving = []
        vx = vy = vz = wx = wy = wz = 0.0
        ax = ay = az = bx = by = bz = 0.0
        px, py, pz, *_ = at
        for (ox, oy, oz, ux, uy, uz), rate, most in zip(axes, dq, self._ddq_max, strict=True):
            x = uy * (pz - oz) - uz * (py - oy)
            y = uz * (px - ox) - ux * (pz - oz)
            z = ux * (py - oy) - uy * (px - ox)
            slows = most if rate > 0.0 else -most
            moving.append((rate / slows, rate, slows, x, y, z, ux, uy, uz))
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
        moving.sort()
        speed = c.ee_speed * c.ee_speed
        turn = c.ee_turn * c.ee_turn
        if vx * vx + vy * vy + vz * vz > speed or wx * wx + wy * wy + wz * wz > turn:
            return False
        for t, rate, slows, x, y, z, ux, uy, uz in moving:
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
            vx -= x * rate
            vy -= y * rate
            vz -= z * rate
            wx -= ux * rate
            wy -= uy * rate
            wz -= uz * rate
            ax -= x * slows
            ay -= y * slows
            az -= z * slows
            bx -= ux * slows
            by -= uy * slows
            bz -= uz * slows
        return True

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
        # Position: straight towards the nearest point of the box.
        way = clamp(target.position, self._low, self._high) - self._position
        length = math.sqrt(float(way @ way))
        if length > c.ee_speed * c.tick:
            way *= c.ee_speed * c.tick / length
        self._position = self._position + way
        # Rotation: towards the nearest rotation within max_tilt of pointing down.
        goal = _turned_at_most(kinematics.DOWN, target.rotation, c.max_tilt)
        self._rotation = _turned_at_most(self._rotation, goal, c.ee_turn * c.tick)


def _turned_at_most(start: Array, goal: Array, angle: float) -> Array:
    """The rotation ``goal``, or if that is too far from ``start``, ``angle`` rad of the way."""
    # Near enough, by the trace of the rotation goal @ start.T, which is 1 + 2 cos(angle).
    if float(np.vdot(goal, start)) >= 1.0 + 2.0 * math.cos(angle):
        return goal
    turn = kinematics.rotation_vector(goal @ start.T)
    length = math.sqrt(float(turn @ turn))
    return goal if length <= angle else kinematics.exp_rotation(turn * (angle / length)) @ start
