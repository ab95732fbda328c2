"""The control process of one arm: libfranka's 1 kHz cycle and nothing else: neither images nor inference delay it.

``robot.LibfrankaRobot`` starts it
(``python -m embodyrl.real_robot.libfranka.loop FD ADDRESS MODEL REALTIME RECOVER``). It is told
``["command", t, q, dq, ddq]`` at each tick of the safety filter, where to be at time t, and follows
them one tick later under the limits at 1 ms. When no more come, because the ticker hangs or was
killed, it goes on along the hardest stop from the last one. Time is the robot's own: cycles of 1 ms
since the start.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import gc
import math
import socket
import sys
import time
from collections import deque
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pylibfranka as franka

from embodyrl.real_robot.control import limits
from embodyrl.real_robot.control.tracking import JointTracker, Motion, Stopper
from embodyrl.real_robot.libfranka.link import Link
from embodyrl.real_robot.libfranka.realtime import ask_for_real_time

CYCLE = 1e-3
TELL_EVERY = 2
"""Cycles between two states for the ticker."""
SMOOTH = 0.1
"""Weight of a cycle in the velocities that are told: a servo's chatter from one cycle to the next is no motion."""
PACE = 0.01
"""The same in how long a cycle takes by this computer's clock."""
LOST = 3e-7
"""rad between what the robot was told and what it then says: the command did not come in time."""
GENTLE = 0.02
GENTLE_SHARE = 0.5
"""s for which the arm then takes only a share of the acceleration and jerk limits: what the robot and this process
believe of the cycles in between may differ, by up to the rest."""
MARGIN = 0.03
"""Share of the limits that is kept free: the robot sees positions that went through its own arithmetic."""
HOME_SHARE = 0.2
"""Of the limits, on the way to a posture that the arm is sent to."""
HOMED = 1e-4


class Reference:
    """Where the arm is to be: a cubic from each command to the next, then the hardest stop after the last.

    Args:
        stopper: within the robot's limits.
        t: when it begins.
        motion: of the arm then.
    """

    def __init__(self, stopper: Stopper, t: float, motion: Motion) -> None:
        self._stopper = stopper
        self._stop = None
        self._knots: deque[tuple[float, Motion]] = deque([(t, motion)], maxlen=4)

    def add(self, t: float, motion: Motion) -> None:
        """A command: the motion that is due at time ``t``; one that is not newer than the last is left out."""
        if t > self._knots[-1][0]:
            self._knots.append((t, motion))
            self._stop = None

    def at(self, t: float) -> tuple[list[float], list[float]]:
        """Angles and velocities (7,) at time ``t``."""
        last, motion = self._knots[-1]
        if t >= last:
            if self._stop is None:
                self._stop = self._stopper.plan(motion)
            q, dq, _ = self._stop.at_time(min(t - last, self._stop.duration))
            return q, dq
        for before, after in reversed(list(pairwise(self._knots))):
            if before[0] <= t:
                return _cubic(t, before, after)
        q, dq, _ = self._knots[0][1]  # more commands at once than are kept
        return q, dq


def _cubic(
    t: float, before: tuple[float, Motion], after: tuple[float, Motion]
) -> tuple[list[float], list[float]]:
    """Hermite's cubic between two knots."""
    (t0, (q0, v0, _)) = before
    (t1, (q1, v1, _)) = after
    span = t1 - t0
    s = (t - t0) / span
    where = []
    speed = []
    for a, b, va, vb in zip(q0, q1, v0, v1, strict=True):
        rise = b - a
        m0 = span * va
        m1 = span * vb
        c = 3 * rise - 2 * m0 - m1
        d = m0 + m1 - 2 * rise
        where.append(a + s * (m0 + s * (c + s * d)))
        speed.append((m0 + s * (2 * c + 3 * s * d)) / span)
    return where, speed


def _gone_on(state: Any) -> Motion:
    """Where the robot has taken the arm by itself in cycles that were lost: its last acceleration, kept.

    What it tells are differences of the positions of its cycles, so its velocity is that of half a
    cycle ago.
    """
    dq = [v + 0.5 * CYCLE * a for v, a in zip(state.dq_d, state.ddq_d, strict=True)]
    return list(state.q_d), dq, list(state.ddq_d)


