"""What all trackers share: a reference near the measured joints, and a step from which a stop is safe."""

from __future__ import annotations

from operator import sub

from embodyrl.real_robot.control.joint_tracking import JointTracker, Motion, Stopper
from embodyrl.real_robot.control.kinematics import clamp
from embodyrl.real_robot.control.limits import RobotLimits
from embodyrl.real_robot.control.messages import Array

SETTLE_RATE = 0.5
"""rad/s of the fastest joint on the way back to where the arm was measured."""
SETTLED = 1e-4
"""rad from there at which the way back is over."""


class ReferenceTracker:
    """Tracks reference angles that stay near the measured ones.

    Args:
        safe: limits of the joints.
        ref_low: (n,) where the reference ends.
        ref_high: (n,) where it ends at the other side.
        tick: s per step.
        follow: share of the acceleration and jerk limits that tracking uses.
        max_lead: rad by which the reference may be ahead of the measured joints.
        together: whether all joints arrive at the same time.

    Attributes:
        motion: where the arm was last told to be.
    """

    def __init__(
        self,
        safe: RobotLimits,
        ref_low: Array,
        ref_high: Array,
        tick: float,
        follow: float,
        max_lead: float,
        together: bool,
    ) -> None:
        self._safe = safe
        self._ref_low: list[float] = ref_low.tolist()
        self._ref_high: list[float] = ref_high.tolist()
        self._tick = tick
        self._max_lead = max_lead
        self._joints = JointTracker(safe, tick, follow, together)
        self._stopper = Stopper(safe)
        self.motion: Motion = ([], [], [])
        self._end: list[float] = []  # where the stop from the last accepted step ends
        self._q_ref: list[float] = []

    def _begin(self, q: list[float]) -> None:
        """Is at rest at the joint angles q (n,)."""
        self.motion = (q, [0.0] * len(q), [0.0] * len(q))
        self._end = q

    def brake(self) -> None:
        """Moves on by one tick of the hardest stop; at rest the arm stays where it is."""
        self.motion = self._joints.brake(self.motion)

    def settle(self, measured: list[float], goal: list[float]) -> bool:
        """Moves on by one tick towards rest at the angles ``goal`` (n,), slowly.

        Returns:
            Whether the arm is there, at rest.
        """
        # The joint with the longest way moves at ``SETTLE_RATE``, the others in proportion.
        way = list(map(sub, goal, self._q_ref))
        longest = max(map(abs, way))
        share = min(SETTLE_RATE * self._tick / longest, 1.0) if longest else 1.0
        q_ref = [q + share * left for q, left in zip(self._q_ref, way, strict=True)]
        self._take(self._track(q_ref), measured)
        q, dq, _ = self.motion
        return max(map(abs, map(sub, q, goal))) <= SETTLED and max(map(abs, dq)) <= SETTLED

    def _track(self, q_ref: list[float]) -> Motion:
        """The motion of one tick that follows the reference to ``q_ref`` (n,)."""
        velocity = [(to - q) / self._tick for to, q in zip(q_ref, self._q_ref, strict=True)]
        self._q_ref = q_ref
        return self._joints.follow(self.motion, q_ref, velocity)

    def _take(self, motion: Motion, measured: list[float]) -> None:
        """Moves on to ``motion`` if it keeps the bounds, else by one tick of the hardest stop."""
        raise NotImplementedError

    def _keeps_lead(self, q: list[float], end: list[float], measured: list[float]) -> bool:
        """Whether a step to q and its stop stay near the measured joints, or come nearer."""
        # Where the stop would end, and where the step itself leads.
        for told, before in ((end, self._end), (q, self.motion[0])):
            lead = max(map(abs, map(sub, told, measured)))
            if lead > self._max_lead and lead > max(map(abs, map(sub, before, measured))):
                return False
        return True

    def _near(self, measured: list[float], q_ref: list[float]) -> list[float]:
        """The reference, at most ``max_lead`` from the measured joints.

        All joints are drawn back in proportion. Drawn back one by one, they would lead the hand off
        its line, perhaps through a table.
        """
        far = max(map(abs, map(sub, q_ref, measured)))
        if far <= self._max_lead:
            return q_ref
        share = self._max_lead / far
        near = [q + share * (to - q) for to, q in zip(q_ref, measured, strict=True)]
        return clamp(near, self._ref_low, self._ref_high)
