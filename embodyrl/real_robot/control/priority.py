"""Real-time priority of the thread that drives an arm, so that no ordinary program keeps it waiting."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from embodyrl.real_robot.control.clocks import Clock, RealClock

PRIORITY = 10
"""Of 1 to 99. Interrupts, and the control process of libfranka, come before it."""


@contextmanager
def real_time_priority(clock: Clock) -> Iterator[str]:
    """Puts the calling thread before all ordinary ones, where it keeps real time and may do so.

    Threads and processes that it starts are ordinary. A thread that has such a priority keeps it.

    Args:
        clock: that the thread runs by; simulated time needs no priority.

    Yields:
        Why the thread has no priority; empty if it has one.
    """
    if not isinstance(clock, RealClock):
        yield "its time is simulated"
        return
    if not hasattr(os, "sched_setscheduler"):
        yield "only Linux has it"
        return
    before = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
    if before in (os.SCHED_FIFO, os.SCHED_RR):
        yield ""
        return
    try:
        _schedule(os.SCHED_FIFO, PRIORITY)
    except PermissionError:
        yield "this user may not ask for it"
        return
    try:
        yield ""
    finally:
        _schedule(before, 0)


def priority_report(clock: Clock) -> str:
    """A line for the pre-flight check."""
    with real_time_priority(clock) as why:
        if not why:
            return f"real-time priority {PRIORITY}"
    return (
        f"no real-time priority ({why}): a busy computer makes ticks late; docs/robot_setup.md "
        "says how"
    )


def _schedule(policy: int, priority: int) -> None:
    # What is started meanwhile is ordinary. Only root may take this flag away again, so it stays.
    os.sched_setscheduler(0, policy | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
