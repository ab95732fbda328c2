"""The last thing before the robot: whatever comes in, what goes out is smooth, within limits, and stops when in doubt.

Each tick, in this order: finite, shape and staleness of state and target; workspace and rotation box; speed of the
reference; reference at most so far from the measured joints; jerk-limited tracking under velocity limits that depend on
the angles; force stop. A latched state machine (``Mode``) says whose targets count.

Why no limit is ever broken: a tracked state is let through only if the stop that would follow it keeps all limits
(``can_stop``, ``_overshoot``); else the tick belongs to the stop from the state before, which had passed the same
test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from ruckig import ControlInterface, InputParameter, OutputParameter, Ruckig, Synchronization, Trajectory

from embodyrl.errors import UserError
from embodyrl.real_robot import kinematics, limits
from embodyrl.real_robot.messages import Array, Command, Mode, RobotState, Target

MAX_WIDTH = 0.08
"""m between the open fingers of the Franka hand."""
IK_RATE = 3.0
"""rad/s, how fast the fastest joint of the reference turns: about what the joints can do."""
POSTURE_RATE = 2.5
"""1/s, how fast redundant motion goes back to the home posture: as in the simulated tasks."""
_LOCKED = (Mode.FAULT, Mode.ESTOP)
Motion = tuple[list[float], list[float], list[float]]
"""Angles, velocities and accelerations of the seven joints. Floats, since numpy costs more than seven of anything."""


@dataclass(frozen=True)
class SafetyConfig:
    """Where and how the robot may move. The box has no default: whoever deploys must know it.

    Attributes:
        box_low: (3,) m, corner of the workspace of the tool centre point, in the base's frame.
        box_high: (3,) m, the opposite corner.
        robot: model, a key of ``limits.ROBOTS``.
        tick: s between two commands.
        max_tilt: rad, how far the hand may turn from pointing down with its fingers along y.
        ee_speed: m/s, of the reference that is followed.
        ee_turn: rad/s, the same for its rotation.
        max_lead: rad, how far the reference may be ahead of the measured joints: a blocked arm stores up no jerk.
        max_error: rad between commanded and measured joints that is a fault, e.g. because the state is frozen.
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
        if len(self.box_low) != 3 or len(self.box_high) != 3 or not np.less(self.box_low, self.box_high).all():
            raise UserError(
                f"The workspace box {self.box_low} to {self.box_high} is not one: give x, y, z of both corners."
            )
        if self.resume not in ("person", "fresh_target"):
            raise UserError(f"resume is {self.resume!r}; it must be 'person' or 'fresh_target'.")
        if not 1e-3 <= self.tick <= 0.05:
            raise UserError(f"tick is {self.tick} s; the filter runs at 20 to 1000 Hz.")
        if not 0.0 < self.follow <= 1.0:
            raise UserError(f"follow is {self.follow}; it is a share of the limits, above 0 and at most 1.")


@dataclass(frozen=True)
class Event:
    """A change of mode: when (s), from, to and why."""

    stamp: float
    before: Mode
    after: Mode
    reason: str


