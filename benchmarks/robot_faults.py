"""Faults of an arm in motion, many times each, in one process and over every transport.

    make test-robot && python benchmarks/robot_faults.py --times 20

The faults are those of the tests: tests/real_robot/test_faults.py (one process), ros/test_twin.py (ROS 2,
ROS 1, rosbridge) and libfranka/test_libfranka.py (franka-sim). Each strikes an arm in motion, and is
survived if the test passes: the arm is at rest, or goes on where it should; no command was ever beyond a
limit of velocity, acceleration or jerk; and the log names the fault.
A round is each of them once, in real time, and its results are kept in
``runs/bench/robot_faults/ROUND.xml``, so the same command goes on after an interruption. It writes
``benchmarks/robot_faults.json``: per transport and fault how many were survived, and what the others said.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from embodyrl.functional.intervals import wilson
from embodyrl.storage.provenance import git_commit, hardware, versions

FOLDER = Path("runs/bench/robot_faults")
TESTS = Path("tests/real_robot")
FILES = ("test_faults.py", "ros/test_twin.py", "libfranka/test_libfranka.py")
CHOSEN = ("fault", "what_happens", "needs_no_stop", "change_nothing", "stalls", "cold_start")
CHOSEN += ("cycles", "killed", "gone", "hangs", "die")
"""Tests that strike the arm, by words of their names."""
KINDS = ("ros2", "ros1", "rosbridge")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--python", default=".venv-ros/bin/python", help="of make test-robot")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/robot_faults.json"))
    a = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for number in range(a.times):
        file = FOLDER / f"{number:03d}.xml"
        if not file.exists():
            play(a.python, file)
        a.out.write_text(json.dumps(summary(), indent=1) + "\n")
        print(f"round {number + 1}: {json.dumps(totals())}", flush=True)


def play(python: str, file: Path) -> None:
    """A round: every fault once. What fails is counted, and not tried again."""
    parts = file.with_suffix(".part")
    command = [python, "-m", "pytest", "-q", "-k", " or ".join(CHOSEN), f"--junitxml={parts}"]
    command += [str(TESTS / name) for name in FILES]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with {done.returncode}: {' '.join(command)}")
    parts.rename(file)


def each() -> list[tuple[str, str, str]]:
    """(transport, fault, what it said) of all faults so far; it said nothing where it was survived."""
    found = []
    for file in sorted(FOLDER.glob("*.xml")):
        for case in ElementTree.parse(file).iter("testcase"):
            skipped = case.find("skipped")
            if skipped is not None:
                raise SystemExit(f"{case.get('name')} was skipped: {skipped.get('message')}")
            failed = case.find("failure") if case.find("error") is None else case.find("error")
            said = "" if failed is None else str(failed.get("message"))[:300]
            found.append((*named(str(case.get("classname")), str(case.get("name"))), said))
    return found


def named(file: str, test: str) -> tuple[str, str]:
    """The transport and the fault of a test."""
    name, _, values = test.rstrip("]").partition("[")
    words = values.split("-") if values else []
    transport = next((kind for kind in KINDS if kind in words), "")
    transport = transport or ("libfranka" if "libfranka" in file else "")
    transport = transport or ("ros1" if "ros" in file.split(".") else "one process")
    fault = next((word for word in words if word not in KINDS), "")
    plain = re.sub(r"^test_(a_)?", "", name).replace("_", " ")
    return transport, f"{plain}: {fault}" if fault else plain


def totals() -> dict[str, str]:
    """Transport -> survived of all."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for transport, _, said in each():
        counts[transport][0] += not said
        counts[transport][1] += 1
    return {transport: f"{n} of {total}" for transport, (n, total) in counts.items()}


def summary() -> dict[str, Any]:
    """Everything that is known so far."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for transport, fault, said in each():
        row = rows.setdefault(
            (transport, fault),
            {"transport": transport, "fault": fault, "survived": 0, "times": 0, "said": []},
        )
        row["survived"] += not said
        row["times"] += 1
        row["said"] += [said] if said else []
    by_transport = {}
    for transport in dict.fromkeys(t for t, _ in rows):
        mine = [row for row in rows.values() if row["transport"] == transport]
        survived, times = (sum(row[key] for row in mine) for key in ("survived", "times"))
        by_transport[transport] = {
            "faults": len(mine), "survived": survived, "times": times,
            "interval": wilson(survived, times),
        }  # fmt: skip
    about = {"commit": git_commit(), "hardware": hardware(), "versions": versions()}
    return {
        "transports": by_transport,
        "rows": [*rows.values()],
        "load": os.getloadavg()[0],
        **about,
    }


if __name__ == "__main__":
    main()
