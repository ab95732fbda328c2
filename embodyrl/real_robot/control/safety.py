"""The safety filter, the last step before the robot: its commands are smooth and within all limits.

Whatever comes in, each tick does, in this order:

1. Check the state and the target: shape, finite values, age, reflex, force (``input_checks``).
2. Move the reference towards the target, and track it within velocity, acceleration and jerk limits
   (``joint_tracking``). The step counts only if it and the stop after it keep the workspace, the
   tilt, the speed and the lead (``tracking``; of an arm whose shape is not known the lead alone,
   ``motor_tracking``).
3. In any mode that follows nobody, brake to a stop instead.

The mode (``messages.Mode``) says whose targets count. A fault and a stop are latched: only a
person leaves them, by ``clear``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import sub

import numpy as np

from embodyrl.errors import UserError
from embodyrl.real_robot.control.any_safety import Safety, tracker_for
from embodyrl.real_robot.control.input_checks import (
    AT_REST,
    RepeatedForceCheck,
    state_problem,
    target_problem,
)
from embodyrl.real_robot.control.limits import MAX_WIDTH
from embodyrl.real_robot.control.messages import Command, JointTarget, Mode, RobotState, Target

FROZEN_MOTION = 0.1
"""rad of commanded motion, to and fro, after which bit-identical measured angles are a fault.

