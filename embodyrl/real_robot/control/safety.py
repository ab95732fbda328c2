"""The safety filter, the last step before the robot: its commands are smooth and within all limits.

Whatever comes in, each tick does, in this order:

1. Check the state and the target: shape, finite values, age, reflex, force (``_update_mode``).
2. Move the reference: workspace and tilt, bounded speed, bounded lead (``tracking``).
3. Track it within velocity, acceleration and jerk limits (``joint_tracking``).
4. In any mode that follows nobody, brake to a stop instead.

The mode (``messages.Mode``) says whose targets count. A fault and a stop are latched: only a
person leaves them, by ``clear``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from embodyrl.errors import UserError
from embodyrl.real_robot.control import kinematics, limits
from embodyrl.real_robot.control.limits import MAX_WIDTH
from embodyrl.real_robot.control.messages import Command, Mode, RobotState, Target
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.real_robot.control.tracking import Tracker

FROZEN_MOTION = 0.1
"""rad of commanded motion, to and fro, after which bit-identical measured angles are a fault.

``max_error`` alone would not notice a frozen state: the reference leads the measured joints by no
more than ``max_lead``, so the error stays small.
"""
CONTACT_REASONS = ("blocked", "force")
"""How the reason of a fault begins when the arm was driven against something."""
START_GRACE = 0.01
"""m beyond the workspace from which the arm may start: it may have stopped at the boundary."""
_FOLLOWING = (Mode.RUN, Mode.HUMAN)
_LATCHED = (Mode.FAULT, Mode.ESTOP)


@dataclass(frozen=True)
class Event:
    """A change of mode: when (s), from, to and why."""

    stamp: float
    before: Mode
    after: Mode
    reason: str


class SafetyFilter:
    """Turns targets into commands that are safe to send; see the module.

    There is one object per robot, and the ticker's thread uses it. Only ``estop`` may be called
    from any thread.

    Args:
        config: where and how the robot may move.
        on_event: called with each change of mode.
    """

    def __init__(
        self, config: SafetyConfig, on_event: Callable[[Event], None] | None = None
    ) -> None:
        self.config = config
        self.robot_limits = limits.find(config.robot)
        self.mode = Mode.HOLD
        self.reason = "not started"
        self.command: Command | None = None
        self.on_event = on_event
        self._tracker = Tracker(config)
        self._estop_reason = ""  # set by ``estop``, obeyed by the next tick

    # ---- What the ticker and the person may ask for.

    def start(self, now: float, state: RobotState) -> None:
        """Starts at the measured joints, at rest, in HOLD.

        Raises:
            UserError: the robot is outside its limits or the workspace, or a fault was not cleared.
        """
        if self.mode in _LATCHED:
            raise UserError(
                f"The robot is in {self.mode} ({self.reason}); that must be cleared first."
            )
        self._start_at(now, state)

    def run(self, now: float) -> None:
        """From HOLD to following the policy.

        Raises:
            UserError: the filter is not in HOLD, or was not started.
        """
        if self.mode != Mode.HOLD or self.command is None:
            raise UserError(
                f"The robot cannot run: it is in {self.mode} ({self.reason}), not in {Mode.HOLD}."
            )
        self._target = None
        self._no_target_since = now
        self._enter(now, Mode.RUN, "told to run", force=True)

    def takeover(self, now: float) -> None:
        """From RUN or HOLD to following a person; their targets count from the next tick on."""
        if self.mode not in _LATCHED:
            self._target = None
            self._no_target_since = now
            self._enter(now, Mode.HUMAN, "taken over", force=True)

    def release(self, now: float) -> None:
        """The person lets go: HOLD until ``run``."""
        if self.mode == Mode.HUMAN:
            self._enter(now, Mode.HOLD, "released", force=True)

    def hold(self, now: float, reason: str) -> None:
        """Brakes to a stop and waits."""
        if self.mode in _FOLLOWING:
            self._enter(now, Mode.HOLD, reason, force=True)

    def estop(self, reason: str = "a person pressed stop") -> None:
        """Stops at the next tick; may be called from any thread."""
        self._estop_reason = reason

    def clear(self, now: float, state: RobotState) -> None:
        """From FAULT or ESTOP to HOLD at the measured joints, after a person has looked.

        Raises:
            UserError: the cause is still there, the arm still moves, or it was a reflex and
                ``recover_reflex`` is off.
        """
        if self.mode not in _LATCHED:
            return
        assert self.command is not None
        if self.reason.startswith("reflex") and not self.config.recover_reflex:
            raise UserError(
                f"The robot stopped itself ({self.reason}). It is not recovered from unless "
                "recover_reflex is set: look at the robot and its desk, then restart."
            )
        if np.abs(self.command.dq).max() > 1e-6 or np.abs(state.dq).max() > 0.05:
            raise UserError("The arm still moves. Wait until it has come to rest.")
        self._start_at(now, state)

    # ---- One tick.

    def tick(self, now: float, state: RobotState, target: Target | None) -> Command:
        """The next command.

        Args:
            now: s, of the clock of all stamps.
            state: the newest state of the robot.
            target: the newest target, or None.

        Returns:
            A command that keeps every limit, whatever the arguments were.
        """
        last = self.command
        if last is None:
            raise RuntimeError("tick was called before start.")
        self._update_mode(now, state, target)
        if self.mode in _FOLLOWING and self._target is not None:
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

    def _update_mode(self, now: float, state: RobotState, target: Target | None) -> None:
        """Checks what came in: keeps the newest good target, or changes the mode."""
        # 1. A person pressed stop.
        if self._estop_reason:
            self._enter(now, Mode.ESTOP, self._estop_reason)
            self._estop_reason = ""
        # 2. The ticker stalled, or its clock jumped.
        gap = now - self._last_tick
        if not 0.0 <= gap <= self.config.max_gap:
            backwards = f"the clock went back by {-gap:.3f} s"
            self.hold(now, backwards if gap < 0 else f"no tick for {gap:.3f} s")
        # 3. Something is wrong with the robot or its state.
        if wrong := self._state_fault(now, state):
            self._enter(now, Mode.FAULT, wrong)
        # 4. A new target of whoever may move the arm.
        if target is not None and target.human == (self.mode == Mode.HUMAN):
            self._accept(now, target)
        # 5. No fresh target for too long.
        if self.mode in _FOLLOWING:
            age = now - (self._target.stamp if self._target else self._no_target_since)
            if age > self.config.max_target_age:
                self.hold(now, f"stale: no fresh target for {age:.3f} s")

    def _accept(self, now: float, target: Target) -> None:
        """Keeps a target that is valid and not older than the last one."""
        # A hold for lack of targets may end by itself, if the config says so.
        waiting = (
            self.mode == Mode.HOLD
            and self.config.resume == "fresh_target"
            and self.reason.startswith("stale")
        )
        if self.mode not in _FOLLOWING and not waiting:
            return
        if wrong := _target_fault(target):
            self._enter(now, Mode.FAULT, wrong)
            return
        # Targets may come repeated or in the wrong order, and none may lie in the future.
        newest = self._target is None or target.stamp >= self._target.stamp
        if newest and target.stamp <= now + self.config.tick:
            self._target = target
            if waiting and now - target.stamp <= self.config.max_target_age:
                self._enter(now, Mode.RUN, "fresh target")

    def _state_fault(self, now: float, state: RobotState) -> str:
        """What is wrong with the robot or its state; empty while all is well."""
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
        # Frozen: how far was the arm told to move while the measured angles stayed the same? Only
        # commands that were sent before this state was measured can show in it.
        while len(self._sent) > 1 and self._sent[1][0] <= state.stamp:
            _, before = self._sent.popleft()
            self._commanded_motion += float(np.abs(self._sent[0][1] - before).max())
        if (state.q != self._last_measured).any():
            self._last_measured = state.q
            self._commanded_motion = 0.0
        elif self._commanded_motion > FROZEN_MOTION:
            return (
                "the measured angles stand still, but the arm was told to move by more than "
                f"{FROZEN_MOTION} rad"
            )
        # Written so that a force that is not a number is a fault too.
        if (
            state.force is not None
            and not math.sqrt(float(state.force @ state.force)) <= c.max_force
        ):
            return f"force: {math.sqrt(float(state.force @ state.force)):.0f} N at the hand"
        return ""

    # ---- Starting, and changing the mode.

    def _start_at(self, now: float, state: RobotState) -> None:
        """Resets everything to the measured joints, at rest.

        Raises:
            UserError: the robot may not start there.
        """
        if wrong := self._start_problem(state):
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
        # For the check of frozen states: the measured angles, the rad that the arm was told to move
        # since they last changed, and the commands since the newest state was measured.
        self._last_measured = q
        self._commanded_motion = 0.0
        self._sent = deque([(now, q)], maxlen=4096)
        self._enter(now, Mode.HOLD, "started", force=True)

    def _start_problem(self, state: RobotState) -> str:
        """Why the robot may not start from this state; empty if it may."""
        if state.q.shape != (7,) or not np.isfinite(state.q).all():
            return "its state is not seven finite angles"
        if state.reflex:
            return f"it is stopped by a reflex ({state.reflex})"
        if state.trouble:
            return state.trouble
        safe = self.robot_limits.inside()
        if (beyond := (state.q > safe.q_max) | (state.q < safe.q_min)).any():
            joint = int(beyond.argmax())
            return f"joint {joint + 1} is at its end ({state.q[joint]:.3f} rad)"
        hand = np.array(kinematics.tip(state.q.tolist()))
        low = np.array(self.config.box_low) - START_GRACE
        high = np.array(self.config.box_high) + START_GRACE
        if (hand < low).any() or (hand > high).any():
            return f"the hand is at {np.round(hand, 3).tolist()}, outside the workspace"
        return ""

    def _enter(self, now: float, mode: Mode, reason: str, force: bool = False) -> None:
        """Changes the mode. Without ``force`` FAULT is left only for ESTOP, and ESTOP never."""
        latched = self.mode == Mode.ESTOP or (self.mode == Mode.FAULT and mode != Mode.ESTOP)
        if latched and not force:
            return
        event = Event(now, self.mode, mode, reason)
        self.mode = mode
        self.reason = reason
        if mode in _FOLLOWING and self.command is not None:
            self._tracker.restart_reference()
        if self.on_event is not None:
            self.on_event(event)


def _target_fault(target: Target) -> str:
    """What is wrong with a target; empty if it is a finite pose."""
    if target.position.shape != (3,) or target.rotation.shape != (3, 3):
        return (
            f"target of shapes {target.position.shape} and {target.rotation.shape}, "
            "not (3,) and (3, 3)"
        )
    (a, b, c), (d, e, f), (g, h, i) = target.rotation.tolist()
    x, y, z = target.position.tolist()
    if not math.isfinite(a + b + c + d + e + f + g + h + i + x + y + z + target.width):
        return "the target is not finite"
    # A rotation: its first two rows have unit length and are orthogonal, and the third is their
    # cross product.
    products = a * a + b * b + c * c - 1, d * d + e * e + f * f - 1, a * d + b * e + c * f
    third = b * f - c * e - g, c * d - a * f - h, a * e - b * d - i
    return "" if max(map(abs, (*products, *third))) < 1e-3 else "the target's rotation is not one"
