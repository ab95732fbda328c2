"""The last thing before the robot: whatever comes in, what goes out is smooth, within limits, and stops when in doubt.

Each tick, in this order: finite, shape and staleness of state and target; workspace and rotation
box; speed of the reference; reference at most so far from the measured joints; jerk-limited
tracking under velocity limits that depend on the angles (``tracking``); force stop. A latched state
machine (``Mode``) says whose targets count.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from embodyrl.errors import UserError
from embodyrl.real_robot.control import kinematics, limits
from embodyrl.real_robot.control.messages import Command, Mode, RobotState, Target
from embodyrl.real_robot.control.tracking import SafetyConfig, Tracker

MAX_WIDTH = 0.08
"""Between the open fingers of the Franka hand, in m."""
STILL = 0.1
"""rad that the arm may be told to go, to and fro, while angles measured meanwhile stay the same to the last bit. The
reference leads the measured joints by no more than ``max_lead``, so that ``max_error`` alone would
not notice."""
PRESSED = ("blocked", "force")
"""How reasons begin by which the arm was stopped because it was driven against something."""
_LOCKED = (Mode.FAULT, Mode.ESTOP)


@dataclass(frozen=True)
class Event:
    """A change of mode: when (s), from, to and why."""

    stamp: float
    before: Mode
    after: Mode
    reason: str


class SafetyFilter:
    """See the module. One object per robot, used by the ticker's thread; ``estop`` alone may come from any thread."""

    def __init__(
        self, config: SafetyConfig, on_event: Callable[[Event], None] | None = None
    ) -> None:
        self.config = config
        self.hard = limits.find(config.robot)
        self._tracker = Tracker(config)
        self.mode = Mode.HOLD
        self.reason = "not started"
        self.command: Command | None = None
        self.on_event = on_event
        self._estop_reason = ""

    def start(self, now: float, state: RobotState) -> None:
        """Begins at the measured joints, at rest, in HOLD.

        Raises:
            UserError: the robot is outside its limits or the workspace, or a fault was not cleared.
        """
        if self.mode in _LOCKED:
            raise UserError(
                f"The robot is in {self.mode} ({self.reason}); that must be cleared first."
            )
        self._begin(now, state)

    def _begin(self, now: float, state: RobotState) -> None:
        if wrong := self._unfit(state):
            raise UserError(
                f"The robot cannot start: {wrong}. Guide it by hand to a free place inside the "
                "workspace."
            )
        q = state.q.astype(float)
        zero = np.zeros(7)
        self._tracker.start(q)
        self.command = Command(now, q, zero, zero, state.width, Mode.HOLD)
        self._last_tick = now
        self._target = None
        self._measured, self._told = (
            q,
            0.0,
        )  # angles, and rad that the arm was told to go since they are what they are
        self._sent = deque([(now, q)], maxlen=4096)  # commands since the newest state was measured
        self._enter(now, Mode.HOLD, "started", force=True)

    def run(self, now: float) -> None:
        """From HOLD to following the policy."""
        self._leave(Mode.HOLD, "run")
        self._target = None
        self._grace = now
        self._enter(now, Mode.RUN, "told to run", force=True)

    def takeover(self, now: float) -> None:
        """A person's targets count from the next tick on; from RUN or HOLD."""
        if self.mode not in _LOCKED:
            self._target = None
            self._grace = now
            self._enter(now, Mode.HUMAN, "taken over", force=True)

    def release(self, now: float) -> None:
        """The person lets go: HOLD, until ``run``."""
        if self.mode == Mode.HUMAN:
            self._enter(now, Mode.HOLD, "released", force=True)

    def hold(self, now: float, reason: str) -> None:
        """Slows down to a stop."""
        if self.mode in (Mode.RUN, Mode.HUMAN):
            self._enter(now, Mode.HOLD, reason, force=True)

    def estop(self, reason: str = "a person pressed stop") -> None:
        """Stops at the next tick; from any thread."""
        self._estop_reason = reason

    def clear(self, now: float, state: RobotState) -> None:
        """From FAULT or ESTOP to HOLD at the measured joints, by a person who has looked.

        Raises:
            UserError: the cause is still there, the arm has not come to rest, or it was a reflex
                and ``recover_reflex`` is off.
        """
        if self.mode not in _LOCKED:
            return
        assert self.command is not None
        if self.reason.startswith("reflex") and not self.config.recover_reflex:
            raise UserError(
                f"The robot stopped itself ({self.reason}). It is not recovered from unless "
                "recover_reflex is set: look at the robot and its desk, then restart."
            )
        if np.abs(self.command.dq).max() > 1e-6 or np.abs(state.dq).max() > 0.05:
            raise UserError("The arm still moves. Wait until it has come to rest.")
        self._begin(now, state)

    def tick(self, now: float, state: RobotState, target: Target | None) -> Command:
        """The next command.

        Args:
            now: s, of the clock of all stamps.
            state: the newest there is.
            target: the newest there is, or None.

        Returns:
            A command that keeps every limit, whatever the arguments were.
        """
        last = self.command
        if last is None:
            raise RuntimeError("tick was called before start.")
        self._judge(now, state, target)
        if self.mode in (Mode.RUN, Mode.HUMAN) and self._target is not None:
            self._tracker.follow(state.q, self._target)
            width = min(max(self._target.width, 0.0), MAX_WIDTH)
        else:
            self._tracker.brake()
            width = last.width
        q, dq, ddq = (np.array(x) for x in self._tracker.motion)
        self.command = Command(now, q, dq, ddq, width, self.mode, self.reason)
        self._last_tick = now
        self._sent.append((now, q))
        return self.command

    def _judge(self, now: float, state: RobotState, target: Target | None) -> None:
        """Finite, shape, staleness, reflex, force: keeps the newest good target or changes the mode."""
        c = self.config
        if self._estop_reason:
            self._enter(now, Mode.ESTOP, self._estop_reason)
            self._estop_reason = ""
        gap = now - self._last_tick
        if not 0.0 <= gap <= c.max_gap:
            self.hold(
                now,
                f"the clock went back by {-gap:.3f} s" if gap < 0 else f"no tick for {gap:.3f} s",
            )
        if wrong := self._state_fault(now, state):
            self._enter(now, Mode.FAULT, wrong)
        moving = self.mode in (Mode.RUN, Mode.HUMAN)
        waiting = (
            self.mode == Mode.HOLD
            and c.resume == "fresh_target"
            and self.reason.startswith("stale")
        )
        if target is not None and (moving or waiting) and target.human == (self.mode == Mode.HUMAN):
            if wrong := _target_fault(target):
                self._enter(now, Mode.FAULT, wrong)
            elif target.stamp <= now + c.tick and (
                self._target is None or target.stamp >= self._target.stamp
            ):
                self._target = target
                if waiting and now - target.stamp <= c.max_target_age:
                    self._enter(now, Mode.RUN, "fresh target")
        if self.mode in (Mode.RUN, Mode.HUMAN):
            age = now - (self._target.stamp if self._target else self._grace)
            if age > c.max_target_age:
                self.hold(now, f"stale: no fresh target for {age:.3f} s")

    def _state_fault(self, now: float, state: RobotState) -> str:
        c = self.config
        assert self.command is not None
        if state.reflex:
            return f"reflex: {state.reflex}"
        if state.trouble:
            return state.trouble
        if (
            state.q.shape != (7,)
            or state.dq.shape != (7,)
            or not math.isfinite(float(state.q.sum() + state.dq.sum()))
        ):
            return "the robot's state is not seven finite angles and velocities"
        if (age := now - state.stamp) > c.max_state_age:
            return f"no fresh state of the robot for {age:.3f} s"
        if (error := float(np.abs(state.q - self.command.q).max())) > c.max_error:
            return f"blocked: the robot is {error:.2f} rad away from where it was told to be"
        while len(self._sent) > 1 and self._sent[1][0] <= state.stamp:
            _, before = self._sent.popleft()
            self._told += float(np.abs(self._sent[0][1] - before).max())
        if (state.q != self._measured).any():
            self._measured = state.q
            self._told = 0.0
        elif self._told > STILL:
            return f"the measured angles stand still, but the arm was told to move by more than {STILL} rad"
        if (
            state.force is not None
            and not math.sqrt(float(state.force @ state.force)) <= c.max_force
        ):
            return f"force: {math.sqrt(float(state.force @ state.force)):.0f} N at the hand"
        return ""

    def _unfit(self, state: RobotState) -> str:
        """Why the robot may not start from here; empty if it may."""
        if state.q.shape != (7,) or not np.isfinite(state.q).all():
            return "its state is not seven finite angles"
        if state.reflex:
            return f"it is stopped by a reflex ({state.reflex})"
        if state.trouble:
            return state.trouble
        safe = self.hard.inside()
        box = self.config
        if (beyond := (state.q > safe.q_max) | (state.q < safe.q_min)).any():
            return f"joint {int(beyond.argmax()) + 1} is at its end ({state.q[beyond.argmax()]:.3f} rad)"
        place = np.array(kinematics.tip(state.q.tolist()))
        # A centimetre of grace: one may stop at the very wall.
        if (place < np.array(box.box_low) - 0.01).any() or (
            place > np.array(box.box_high) + 0.01
        ).any():
            return f"the hand is at {np.round(place, 3).tolist()}, outside the workspace"
        return ""

    def _leave(self, needed: Mode, verb: str) -> None:
        if self.mode != needed or self.command is None:
            raise UserError(
                f"The robot cannot {verb}: it is in {self.mode} ({self.reason}), not in {needed}."
            )

    def _enter(self, now: float, mode: Mode, reason: str, force: bool = False) -> None:
        """Changes the mode; without ``force`` a lock is never left, and ESTOP not for FAULT."""
        if not force and (
            self.mode == Mode.ESTOP or (self.mode == Mode.FAULT and mode != Mode.ESTOP)
        ):
            return
        event = Event(now, self.mode, mode, reason)
        self.mode = mode
        self.reason = reason
        if mode in (Mode.RUN, Mode.HUMAN) and self.command is not None:
            self._tracker.aim()
        if self.on_event is not None:
            self.on_event(event)


def _target_fault(target: Target) -> str:
    if target.position.shape != (3,) or target.rotation.shape != (3, 3):
        return f"target of shapes {target.position.shape} and {target.rotation.shape}, not (3,) and (3, 3)"
    (a, b, c), (d, e, f), (g, h, i) = target.rotation.tolist()
    x, y, z = target.position.tolist()
    if not math.isfinite(a + b + c + d + e + f + g + h + i + x + y + z + target.width):
        return "the target is not finite"
    # Rows of unit length, at right angles, right-handed.
    products = a * a + b * b + c * c - 1, d * d + e * e + f * f - 1, a * d + b * e + c * f
    third = b * f - c * e - g, c * d - a * f - h, a * e - b * d - i
    return "" if max(map(abs, (*products, *third))) < 1e-3 else "the target's rotation is not one"
