"""Real-time priority of the thread that drives an arm, so that no ordinary program keeps it waiting."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from embodyrl.real_robot.control.clocks import Clock, RealClock

PRIORITY = 10
"""Of 1 to 99. Interrupts, and the control process of libfranka, come before it."""
SWITCH_INTERVAL = 5e-4
"""s for which another thread of Python may keep its lock; Python's own 5 ms are half a tick."""
LINUX = hasattr(os, "sched_setscheduler")
REAL_TIME = (os.SCHED_FIFO, os.SCHED_RR) if LINUX else ()


@contextmanager
def real_time_priority(clock: Clock) -> Iterator[str]:
    """Puts the calling thread before all ordinary ones, where it keeps real time and may do so.

    Threads and processes that it starts are ordinary. A thread that has such a priority keeps it.
    Meanwhile the other threads of Python hand over its lock sooner, with a priority or without.

    Args:
        clock: that the thread runs by; simulated time needs no priority.

    Yields:
        Why the thread has no priority; empty if it has one.
    """
    if not isinstance(clock, RealClock):
        yield "its time is simulated"
        return
    interval = sys.getswitchinterval()
    policy = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK if LINUX else 0
    why = _prioritise(policy)
    sys.setswitchinterval(min(interval, SWITCH_INTERVAL))
    try:
        yield why
    finally:
        sys.setswitchinterval(interval)
        if not why and policy not in REAL_TIME:
            _schedule(policy, 0)


def priority_report(clock: Clock) -> str:
    """A line for the pre-flight check."""
    with real_time_priority(clock) as why:
        if not why:
            return f"real-time priority {PRIORITY}"
    return (
        f"no real-time priority ({why}): a busy computer makes ticks late; docs/robot_setup.md "
        "says how"
    )


def _prioritise(policy: int) -> str:
    """Gives the calling thread, whose policy this is, priority; says why it cannot have it."""
    if not LINUX:
        return "only Linux has it"
    if policy not in REAL_TIME:
        try:
            _schedule(os.SCHED_FIFO, PRIORITY)
        except PermissionError:
            return "this user may not ask for it"
    return ""


def _schedule(policy: int, priority: int) -> None:
    # What is started meanwhile is ordinary. Only root may take this flag away again, so it stays.
    os.sched_setscheduler(0, policy | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
