"""How many processor cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """The cores of this process's affinity, within the quota of its container, at least 1."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    quota = _quota()
    return cores if quota is None else min(cores, max(1, round(quota)))


def _quota() -> float | None:
    """Cores that the container was given, as by ``docker run --cpus``; None without a limit."""
    # Version 2 of control groups: "QUOTA PERIOD" in microseconds, or "max PERIOD".
    # Version 1 has a file for each, and -1 is no limit.
    texts = _read("cpu.max").split() or [
        *_read("cpu/cpu.cfs_quota_us").split(),
        *_read("cpu/cpu.cfs_period_us").split(),
    ]
    if len(texts) == 2 and all(text.isdigit() for text in texts):
        return int(texts[0]) / int(texts[1])
    return None


def _read(name: str) -> str:
    """The text of a file of the control groups; "" if it cannot be read."""
    try:
        return (CGROUPS / name).read_text()
    except OSError:
        return ""
