"""What all trackers share: a reference near the measured joints, and a step from which a stop is safe."""

from __future__ import annotations

from operator import sub

import numpy as np

from embodyrl.real_robot.control.joint_tracking import JointTracker, Motion, Stopper
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
        self._ref_low = ref_low
        self._ref_high = ref_high
        self._tick = tick
        self._max_lead = max_lead
        self._joints = JointTracker(safe, tick, follow, together)
        self._stopper = Stopper(safe)
        self.motion: Motion = ([], [], [])
        self._end: list[float] = []  # where the stop from the last accepted step ends
        self._q_ref = np.zeros(0)

    def _begin(self, q: Array) -> None:
        """Is at rest at the joint angles q (n,)."""
        self.motion = (q.tolist(), [0.0] * len(q), [0.0] * len(q))
        self._end = self.motion[0]

    def brake(self) -> None:
        """Moves on by one tick of the hardest stop; at rest the arm stays where it is."""
        self.motion = self._joints.brake(self.motion)

    def settle(self, measured: Array, goal: Array) -> bool:
        """Moves on by one tick towards rest at the angles ``goal`` (n,), slowly.

        Returns:
            Whether the arm is there, at rest.
        """
        # The joint with the longest way moves at ``SETTLE_RATE``, the others in proportion.
        way = goal - self._q_ref
        longest = float(np.abs(way).max())
        share = min(SETTLE_RATE * self._tick / longest, 1.0) if longest else 1.0
        self._take(self._track(self._q_ref + way * share if longest else goal), measured)
        q, dq, _ = self.motion
        here = max(map(abs, map(sub, q, goal.tolist()))) <= SETTLED
        return here and max(map(abs, dq)) <= SETTLED

    def _track(self, q_ref: Array) -> Motion:
        """The motion of one tick that follows the reference to ``q_ref`` (n,)."""
        velocity = ((q_ref - self._q_ref) / self._tick).tolist()
        self._q_ref = q_ref
        return self._joints.follow(self.motion, q_ref.tolist(), velocity)

    def _take(self, motion: Motion, measured: Array) -> None:
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

    def _near(self, measured: Array, q_ref: Array) -> Array:
        """The reference, at most ``max_lead`` from the measured joints.

        All joints are drawn back in proportion. Drawn back one by one, they would lead the hand off
        its line, perhaps through a table.
        """
        lead = q_ref - measured
        far = max(map(abs, lead.tolist()))
        if far <= self._max_lead:
            return q_ref
        return clamp(measured + lead * (self._max_lead / far), self._ref_low, self._ref_high)


def clamp(x: Array, low: Array | float, high: Array | float) -> Array:
    """Like np.clip, with a third of its overhead."""
    return np.minimum(np.maximum(x, low), high)
