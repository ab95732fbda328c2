"""The control process of one arm: libfranka's 1 kHz cycle, which images and inference cannot delay.

``robot.LibfrankaRobot`` starts it as
``python -m embodyrl.real_robot.libfranka.control_process FD ADDRESS MODEL REALTIME RECOVER``. At
each tick of the safety filter it receives ``["command", t, tick, q, dq, ddq]``: where to be at
time t. It follows these one tick later, within the robot's limits at 1 ms. If no more commands
come, because the control loop hangs or was killed, the arm makes the hardest stop from the last
one. Time is that of the robot: cycles of 1 ms since the start.
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
from embodyrl.real_robot.control.joint_tracking import JointTracker, Motion, Stopper
from embodyrl.real_robot.libfranka.process_link import Link
from embodyrl.real_robot.libfranka.realtime import ask_for_real_time
from embodyrl.real_robot.parsing import number, numbers

CYCLE = 1e-3
"""s per cycle of the robot."""
TELL_EVERY = 2
"""Cycles between two states for the control loop."""
VELOCITY_SMOOTHING = 0.1
"""Weight of a cycle in the reported velocities: jitter from cycle to cycle is no motion."""
PACE_SMOOTHING = 0.01
"""Weight of a cycle in the estimate of how long a cycle takes by this computer's clock."""
LOST = 3e-7
"""rad between what the robot was told and what it reports: beyond it the command was lost."""
GENTLE_TIME = 0.02
"""s after a lost command for which the arm uses only ``GENTLE_SHARE`` of its limits."""
GENTLE_SHARE = 0.5
"""Share of the acceleration and jerk limits then.

Robot and process may differ in what they believe happened in the lost cycles, by up to the rest.
"""
MARGIN = 0.03
"""Share of the limits that is kept free: the robot checks positions after its own arithmetic."""
HOME_SHARE = 0.2
"""Share of the velocity and acceleration limits on the way to the home posture."""
HOMED = 1e-4
"""rad and rad/s within which the arm counts as being at home."""


class Reference:
    """Where the arm is to be: a cubic from each command to the next, then the hardest stop.

    Args:
        stopper: plans stops within the robot's limits.
        t: s, when the reference begins.
        motion: of the arm then.
    """

    def __init__(self, stopper: Stopper, t: float, motion: Motion) -> None:
        self._stopper = stopper
        self._stop = None
        self._knots: deque[tuple[float, Motion]] = deque([(t, motion)], maxlen=4)

    def add(self, t: float, motion: Motion) -> None:
        """Adds the motion that is due at time ``t``, if it is newer than the last one."""
        if t > self._knots[-1][0]:
            self._knots.append((t, motion))
            self._stop = None

    def at(self, t: float) -> tuple[list[float], list[float]]:
        """Angles and velocities (7,) at time ``t``."""
        # After the last command: the stop from there.
        last, motion = self._knots[-1]
        if t >= last:
            if self._stop is None:
                self._stop = self._stopper.plan(motion)
            q, dq, _ = self._stop.at_time(min(t - last, self._stop.duration))
            return q, dq
        # Between two commands: the cubic.
        for before, after in reversed(list(pairwise(self._knots))):
            if before[0] <= t:
                return _cubic(t, before, after)
        # Before all commands that are kept.
        q, dq, _ = self._knots[0][1]
        return q, dq


def _cubic(
    t: float, before: tuple[float, Motion], after: tuple[float, Motion]
) -> tuple[list[float], list[float]]:
    """Angles and velocities (7,) at time t, on Hermite's cubic between two knots."""
    (t0, (q0, v0, _)) = before
    (t1, (q1, v1, _)) = after
    span = t1 - t0
    s = (t - t0) / span
    # Per joint: a + m0 s + c s^2 + d s^3, with the given angles and velocities at both ends.
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


def _motion_after_loss(state: Any) -> Motion:
    """The robot's own motion after lost commands, in which it keeps the last acceleration.

    The robot reports differences of the positions of its cycles, so its velocity is that of half a
    cycle ago.
    """
    dq = [v + 0.5 * CYCLE * a for v, a in zip(state.dq_d, state.ddq_d, strict=True)]
    return list(state.q_d), dq, list(state.ddq_d)


