"""What this machine can do, tried rather than guessed, and how to mend what it cannot.

Whatever may crash, hang or take its time (drivers above all) is one of ``probes`` and runs in a
process of its own with a deadline.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from embodyrl.cli.probes import PROBES, has_gpu

Finding = dict[str, Any]
DEADLINE = 20.0
"""Seconds for one probe on an idle machine: each takes under 4 s. A busy one is given more, by its load."""


def diagnose(out: str = "runs") -> list[Finding]:
    """Tries everything; each finding has ``name``, ``ok``, ``optional``, ``found`` and ``mend`` (empty where ok).

    Args:
        out: the folder that runs are to be written under.
    """
    with ThreadPoolExecutor(max_workers=max(2, min(4, _cores()))) as pool:
        probes = list(pool.map(_try, PROBES))
        here = [_python(), *_packages(), *_machine(Path(out))]
    return here[:1] + probes + here[1:]


def _finding(name: str, ok: bool, found: str, mend: str, optional: bool = False) -> Finding:
    return {
        "name": name,
        "ok": ok,
        "optional": optional,
        "found": found,
        "mend": "" if ok else mend,
    }


def _try(key: str) -> Finding:
    probe = PROBES[key]
    if key == "vulkan" and importlib.util.find_spec("sapien") is None:
        return _finding(
            probe.name, False, "SAPIEN is not installed", "pip install 'embodyrl[maniskill]'", True
        )
    if key == "cuda" and not has_gpu():
        return _finding(
            probe.name,
            False,
            "no NVIDIA GPU: everything runs on the CPU",
            "none needed to start",
            True,
        )
    mend = probe.mend
    # The package may be a checkout on PYTHONPATH: the child must find the same one.
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **probe.env}
    command = [sys.executable, "-W", "ignore", "-m", "embodyrl.cli.probes", key]
    load = os.getloadavg()[0]
    deadline = DEADLINE * max(1.0, 2 * load / _cores())
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=deadline,
            stdin=subprocess.DEVNULL,
            env=env,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        busy = (
            f"; the machine is busy (load {load:.0f}), so try again when it is not"
            if load > 2 * _cores()
            else ""
        )
        return _finding(
            probe.name, False, f"no answer within {deadline:.0f} s{busy}", mend, probe.optional
        )
    if done.returncode == 0 and done.stdout.strip():
        return _finding(
            probe.name, True, done.stdout.strip().splitlines()[-1], mend, probe.optional
        )
    if done.returncode < 0:
        found = f"crashed (signal {-done.returncode})"
    else:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        found = lines[-1].strip() if lines else f"ended with status {done.returncode}"
    return _finding(probe.name, False, found, mend, probe.optional)


def _python() -> Finding:
    version = platform.python_version()
    ok = sys.version_info >= (3, 12)
    return _finding(
        "Python",
        ok,
        f"{version} at {sys.executable}",
        "use Python 3.12 or newer: make setup finds or gets one",
    )


def _packages() -> list[Finding]:
    """The base packages, and one finding for each extra, by the versions that are installed."""
    from packaging.requirements import Requirement

    groups: dict[str, list[Requirement]] = {"": []}
    for extra, line in _requirements():
        groups.setdefault(extra, []).append(Requirement(line))
    findings = []
    for extra, wanted in groups.items():
        if extra == "all":
            continue  # the sum of others
        missing = []
        wrong = []
        here = []
        for requirement in wanted:
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                missing.append(requirement.name)
                continue
            here.append(f"{requirement.name} {version}")
            if not requirement.specifier.contains(version, prereleases=True):
                wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
        ok = not missing and not wrong
        if ok:
            found = ", ".join(here) if extra else f"{len(here)} packages"
        else:
            found = "; ".join(([f"not installed: {', '.join(missing)}"] if missing else []) + wrong)
        mend = f"pip install 'embodyrl[{extra}]'" if extra else "pip install embodyrl"
        findings.append(
            _finding(f"extra: {extra}" if extra else "base packages", ok, found, mend, bool(extra))
        )
    return findings


def _requirements() -> list[tuple[str, str]]:
    """(extra or "", requirement) of the installed package; of ``pyproject.toml`` where a checkout is run as it is."""
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if project.is_file():
        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        groups = {"": table["dependencies"], **table["optional-dependencies"]}
        return [(extra, line) for extra, lines in groups.items() for line in lines]
    pairs = []
    for line in importlib.metadata.requires("embodyrl") or []:
        text, _, marker = line.partition(";")
        named = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        pairs.append((named.group(1) if named else "", text.strip()))
    return pairs


def _machine(out: Path) -> list[Finding]:
    cores, memory, available = _cores(), *_memory_gib()
    parent = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    free = shutil.disk_usage(parent).free / 2**30
    try:
        with tempfile.TemporaryFile(dir=parent) as file:
            file.write(b"x")
        written = True
        said = f"{out.absolute()} can be written"
    except OSError as error:
        written = False
        said = f"{out.absolute()} cannot be written: {error.strerror or error}"
    return [
        _finding(
            "processor cores",
            cores >= 2,
            f"{cores}",
            "two or more make the quickstart's ten minutes",
            True,
        ),
        _finding(
            "memory",
            available >= 4,
            f"{available:.1f} GiB of {memory:.1f} GiB available",
            (
                "end other programs, or run fewer environments (env.num_envs=16); the quickstart "
                "wants 4 GiB"
            ),
            True,
        ),
        _finding(
            "disk",
            free >= 1,
            f"{free:.1f} GiB free at {parent}",
            f"free at least 1 GiB at {parent}",
        ),
        _finding(
            "runs folder",
            written,
            said,
            f"choose a folder that you may write: run.out=FOLDER, or chmod u+w {parent}",
        ),
    ]


def _cores() -> int:
    """Cores that this process may use: affinity and a container's quota counted."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, round(int(quota[0]) / int(quota[1]))))
    return cores


def _memory_gib() -> tuple[float, float]:
    """Total and available memory, a container's limit counted."""
    numbers = dict(re.findall(r"(\w+):\s+(\d+) kB", _read("/proc/meminfo")))
    total = int(numbers.get("MemTotal", 0)) / 2**20
    available = int(numbers.get("MemAvailable", 0)) / 2**20
    if not total:  # not Linux
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    used = _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        total = min(total, int(limit) / 2**30)
        cached = re.search(
            r"^inactive_file (\d+)", _read("/sys/fs/cgroup/memory.stat"), re.MULTILINE
        )
        reclaimable = int(cached.group(1)) if cached else 0
        available = min(available, (int(limit) - int(used) + reclaimable) / 2**30)
    return total, available


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def print_findings(findings: list[Finding]) -> None:
    """Prints one line for each finding and, below those that fail, what to do."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for f in findings:
        mark = (
            Text("ok", "green")
            if f["ok"]
            else Text("--", "yellow")
            if f["optional"]
            else Text("FAILS", "bold red")
        )
        said = Text(f["found"], overflow="fold")
        if f["mend"]:
            said.append(f"\n{f['mend']}", style="cyan")
        table.add_row(mark, Text(f["name"], no_wrap=True), said)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    broken = [f["name"] for f in findings if not f["ok"] and not f["optional"]]
    if broken:
        console.print(
            Text(
                f"\nNot ready: {', '.join(broken)}. What to do is said in each line.",
                style="bold red",
            )
        )
    else:
        console.print(Text("\nReady. Start with: embodyrl quickstart", style="bold"))
        if not all(f["ok"] for f in findings):
            console.print("Lines marked -- are for parts that you may never need.")