``max_error`` alone would not notice a frozen state: the reference leads the measured joints by no
more than ``max_lead``, so the error stays small.
"""
ERROR_NOISE = 0.01
"""rad by which a measured error may seem to grow while the arm goes back to where it is."""
CONTACT_REASONS = ("blocked", "force")
"""How the reason of a fault begins when the arm was driven against something."""
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

    def __init__(self, config: Safety, on_event: Callable[[Event], None] | None = None) -> None:
        self.config = config
        self.robot_limits = config.robot_limits
        self.mode = Mode.HOLD
        self.reason = "not started"
        self.command: Command | None = None
        self.on_event = on_event
        self._tracker = tracker_for(config)
        self._force_check = RepeatedForceCheck(config)
        self._estop_reason: str | None = None  # set by ``estop``, obeyed by the next tick
        # Where the arm goes in HOLD after ``clear``, (n,) rad: to where it was measured.
        self._settle: list[float] | None = None

    # ---- What the ticker and the person may ask for.

    def start(self, now: float, state: RobotState) -> None:
        """Starts at the measured joints, at rest, in HOLD.

        Raises:
            UserError: the robot is outside its limits or the workspace, it moves, its state is old
                or wrong, it is pushed, or a fault was not cleared.
        """
        if self.mode in _LATCHED:
            raise UserError(
                f"The robot is in {self.mode} ({self.reason}); that must be cleared first."
            )
        self._require_start(now, state)
        if self.command is None:
            q = state.q.astype(float)
            width = min(max(state.width, 0.0), MAX_WIDTH)
            self._tracker.start(q.tolist())
            self.command = Command(now, q, 0.0 * q, 0.0 * q, width, Mode.HOLD)
        self._restart(now, state)

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

    def estop(self, reason: str = "") -> None:
        """Stops at the next tick, whatever the reason; may be called from any thread."""
        self._estop_reason = reason or "a person pressed stop"

    def clear(self, now: float, state: RobotState) -> None:
        """From FAULT or ESTOP to HOLD, after a person has looked.

        The commands then go from where the arm was told to be to where it was measured, slowly and
        within all limits.

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
        self._require_start(now, state)
        self._restart(now, state)

    # ---- One tick.

    def tick(self, now: float, state: RobotState, target: Target | JointTarget | None) -> Command:
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
        if not math.isfinite(now):
            self._enter(self._last_tick, Mode.FAULT, f"the clock shows {now}, not a time")
            now = self._last_tick
        self._update_mode(now, state, target)
        width = last.width
        if self.mode in _FOLLOWING and self._target is not None:
            # ``target_problem`` has checked that it is of the arm's kind.
            self._tracker.follow(state.q.tolist(), self._target)  # type: ignore[arg-type]
            width = min(max(self._target.width, 0.0), MAX_WIDTH)
        elif self._settle is not None:
            if self._tracker.settle(state.q.tolist(), self._settle):
                self._settle = None
        else:
            self._tracker.brake()
        q, dq, ddq = map(np.array, self._tracker.motion)
        self.command = Command(now, q, dq, ddq, width, self.mode, self.reason)
        self._last_tick = now
        self._sent.append((now, self._tracker.motion[0]))
        return self.command

    def _update_mode(
        self, now: float, state: RobotState, target: Target | JointTarget | None
    ) -> None:
        """Checks what came in: keeps the newest good target, or changes the mode."""
        # 1. A person pressed stop.
        if self._estop_reason is not None:
            # A second stop has its say: Ctrl-C after the page's stop ends the program.
            self._enter(
                now, Mode.ESTOP, self._estop_reason, force=self._estop_reason != self.reason
            )
            self._estop_reason = None
        # 2. The ticker stalled, or its clock jumped.
        gap = now - self._last_tick
        if not 0.0 <= gap <= self.config.max_gap:
            backwards = f"the clock went back by {-gap:.3f} s"
            self.hold(now, backwards if gap < 0 else f"no tick for {gap:.3f} s")
        # 3. Something is wrong with the robot or its state.
        if wrong := self._state_problem(now, state) or self._motion_problem(state):
            self._enter(now, Mode.FAULT, wrong)
        # 4. A new target of whoever may move the arm.
        if target is not None and target.human == (self.mode == Mode.HUMAN):
            self._accept(now, target)
        # 5. No fresh target for too long.
        if self.mode in _FOLLOWING:
            age = now - (self._target.stamp if self._target else self._no_target_since)
            if not age <= self.config.max_target_age:
                self.hold(now, f"stale: no fresh target for {age:.3f} s")

    def _accept(self, now: float, target: Target | JointTarget) -> None:
        """Keeps a target that is valid and not older than the last one."""
        # A hold for lack of targets may end by itself, if the config says so.
        waiting = (
            self.mode == Mode.HOLD
            and self.config.resume == "fresh_target"
            and self.reason.startswith("stale")
        )
        if self.mode not in _FOLLOWING and not waiting:
            return
        if wrong := target_problem(self.config, target):
            self._enter(now, Mode.FAULT, wrong)
            return
        # Targets may come repeated or in the wrong order, and none may lie in the future.
        newest = self._target is None or target.stamp >= self._target.stamp
        if newest and target.stamp <= now + self.config.tick:
            self._target = target
            if waiting and now - target.stamp <= self.config.max_target_age:
                self._enter(now, Mode.RUN, "fresh target")

    def _state_problem(self, now: float, state: RobotState) -> str:
        """What is wrong with the robot or its state; empty while all is well."""
        return state_problem(self.config, now, state) or self._force_check.problem(state)

    def _motion_problem(self, state: RobotState) -> str:
        """Why the arm does not do what it is told; empty while it does."""
        q = state.q.tolist()
        error = max(map(abs, map(sub, q, self._tracker.motion[0])))
        if not error <= self._max_error:
            return f"blocked: the robot is {error:.2f} rad away from where it was told to be"
        # After ``clear`` a larger error is allowed, but it must not grow.
        self._max_error = max(self.config.max_error, min(self._max_error, error + ERROR_NOISE))
        # Frozen: how far was the arm told to move while the measured angles stayed the same? Only
        # commands that were sent before this state was measured can show in it.
        while len(self._sent) > 1 and self._sent[1][0] <= state.stamp:
            _, before = self._sent.popleft()
            self._commanded_motion += max(map(abs, map(sub, self._sent[0][1], before)))
        if q != self._last_measured:
            self._last_measured = q
            self._commanded_motion = 0.0
        elif not self._commanded_motion <= FROZEN_MOTION:
            return (
                "the measured angles stand still, but the arm was told to move by more than "
                f"{FROZEN_MOTION} rad"
            )
        return ""

    # ---- Starting, and changing the mode.

    def _require_start(self, now: float, state: RobotState) -> None:
        """Checks that the robot may start, or go on after a fault, from this state.

        Raises:
            UserError: it may not.
        """
        if not math.isfinite(now):
            raise UserError(f"The robot cannot start: the clock shows {now}, not a time.")
        if wrong := self._state_problem(now, state):
            raise UserError(f"The robot cannot start: {wrong}. Mend the cause first.")
        told = 0.0 if self.command is None else float(np.abs(self.command.dq).max())
        if not (told <= 1e-6 and float(np.abs(state.dq).max()) <= AT_REST):
            raise UserError("The arm still moves. Wait until it has come to rest.")
        if wrong := self._tracker.start_problem(state.q.tolist()):
            raise UserError(
                f"The robot cannot start: {wrong}. Guide it by hand to a free place inside the "
                "workspace."
            )

    def _restart(self, now: float, state: RobotState) -> None:
        """Forgets what was before, in HOLD. The commands go on without a jump."""
        told = self._tracker.motion[0]
        measured = state.q.tolist()
        self._last_tick = now
        self._target = None
        error = max(map(abs, map(sub, measured, told)))
        self._max_error = max(self.config.max_error, error + ERROR_NOISE)
        # For the check of frozen states: the measured angles, the rad that the arm was told to move
        # since they last changed, and the commands since the newest state was measured.
        self._last_measured = measured
        self._commanded_motion = 0.0
        self._sent = deque([(now, told)], maxlen=4096)
        self._enter(now, Mode.HOLD, "started", force=True)
        self._tracker.restart_reference()
        self._settle = state.q.tolist()

    def _enter(self, now: float, mode: Mode, reason: str, force: bool = False) -> None:
        """Changes the mode. Without ``force`` FAULT is left only for ESTOP, and ESTOP never."""
        latched = self.mode == Mode.ESTOP or (self.mode == Mode.FAULT and mode != Mode.ESTOP)
        if latched and not force:
            return
        event = Event(now, self.mode, mode, reason)
        self.mode = mode
        self.reason = reason
        self._settle = None
        if mode in _FOLLOWING and self.command is not None:
            self._tracker.restart_reference()
        if self.on_event is not None:
            self.on_event(event)
