"""``embodyrl doctor``: tests what works on this machine, and says how to repair what does not.

Everything is tried, not only looked up. What may crash or hang, such as graphics drivers, is a
probe (``probes.py``): it runs in its own process, with a deadline.
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
from embodyrl.machine import usable_cores, usable_memory

Finding = dict[str, Any]
"""The result of a test.

Keys: ``name``, ``ok``, ``optional``, ``found`` (a sentence) and ``mend`` (what to do; "" if ok).
"""
DEADLINE = 20.0
"""Seconds for one probe on an idle machine, where each takes under 4 s.

A busy machine gets more, in proportion to its load.
"""


def diagnose(out: str = "runs") -> list[Finding]:
    """Runs all tests.

    Args:
        out: the folder in which runs will be written.
    """
    with ThreadPoolExecutor(max_workers=max(2, min(4, usable_cores()))) as pool:
        probes = list(pool.map(_run_probe, PROBES))
        in_this_process = [*_packages(), *_machine(Path(out))]
    return [_python(), *probes, *in_this_process]


def _finding(name: str, ok: bool, found: str, mend: str, optional: bool = False) -> Finding:
    return {
        "name": name,
        "ok": ok,
        "optional": optional,
        "found": found,
        "mend": "" if ok else mend,
    }


def _run_probe(key: str) -> Finding:
    """Runs a probe in its own process, and reads its result from the last line that it prints."""
    probe = PROBES[key]
    # Two cases are known without running anything.
    if key == "vulkan" and importlib.util.find_spec("sapien") is None:
        mend = "pip install 'embodyrl[maniskill]'"
        return _finding(probe.name, False, "SAPIEN is not installed", mend, optional=True)
    if key == "cuda" and not has_gpu():
        found = "no NVIDIA GPU: everything runs on the CPU"
        return _finding(probe.name, False, found, "none needed to start", optional=True)

    def result(ok: bool, found: str) -> Finding:
        return _finding(probe.name, ok, found, probe.mend, probe.optional)

    # The process must import the same package as this one, which may be a checkout on PYTHONPATH.
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **probe.env}
    command = [sys.executable, "-W", "ignore", "-m", "embodyrl.cli.probes", key]
    load = os.getloadavg()[0]
    deadline = DEADLINE * max(1.0, 2 * load / usable_cores())
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
        found = f"no answer within {deadline:.0f} s"
        if load > 2 * usable_cores():
            found += f"; the machine is busy (load {load:.0f}), so try again when it is not"
        return result(False, found)
    if done.returncode == 0 and done.stdout.strip():
        return result(True, done.stdout.strip().splitlines()[-1])
    if done.returncode < 0:
        return result(False, f"crashed (signal {-done.returncode})")
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if lines:
        return result(False, lines[-1].strip())
    return result(False, f"ended with status {done.returncode}")


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
    """Compares installed versions with the requirements: the base packages, then each extra."""
    from packaging.requirements import Requirement

    # The requirements of each extra; those of the base install have the extra "".
    groups: dict[str, list[Requirement]] = {"": []}
    for extra, line in _requirements():
        groups.setdefault(extra, []).append(Requirement(line))
    findings = []
    for extra, requirements in groups.items():
        # The extra "all" only repeats others.
        if extra == "all":
            continue
        missing = []
        wrong = []
        installed = []
        for requirement in requirements:
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                missing.append(requirement.name)
                continue
            installed.append(f"{requirement.name} {version}")
            if not requirement.specifier.contains(version, prereleases=True):
                wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
        ok = not missing and not wrong
        if not ok:
            found = "; ".join(([f"not installed: {', '.join(missing)}"] if missing else []) + wrong)
        elif extra:
            found = ", ".join(installed)
        else:
            found = f"{len(installed)} packages"
        name = f"extra: {extra}" if extra else "base packages"
        mend = f"pip install 'embodyrl[{extra}]'" if extra else "pip install embodyrl"
        findings.append(_finding(name, ok, found, mend, optional=bool(extra)))
    return findings


def _requirements() -> list[tuple[str, str]]:
    """(extra or "", requirement) of this package.

    They are read from ``pyproject.toml`` in a checkout, or else from the installed package.
    """
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
    """Cores, memory, disk space, and whether runs can be written into ``out``."""
    cores = usable_cores()
    memory, available = (size / 2**30 for size in usable_memory())
    # The folder may not exist yet: look at the nearest parent that does.
    parent = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    free = shutil.disk_usage(parent).free / 2**30
    try:
        with tempfile.TemporaryFile(dir=parent) as file:
            file.write(b"x")
        writable = True
        write_result = f"{out.absolute()} can be written"
    except OSError as error:
        writable = False
        write_result = f"{out.absolute()} cannot be written: {error.strerror or error}"
    return [
        _finding(
            "processor cores",
            cores >= 2,
            f"{cores}",
            "the quickstart took 8 to 24 minutes on machines with two cores",
            True,
        ),
        _finding(
            "memory",
            available >= 4,
            f"{available:.1f} GiB of {memory:.1f} GiB available",
            (
                "end other programs, or run fewer environments (env.num_envs=16); the quickstart "
                "needs 4 GiB"
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
            writable,
            write_result,
            f"choose a folder in which you may write: run.out=FOLDER, or chmod u+w {parent}",
        ),
    ]


def print_findings(findings: list[Finding]) -> None:
    """Prints one line for each finding and, below those that fail, what to do."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for finding in findings:
        if finding["ok"]:
            mark = Text("ok", "green")
        elif finding["optional"]:
            mark = Text("--", "yellow")
        else:
            mark = Text("FAILS", "bold red")
        text = Text(finding["found"], overflow="fold")
        if finding["mend"]:
            text.append(f"\n{finding['mend']}", style="cyan")
        table.add_row(mark, Text(finding["name"], no_wrap=True), text)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)

    # The result of all tests.
    broken = [f["name"] for f in findings if not f["ok"] and not f["optional"]]
    if broken:
        text = f"\nNot ready: {', '.join(broken)}. Each line marked FAILS says what to do."
        console.print(Text(text, style="bold red"))
    else:
        console.print(Text("\nReady. Start with: embodyrl quickstart", style="bold"))
        if not all(f["ok"] for f in findings):
            console.print("Lines marked -- are for optional parts, which you may not need.")