class SafetyFilter:
    """See the module. One object per robot, used by the ticker's thread; ``estop`` alone may come from any thread."""

    def __init__(self, config: SafetyConfig, on_event: Callable[[Event], None] | None = None) -> None:
        self.config = config
        self.hard = limits.find(config.robot)
        self.limits = safe = self.hard.inside()
        self.mode, self.reason = Mode.HOLD, "not started"
        self.command: Command | None = None
        self._on_event = on_event
        self._low, self._high = np.array(config.box_low), np.array(config.box_high)
        # The stop slows down at the acceleration limit, so the velocity limit may not fall faster than that.
        decel = np.minimum(safe.decel, 0.9 * safe.ddq_max)
        self._joints = [
            _Joint(*row)
            for row in np.stack(
                [safe.q_min, safe.q_max, safe.dq_max, safe.ddq_max, safe.dddq_max, safe.offset, 2.0 * decel], axis=1
            ).tolist()
        ]
        # Where the velocity limit has fallen to zero, and a little before.
        dead = safe.offset**2 / (2.0 * decel) + 2e-3
        self._ref_low, self._ref_high = safe.q_min + dead, safe.q_max - dead
        self._tracker, self._stopper = Ruckig(7, config.tick), Ruckig(7, config.tick)
        self._track_in, self._track_out = InputParameter(7), OutputParameter(7)
        self._stop_in, self._stop_path = InputParameter(7), Trajectory(7)
        for inputs, share in ((self._track_in, config.follow), (self._stop_in, 1.0)):
            inputs.synchronization = Synchronization.No
            inputs.max_velocity = safe.dq_max.tolist()
            inputs.max_acceleration = (share * safe.ddq_max).tolist()
            inputs.max_jerk = (share * safe.dddq_max).tolist()
        self._stop_in.control_interface = ControlInterface.Velocity
        self._stop_in.target_velocity = [0.0] * 7
        self._estop_reason = ""

    def start(self, now: float, state: RobotState) -> None:
        """Begins at the measured joints, at rest, in HOLD.

        Raises:
            UserError: the robot is outside its limits or the workspace.
        """
        if wrong := self._unfit(state):
            raise UserError(f"The robot cannot start: {wrong}. Guide it by hand to a free place inside the workspace.")
        q, zero = state.q.astype(float), np.zeros(7)
        self._motion: Motion = (q.tolist(), [0.0] * 7, [0.0] * 7)
        self.command = Command(now, q, zero, zero, state.width, Mode.HOLD)
        self._last_tick, self._target = now, None
        self._q_ref = self.command.q
        self._position, self._rotation, _ = kinematics.forward(self._q_ref)
        self._outside = max(self._overshoot(self._motion), 0.0)
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
            UserError: the cause is still there, the arm has not come to rest, or it was a reflex and
                ``recover_reflex`` is off.
        """
        if self.mode not in _LOCKED:
            return
        assert self.command is not None
        if self.reason.startswith("reflex") and not self.config.recover_reflex:
            raise UserError(
                f"The robot stopped itself ({self.reason}). It is not recovered from unless recover_reflex is set: "
                "look at the robot and its desk, then restart."
            )
        if np.abs(self.command.dq).max() > 1e-6 or np.abs(state.dq).max() > 0.05:
            raise UserError("The arm still moves. Wait until it has come to rest.")
        self.start(now, state)

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
            self._motion = self._track(self._motion, state, self._target)
            width = min(max(self._target.width, 0.0), MAX_WIDTH)
        else:
            self._motion = self._brake(self._motion)
            width = last.width
        q, dq, ddq = (np.array(x) for x in self._motion)
        self.command = Command(now, q, dq, ddq, width, self.mode, self.reason)
        self._last_tick = now
        return self.command

    def _judge(self, now: float, state: RobotState, target: Target | None) -> None:
        """Finite, shape, staleness, reflex, force: keeps the newest good target or changes the mode."""
        c = self.config
        if self._estop_reason:
            self._enter(now, Mode.ESTOP, self._estop_reason)
            self._estop_reason = ""
        gap = now - self._last_tick
        if not 0.0 <= gap <= c.max_gap:
            self.hold(now, f"the clock went back by {-gap:.3f} s" if gap < 0 else f"no tick for {gap:.3f} s")
        if wrong := self._state_fault(now, state):
            self._enter(now, Mode.FAULT, wrong)
        moving = self.mode in (Mode.RUN, Mode.HUMAN)
        waiting = self.mode == Mode.HOLD and c.resume == "fresh_target" and self.reason.startswith("stale")
        if target is not None and (moving or waiting) and target.human == (self.mode == Mode.HUMAN):
            if wrong := _target_fault(target):
                self._enter(now, Mode.FAULT, wrong)
            elif now - target.stamp >= -1.0 and (self._target is None or target.stamp >= self._target.stamp):
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
        if state.q.shape != (7,) or state.dq.shape != (7,) or not math.isfinite(float(state.q.sum() + state.dq.sum())):
            return "the robot's state is not seven finite angles and velocities"
        if (age := now - state.stamp) > c.max_state_age:
            return f"no fresh state of the robot for {age:.3f} s"
        if (error := float(np.abs(state.q - self.command.q).max())) > c.max_error:
            return f"the robot is {error:.2f} rad away from where it was told to be"
        if state.force is not None and not math.sqrt(float(state.force @ state.force)) <= c.max_force:
            return f"force: {math.sqrt(float(state.force @ state.force)):.0f} N at the hand"
        return ""

    def _track(self, before: Motion, state: RobotState, target: Target) -> Motion:
        """A step towards the target, or as far as one can still stop."""
        c = self.config
        self._move_reference(target)
        q_ref = kinematics.ik_step(
            self._q_ref, self._position, self._rotation, self._ref_low, self._ref_high,
            max_step=IK_RATE * c.tick, posture_gain=POSTURE_RATE * c.tick,
        )  # fmt: skip
        q_ref = _clamp(_clamp(q_ref, state.q - c.max_lead, state.q + c.max_lead), self._ref_low, self._ref_high)
        ahead = ((q_ref - self._q_ref) / c.tick).tolist()
        self._q_ref = q_ref
        caps = [joint.caps(q, dq, c.tick) for joint, q, dq in zip(self._joints, *before[:2], strict=True)]
        inputs, out = self._track_in, self._track_out
        inputs.current_position, inputs.current_velocity, inputs.current_acceleration = before
        inputs.target_position = q_ref.tolist()
        inputs.target_velocity = [
            min(max(v, 0.9 * low), 0.9 * high) for v, (low, high) in zip(ahead, caps, strict=True)
        ]
        inputs.min_velocity, inputs.max_velocity = [low for low, _ in caps], [high for _, high in caps]
        if self._tracker.update(inputs, out) < 0:
            return self._brake(before)
        motion = out.new_position, out.new_velocity, out.new_acceleration
        able = [joint.can_stop(*each) for joint, *each in zip(self._joints, *motion, strict=True)]
        if not all(able):
            stop = self._brake(before)
            motion = tuple(
                [a if ok else b for ok, a, b in zip(able, *both, strict=True)]
                for both in zip(motion, stop, strict=True)
            )
        # The stop from an accepted motion ends where it was foreseen, so braking makes this no larger.
        outside = max(self._overshoot(motion), 0.0)  # type: ignore[arg-type]
        if outside > self._outside + 1e-4:
            return self._brake(before)
        self._outside = outside
        return motion  # type: ignore[return-value]

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

    def _brake(self, motion: Motion) -> Motion:
        """One tick of the hardest stop; at rest it stays where it is."""
        self._plan_stop(motion)
        return self._stop_path.at_time(self.config.tick)

    def _overshoot(self, motion: Motion) -> float:
        """How far (m) outside the workspace a stop from here would lead, half way or at its end; below 0 inside."""
        self._plan_stop(motion)
        path, worst = self._stop_path, -math.inf
        (x0, y0, z0), (x1, y1, z1) = self.config.box_low, self.config.box_high
        for share in (0.5, 1.0):
            x, y, z = kinematics.tip(path.at_time(share * path.duration)[0])
            worst = max(worst, x - x1, y - y1, z - z1, x0 - x, y0 - y, z0 - z)
        return worst

    def _plan_stop(self, motion: Motion) -> None:
        inputs = self._stop_in
        inputs.current_position, inputs.current_velocity, inputs.current_acceleration = motion
        self._stopper.calculate(inputs, self._stop_path)

    def _unfit(self, state: RobotState) -> str:
        """Why the robot may not start from here; empty if it may."""
        if state.q.shape != (7,) or not np.isfinite(state.q).all():
            return "its state is not seven finite angles"
        if state.reflex:
            return f"it is stopped by a reflex ({state.reflex})"
        if (beyond := (state.q > self.limits.q_max) | (state.q < self.limits.q_min)).any():
            return f"joint {int(beyond.argmax()) + 1} is at its end ({state.q[beyond.argmax()]:.3f} rad)"
        place = np.array(kinematics.tip(state.q.tolist()))
        # A centimetre of grace: one may stop at the very wall.
        if ((place < self._low - 0.01) | (place > self._high + 0.01)).any():
            return f"the hand is at {np.round(place, 3).tolist()}, outside the workspace"
        return ""

    def _leave(self, needed: Mode, verb: str) -> None:
        if self.mode != needed or self.command is None:
            raise UserError(f"The robot cannot {verb}: it is in {self.mode} ({self.reason}), not in {needed}.")

    def _enter(self, now: float, mode: Mode, reason: str, force: bool = False) -> None:
        """Changes the mode; without ``force`` a lock is never left, and ESTOP not for FAULT."""
        if not force and (self.mode == Mode.ESTOP or (self.mode == Mode.FAULT and mode != Mode.ESTOP)):
            return
        event = Event(now, self.mode, mode, reason)
        self.mode, self.reason = mode, reason
        if mode in (Mode.RUN, Mode.HUMAN) and self.command is not None:
            self._q_ref = self.command.q
            self._position, self._rotation, _ = kinematics.forward(self._q_ref)
        if self._on_event is not None:
            self._on_event(event)


class _Joint(NamedTuple):
    """The limits of one joint, drawn in; the speed limit towards an end is sqrt(decel2 * room) - offset."""

    q_min: float
    q_max: float
    dq_max: float
    ddq_max: float
    dddq_max: float
    offset: float
    decel2: float

    def can_stop(self, q: float, dq: float, ddq: float) -> bool:
        """Whether the hardest stop from here keeps the velocity limit, and with it both ends of the joint."""
        return self._keeps(self.q_max - q, dq, ddq) and self._keeps(q - self.q_min, -dq, -ddq)

    def _keeps(self, room: float, v: float, a: float) -> bool:
        """The same for one end, ``room`` away, with v and a towards it.

        While the acceleration falls to -A the velocity rises to at most v + a^2/2J, and the joint goes at most that
        times (a + A)/J. From there on it slows down at A, faster than the limit falls (at most D v / (v + offset), with
        D < A).
        """
        a = max(a, 0.0)
        peak = v + 0.5 * a * a / self.dddq_max
        if peak <= 0.0:
            return True
        room -= peak * (a + self.ddq_max) / self.dddq_max
        return peak <= self.dq_max and room > 0.0 and peak <= math.sqrt(self.decel2 * room) - self.offset

    def caps(self, q: float, dq: float, tick: float) -> tuple[float, float]:
        """Velocities to track under, a little inside what ``can_stop`` asks, so that it seldom has to say no."""
        lead = dq * (tick + 2.0 * self.ddq_max / self.dddq_max)
        return -self._cap(q - self.q_min + min(lead, 0.0)), self._cap(self.q_max - q - max(lead, 0.0))

    def _cap(self, room: float) -> float:
        free = math.sqrt(self.decel2 * room) - self.offset if room > 0.0 else 0.0
        return 0.95 * min(max(free, 1e-3), self.dq_max)


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
