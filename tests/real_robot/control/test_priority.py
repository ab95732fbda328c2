"""The priority of the ticker's thread, as the kernel tells it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from embodyrl.real_robot.control.clocks import PacedClock, RealClock
from embodyrl.real_robot.control.priority import (
    PRIORITY,
    SWITCH_INTERVAL,
    priority_report,
    real_time_priority,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="Linux only")


def scheduling() -> tuple[int, int]:
    """Policy and priority of the calling thread."""
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK, os.sched_getparam(0).sched_priority


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may surely ask for priority")
def test_the_thread_has_priority_and_what_it_starts_has_none() -> None:
    before = scheduling()
    interval = sys.getswitchinterval()
    found: list[tuple[int, int]] = []
    with real_time_priority(RealClock()) as why:
        assert why == "" and scheduling() == (os.SCHED_FIFO, PRIORITY)
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL)
        other = threading.Thread(target=lambda: found.append(scheduling()))
        other.start()
        other.join()
        with real_time_priority(RealClock()):  # what has it keeps it
            pass
        assert scheduling() == (os.SCHED_FIFO, PRIORITY)
    assert found == [(os.SCHED_OTHER, 0)] and scheduling() == before
    assert sys.getswitchinterval() == interval
    assert priority_report(RealClock()) == f"real-time priority {PRIORITY}"


def test_simulated_time_needs_none() -> None:
    with real_time_priority(PacedClock(RealClock())) as why:
        assert why == "its time is simulated" and scheduling()[0] == os.SCHED_OTHER


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_who_may_not_ask_is_told_and_goes_on() -> None:
    code = (
        "import os, resource\n"
        "from embodyrl.real_robot.control.priority import priority_report\n"
        "from embodyrl.real_robot.control.clocks import RealClock\n"
        "resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))\n"
        "os.setuid(65534)\n"
        "print(priority_report(RealClock()))\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "no real-time priority (this user may not ask for it)" in said.stdout