class Loop:
    """One connection to a robot, until the ticker's end of the link is closed and the arm is at rest."""

    def __init__(self, robot: Any, link: Link, model: str) -> None:
        safe = limits.find(model).inside()
        keep = 1.0 - MARGIN
        safe = replace(
            safe,
            dq_max=safe.dq_max * keep,
            ddq_max=safe.ddq_max * keep,
            dddq_max=safe.dddq_max * keep,
        )
        slow = replace(safe, dq_max=safe.dq_max * HOME_SHARE, ddq_max=safe.ddq_max * HOME_SHARE)
        self._robot = robot
        self._link = link
        self._stopper = Stopper(safe)
        self._tracker = JointTracker(safe, CYCLE)
        self._slow = JointTracker(slow, CYCLE, together=True)
        self._time = time.monotonic()
        self._cycles = 0
        self._delay = 0.01
        self._gentle = JointTracker(safe, CYCLE, GENTLE_SHARE)
        self._gentle_until = -math.inf
        self._pace = CYCLE  # s by this computer's clock, of a cycle: longer in a slow simulator
        self._home: list[float] | None = None

    def run(self) -> None:
        """Controls the arm; after a reflex it only tells of it, until it is told to recover."""
        while not self._link.closed:
            try:
                self._control()
            except franka.ControlException as error:
                self._stopped(str(error))

    def _control(self) -> None:
        control = self._robot.start_joint_position_control(franka.ControllerMode.JointImpedance)
        state, _ = control.readOnce()
        motion: Motion = (list(state.q_d), [0.0] * 7, [0.0] * 7)
        self._dq = list(state.dq)
        self._begin_at(motion)
        control.writeOnce(franka.JointPositions(motion[0]))
        came = time.monotonic()
        while True:
            state, passed = control.readOnce()
            before = came
            came = time.monotonic()
            cycles = min(max(round(passed.to_sec() / CYCLE), 1), 20)
            self._time += cycles * CYCLE
            self._pace += PACE * ((came - before) / cycles - self._pace)
            if came - before > (cycles + 2) * self._pace:
                continue  # it has lain about: there are newer ones
            self._hear()
            if max(abs(a - b) for a, b in zip(state.q_d, motion[0], strict=True)) > LOST:
                motion = _gone_on(state)
                self._gentle_until = self._time + GENTLE
            motion = self._next(motion)
            if time.monotonic() - came > self._pace:
                continue  # the robot no longer waits for an answer
            command = franka.JointPositions(motion[0])
            at_rest = max(map(abs, motion[1])) < 1e-6
            command.motion_finished = self._link.closed and at_rest
            control.writeOnce(command)
            if command.motion_finished:
                return
            self._dq = [
                old + SMOOTH * (new - old) for old, new in zip(self._dq, state.dq, strict=True)
            ]
            self._cycles += 1
            if self._cycles % TELL_EVERY == 0:
                self._tell(state, "")

    def _begin_at(self, motion: Motion) -> None:
        """From here on commands count; the first that comes may be any time away."""
        self._reference = Reference(self._stopper, self._time - self._delay, motion)
        self._home = None

    def _next(self, motion: Motion) -> Motion:
        if self._home is None:
            tracker = self._gentle if self._time < self._gentle_until else self._tracker
            return tracker.follow(motion, *self._reference.at(self._time - self._delay))
        motion = self._slow.follow(motion, self._home, [0.0] * 7)
        away = max(abs(a - b) for a, b in zip(motion[0], self._home, strict=True))
        if self._link.closed or (away < HOMED and max(map(abs, motion[1])) < HOMED):
            self._begin_at(motion)
        return motion

    def _hear(self) -> None:
        for word, *rest in self._link.heard():
            if word == "command":
                t, tick, q, dq, ddq = rest
                self._delay = tick
                self._reference.add(t, (q, dq, ddq))
            elif word == "home":
                (self._home,) = rest

    def _tell(self, state: Any, reflex: str) -> None:
        measured = list(state.q), self._dq, list(state.O_F_ext_hat_K[:3]), list(state.O_T_EE[12:15])
        rate = state.control_command_success_rate
        homing = self._home is not None
        self._link.say("state", self._time, time.monotonic(), *measured, reflex, rate, homing)

    def _stopped(self, why: str) -> None:
        """The robot has stopped itself; it stays so until somebody has decided."""
        while not self._link.closed:
            began = time.monotonic()
            state = self._robot.read_once()
            self._dq = list(state.dq)
            self._tell(state, why)
            if any(word == "recover" for word, *_ in self._link.heard()):
                self._robot.automatic_error_recovery()
                return
            time.sleep(0.01)
            self._time += time.monotonic() - began


def main(fd: int, address: str, model: str, realtime: bool, recover: bool) -> None:
    """Connects and controls.

    Args:
        fd: this process's end of the link.
        address: of the robot.
        model: of its limits.
        realtime: whether the kernel must be a real-time one.
        recover: whether a reflex from before may be recovered from.
    """
    link = Link(socket.socket(fileno=fd))
    try:
        if realtime:
            ask_for_real_time()
        robot = franka.Robot(
            address, franka.RealtimeConfig.kEnforce if realtime else franka.RealtimeConfig.kIgnore
        )
        if robot.read_once().robot_mode == franka.RobotMode.Reflex and recover:
            robot.automatic_error_recovery()
        loop = Loop(robot, link, model)
        gc.collect()
        gc.freeze()
        # a collection takes longer than a cycle, and this process makes no cycles of references
        gc.disable()
        loop.run()
    except (RuntimeError, franka.FrankaException) as error:
        link.say("trouble", str(error))
    link.close()


if __name__ == "__main__":
    number, where, kind, *flags = sys.argv[1:]
    main(int(number), where, kind, *(flag == "True" for flag in flags))
