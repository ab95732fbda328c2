"""Converts the time stamps of ROS messages to the clock of the control loop."""

from __future__ import annotations

import math

from embodyrl.errors import UserError
from embodyrl.real_robot.ros import fields
from embodyrl.real_robot.ros.bus import Fields

LEARNING_TIME = 1.0
"""s after the first message in which the offset of its clock is still being estimated."""
DRIFT = 1e-4
"""s per s by which two clocks may drift apart."""


class StampConverter:
    """Converts stamps of another machine's clock to our own, and notices when that clock jumps.

    Let the lead of a message be its stamp minus its arrival by our clock. It is the offset of the
    two clocks minus the delay of the message. A delay is never negative, so the largest lead seen
    is close to the offset, and what a message lacks of it is its delay.

    Args:
        what: what the stamps belong to, for messages.
        max_jump: s by which the clock may jump.
    """

    def __init__(self, what: str, max_jump: float) -> None:
        self._what = what
        self._max_jump = max_jump
        self._newest = 0.0  # newest stamp
        self._offset = -math.inf  # largest lead so far, with an allowance for drift
        self._first_arrival = math.inf
        self._last_arrival = 0.0

    def measured(self, header: Fields, now: float) -> float | None:
        """When a message was measured, by our clock.

        Args:
            header: of the message.
            now: when it arrived, by our clock.

        Returns:
            The time in s; None if the message is not newer than all before.

        Raises:
            UserError: it has no stamp, its stamp is no time, or its clock jumped.
        """
        stamp = fields.seconds(header["stamp"])
        if not (math.isfinite(stamp) and stamp >= 0.0):
            raise UserError(f"{self._what} come with the time stamp {stamp}, which is no time")
        if stamp == 0.0:
            raise UserError(
                f"{self._what} come without a time stamp, so nobody could tell whether they are "
                "frozen"
            )
        # A jump back, or a lead that delay cannot explain.
        ahead = stamp - now - self._offset
        back = self._newest - stamp
        learned = now - self._first_arrival > LEARNING_TIME
        if not back <= self._max_jump or (not ahead <= self._max_jump and learned):
            jump = -back if back > self._max_jump else ahead
            raise UserError(f"the clock that stamps {self._what} jumped by {jump:+.1f} s")
        # Update the estimate of the offset.
        self._offset = max(stamp - now, self._offset - DRIFT * (now - self._last_arrival))
        self._first_arrival = min(self._first_arrival, now)
        self._last_arrival = now
        if stamp <= self._newest:
            return None
        self._newest = stamp
        return stamp - self._offset
