"""Tracking of a hand pose from which the arm can always stop inside the workspace.

Each tick moves a reference pose towards the target, turns it into joint angles by inverse
kinematics, and tracks these (``joint_tracking``). A step is accepted only if the stop that would
follow it ends inside the workspace (``Tracker._overshoot``). Otherwise the arm takes the first
tick of the stop from the state before, which had passed the same test.
"""

from __future__ import annotations

import math

import numpy as np

from embodyrl.real_robot.control import kinematics, limits
from embodyrl.real_robot.control.joint_tracking import (
    JointTracker,
    Motion,
    Stopper,
    usable_deceleration,
)
from embodyrl.real_robot.control.messages import Array, Target
from embodyrl.real_robot.control.safety_config import BOX_SLACK, SafetyConfig

IK_RATE = 3.0
"""rad/s of the reference's fastest joint: about what the joints can do."""
POSTURE_RATE = 2.5
"""1/s, how fast redundant motion returns to the home posture, as in the simulated tasks."""
SLIDE = 1e-4
"""m per tick by which an arm at the boundary may go further out, up to twice ``BOX_SLACK``."""


class Tracker:
    """The commanded motion of one arm.

    Attributes:
        motion: where the arm was last told to be.
    """

    def __init__(self, config: SafetyConfig) -> None:
        self.config = config
        safe = limits.find(config.robot).inside()
        self._low = np.array(config.box_low)
        self._high = np.array(config.box_high)
        # The reference stays away from the ends of the joints, where the velocity limit is zero.
        dead = safe.offset**2 / (2.0 * usable_deceleration(safe)) + 2e-3
        self._ref_low = safe.q_min + dead
        self._ref_high = safe.q_max - dead
        # Joints that arrive at the same time keep the hand near the straight line.
        self._joints = JointTracker(safe, config.tick, config.follow, together=True)
        self._stopper = Stopper(safe)

    def start(self, q: Array) -> None:
        """Starts at rest at the joint angles q (7,)."""
        self.motion: Motion = (q.tolist(), [0.0] * 7, [0.0] * 7)
        self._outside = max(self._overshoot(self.motion), 0.0)
        self.restart_reference()

    def restart_reference(self) -> None:
        """Puts the reference to where the arm is told to be now."""
        self._q_ref = np.array(self.motion[0])
        self._position, self._rotation, _ = kinematics.forward(self._q_ref)

    def brake(self) -> None:
        """Moves on by one tick of the hardest stop; at rest the arm stays where it is."""
        self.motion = self._joints.brake(self.motion)

    def follow(self, measured: Array, target: Target) -> None:
        """Moves on by one tick towards the target, or as far as the arm can still stop.

        Args:
            measured: (7,) joint angles.
            target: finite.
        """
        self.motion = self._tracked(self.motion, measured, target)

    def _tracked(self, before: Motion, measured: Array, target: Target) -> Motion:
        c = self.config
        # 1. Move the reference pose towards the target.
        self._move_reference(target)
        # 2. One step of inverse kinematics from the last reference angles towards that pose.
        q_ref = kinematics.ik_step(
            self._q_ref, self._position, self._rotation, self._ref_low, self._ref_high,
            max_step=IK_RATE * c.tick, posture_gain=POSTURE_RATE * c.tick,
        )  # fmt: skip
        # 3. Keep the reference near the measured joints and inside the joint limits.
        q_ref = _clamp(self._near(measured, q_ref), self._ref_low, self._ref_high)
        velocity = ((q_ref - self._q_ref) / c.tick).tolist()
        self._q_ref = q_ref
        # 4. Jerk-limited tracking of the reference angles.
        motion = self._joints.follow(before, q_ref.tolist(), velocity)
        # 5. Accept the step if its stop ends inside the workspace; else brake. The stop from an
        # accepted step ends where it was foreseen, so braking does not increase ``_outside``. An
        # arm at the boundary may go out a little more each tick, so that it can slide along it.
        outside = max(self._overshoot(motion), 0.0)
        if outside > max(min(self._outside + SLIDE, 2 * BOX_SLACK), BOX_SLACK):
            return self._joints.brake(before)
        self._outside = outside
        return motion

    def _near(self, measured: Array, q_ref: Array) -> Array:
        """The reference, at most ``max_lead`` from the measured joints.

        All joints are drawn back in proportion. Drawn back one by one, they would lead the hand off
        its line, perhaps through a table.
        """
        lead = q_ref - measured
        far = float(np.abs(lead).max())
        if far <= self.config.max_lead:
            return q_ref
        return measured + lead * (self.config.max_lead / far)

    def _move_reference(self, target: Target) -> None:
        """Moves the reference pose: inside the box, within the tilt, and at a bounded speed."""
        c = self.config
        # Position: straight towards the nearest point of the box.
        way = _clamp(target.position, self._low, self._high) - self._position
        length = math.sqrt(float(way @ way))
        if length > c.ee_speed * c.tick:
            way *= c.ee_speed * c.tick / length
        self._position = self._position + way
        # Rotation: towards the nearest rotation within max_tilt of pointing down.
        goal = _turned_at_most(kinematics.DOWN, target.rotation, c.max_tilt)
        self._rotation = _turned_at_most(self._rotation, goal, c.ee_turn * c.tick)

    def _overshoot(self, motion: Motion) -> float:
        """How far (m) outside the workspace a stop from ``motion`` leads; below 0 inside.

        The stop is checked half way in time and at its end.
        """
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


def _clamp(x: Array, low: Array | float, high: Array | float) -> Array:
    """Like np.clip, with a third of its overhead."""
    return np.minimum(np.maximum(x, low), high)


def _turned_at_most(start: Array, goal: Array, angle: float) -> Array:
    """The rotation ``goal``, or if that is too far from ``start``, ``angle`` rad of the way."""
    # Near enough, by the trace of the rotation goal @ start.T, which is 1 + 2 cos(angle).
    if float(np.vdot(goal, start)) >= 1.0 + 2.0 * math.cos(angle):
        return goal
    turn = kinematics.rotation_vector(goal @ start.T)
    length = math.sqrt(float(turn @ turn))
    return goal if length <= angle else kinematics.exp_rotation(turn * (angle / length)) @ start
