"""What this process may use of the machine: processor cores and memory, within its container."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


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


def usable_memory() -> tuple[float, float]:
    """Memory that this process may use, and how much of it is free, in bytes.

    Free is what can be had without swapping. Both are infinite where nothing is known.
    """
    # The machine's. macOS has no such table.
    table = MEMINFO.read_text() if MEMINFO.exists() else ""
    sizes = {name: 1024.0 * int(kib) for name, kib in re.findall(r"(\w+):\s+(\d+) kB", table)}
    whole, free = sizes.get("MemTotal", _whole_memory()), sizes.get("MemAvailable", math.inf)
    # The container's. Its use includes cached files, which the kernel can drop.
    # Version 1 of control groups says no limit by a number beyond all memory.
    limit = _read("memory.max") or _read("memory/memory.limit_in_bytes")
    used = _read("memory.current") or _read("memory/memory.usage_in_bytes")
    if limit.strip().isdigit() and used.strip().isdigit() and int(limit) < whole:
        files = _read("memory.stat") or _read("memory/memory.stat")
        # Version 1 has the container's own files, and with a total_ those of groups below it too.
        cached = re.findall(r"^(?:total_)?inactive_file (\d+)", files, re.MULTILINE)
        droppable = max(map(int, cached), default=0)
        whole, free = float(limit), min(free, int(limit) - int(used) + droppable)
    return whole, max(0.0, free)


def _whole_memory() -> float:
    """Bytes of memory of a machine without the table of Linux."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError, AttributeError):
        return math.inf


def _read(name: str) -> str:
    """The text of a file of the control groups; "" if it cannot be read."""
    try:
        return (CGROUPS / name).read_text()
    except OSError:
        return ""
