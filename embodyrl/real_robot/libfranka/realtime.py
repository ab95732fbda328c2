"""Real-time scheduling of the control process, so that nothing else keeps it waiting."""

from __future__ import annotations

import os
from pathlib import Path

KERNEL = Path("/sys/kernel/realtime")


def ask_for_real_time(kernel: Path = KERNEL) -> None:
    """Gives this process the highest real-time priority.

    libfranka does that only for control by callbacks, which the control process does not use.

    Args:
        kernel: the file in which a real-time kernel says that it is one.

    Raises:
        RuntimeError: the kernel is not a real-time one, or this user may not ask for priority.
    """
    if not kernel.exists() or kernel.read_text().strip() != "1":
        raise RuntimeError(
            "the kernel of this computer is no real-time one (PREEMPT_RT): install one, or go "
            "without at your own risk (libfranka.realtime: false); docs/robot_setup.md says how"
        )
    try:
        os.sched_setscheduler(
            0, os.SCHED_FIFO, os.sched_param(os.sched_get_priority_max(os.SCHED_FIFO))
        )
    except PermissionError as error:
        raise RuntimeError(
            "this user may not ask for real-time priority: give it an rtprio of 99 in "
            "/etc/security/limits.conf, and log in again; docs/robot_setup.md says how"
        ) from error