class ControlLoop:
    """Controls one robot until the other end of the link is closed and the arm is at rest.

    Args:
        robot: ``pylibfranka.Robot``.
        link: to the control loop of the safety filter.
        model: robot model, a key of ``limits.ROBOTS``.
    """

    def __init__(self, robot: Any, link: Link, model: str) -> None:
        # Limits for following commands, for the time after lost commands, and for the way home.
        safe = limits.limits_of(model).inside()
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
        self._gentle_tracker = JointTracker(safe, CYCLE, GENTLE_SHARE)
        self._slow_tracker = JointTracker(slow, CYCLE, together=True)
        self._time = time.monotonic()  # s of the robot's cycles
        self._cycles = 0
        self._delay = 0.01  # s by which commands are followed late: one tick of the safety filter
        self._gentle_until = -math.inf
        # s that a cycle takes by this computer's clock: longer in a slow simulator.
        self._pace = CYCLE
        self._home: list[float] | None = None  # the posture that the arm is on its way to

    def run(self) -> None:
        """Controls the arm. After a reflex it only reports it, until it is told to recover."""
        while not self._link.closed:
            try:
                self._control()
            except franka.ControlException as error:
                self._report_reflex(str(error) or type(error).__name__)

    def _control(self) -> None:
        """Follows commands, cycle by cycle, until the link is closed and the arm is at rest.

        Raises:
            ControlException: the robot stopped itself by a reflex.
        """
        # Start at rest where the robot is.
        control = self._robot.start_joint_position_control(franka.ControllerMode.JointImpedance)
        state, _ = control.readOnce()
        motion: Motion = (list(state.q_d), [0.0] * 7, [0.0] * 7)
        self._dq = list(state.dq)
        self._begin_at(motion)
        control.writeOnce(franka.JointPositions(motion[0]))
        came = time.monotonic()
        while True:
            # 1. Read the robot's state, and count the cycles that have passed.
            state, passed = control.readOnce()
            before = came
            came = time.monotonic()
            cycles = min(max(round(passed.to_sec() / CYCLE), 1), 20)
            self._time += cycles * CYCLE
            self._pace += PACE_SMOOTHING * ((came - before) / cycles - self._pace)
            if came - before > (cycles + 2) * self._pace:
                continue  # this state waited to be read, so there are newer ones
            # 2. Take the newest commands.
            self._receive()
            # 3. If the last command was lost, go on from what the robot did by itself.
            if max(abs(a - b) for a, b in zip(state.q_d, motion[0], strict=True)) > LOST:
                motion = _motion_after_loss(state)
                self._gentle_until = self._time + GENTLE_TIME
            # 4. Move on by one cycle, and answer unless the robot no longer waits.
            motion = self._next(motion)
            if time.monotonic() - came > self._pace:
                continue
            command = franka.JointPositions(motion[0])
            at_rest = max(map(abs, motion[1])) < 1e-6
            command.motion_finished = self._link.closed and at_rest
            control.writeOnce(command)
            if command.motion_finished:
                return
            # 5. Report the state.
            self._dq = [
                old + VELOCITY_SMOOTHING * (new - old)
                for old, new in zip(self._dq, state.dq, strict=True)
            ]
            self._cycles += 1
            if self._cycles % TELL_EVERY == 0:
                self._tell(state, "")

    def _begin_at(self, motion: Motion) -> None:
        """Follows commands from this motion on; the first one may be any time away."""
        self._reference = Reference(self._stopper, self._time - self._delay, motion)
        self._home = None

    def _next(self, motion: Motion) -> Motion:
        """The motion one cycle later: along the commands, or on the way home."""
        if self._home is None:
            gentle = self._time < self._gentle_until
            tracker = self._gentle_tracker if gentle else self._tracker
            return tracker.follow(motion, *self._reference.at(self._time - self._delay))
        motion = self._slow_tracker.follow(motion, self._home, [0.0] * 7)
        away = max(abs(a - b) for a, b in zip(motion[0], self._home, strict=True))
        if self._link.closed or (away < HOMED and max(map(abs, motion[1])) < HOMED):
            self._begin_at(motion)
        return motion

    def _receive(self) -> None:
        """Takes the newest commands. One that is not understood ends the link: the arm stops."""
        for word, *rest in self._link.heard():
            try:
                if word == "command":
                    t, tick, *motion = rest
                    q, dq, ddq = (numbers(x, 7, "a command").tolist() for x in motion)
                    self._delay = number(tick, 0.0, 1.0, "the tick")
                    self._reference.add(number(t, 0.0, 1e12, "the time"), (q, dq, ddq))
                elif word == "home":
                    (home,) = rest
                    self._home = numbers(home, 7, "the home posture").tolist()
            except ValueError as error:
                self._link.fail(str(error))

    def _tell(self, state: Any, reflex: str) -> None:
        """Reports the state to the control loop."""
        measured = list(state.q), self._dq, list(state.O_F_ext_hat_K[:3]), list(state.O_T_EE[12:15])
        rate = state.control_command_success_rate
        homing = self._home is not None
        self._link.say("state", self._time, time.monotonic(), *measured, reflex, rate, homing)

    def _report_reflex(self, why: str) -> None:
        """Reports that the robot has stopped itself, until it is told to recover."""
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
        fd: file descriptor of this process's end of the link.
        address: of the robot.
        model: robot model, whose limits are kept.
        realtime: whether the kernel must be a real-time one.
        recover: whether to recover from a reflex from before.
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
        loop = ControlLoop(robot, link, model)
        # A garbage collection takes longer than a cycle, and this process makes no garbage that
        # needs one: no cycles of references.
        gc.collect()
        gc.freeze()
        gc.disable()
        loop.run()
    except (RuntimeError, franka.FrankaException) as error:
        link.say("trouble", str(error) or type(error).__name__)
    link.close()


if __name__ == "__main__":
    descriptor, where, kind, *flags = sys.argv[1:]
    main(int(descriptor), where, kind, *(flag == "True" for flag in flags))
