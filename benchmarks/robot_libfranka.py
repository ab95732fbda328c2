"""A scripted policy on franka-sim's arm, by libfranka: with the safety filter, and without it as a control.

    .venv-ros/bin/python benchmarks/robot_libfranka.py --minutes 10 --out
    benchmarks/robot_libfranka.json

``make test-robot`` makes both environments. franka-sim runs with all its reflexes. Minutes are the
robot's own: on a busy machine the simulator is slower than the wall (``real_time`` says how much),
and the reflexes count its cycles. ``tracking`` is the difference between command and joints
measured 50 ms later, without the last joint, which is soft in the simulator.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.real_robot.logs.mcap_log import read
from embodyrl.storage.provenance import git_commit, hardware, versions

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))


def main() -> None:
    from franka_arm import ARM, PATIENT, SPACE, driven, start_sim, unfiltered

    from embodyrl.real_robot.libfranka.robot import LibfrankaRobot

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    load, sim = os.getloadavg()[0], start_sim()
    try:
        with tempfile.TemporaryDirectory() as folder:
            robot = LibfrankaRobot(ARM, PATIENT, SPACE, {}, seconds=60.0)
            robot.begin(0, 120.0)
            began = time.monotonic()
            episode = driven(robot, Path(folder) / "run.mcap", 60.0 * a.minutes)
            wall = time.monotonic() - began
            filtered: dict[str, Any] = {
                "seconds": round(episode.seconds, 1),
                "real_time": round(episode.seconds / wall, 2),
                "reflexes": int(bool(robot.state().reflex)),
                "end": f"{episode.mode}: {episode.reason}",
                "command_success_rate": round(robot.success_rate, 4),
                "late_ticks": episode.late,
                "peak": {k: round(v, 4) for k, v in episode.peak.items()},
            }
            robot.close()
            messages = read(Path(folder) / "run.mcap")
        hand, told = (
            np.array([m["q"] for m in messages[topic]]) for topic in ("/state", "/command")
        )
        error = np.abs(hand[5:] - told[:-5])[:, :6].max(1)
        filtered["tracking"] = {
            f"p{p}_rad": round(float(np.percentile(error, p)), 4) for p in (50, 99)
        }
        print(json.dumps(filtered), flush=True)
        time.sleep(2.0)
        control = {"stopped_by": unfiltered(10.0)}
        print(json.dumps(control), flush=True)
    finally:
        sim.kill()
        sim.wait()
    result = {"filtered": filtered, "unfiltered": control, "load": [load, os.getloadavg()[0]]}
    result |= {
        "commit": git_commit(),
        "hardware": hardware(),
        "versions": versions() | sim_versions(),
    }
    if a.out:
        a.out.write_text(json.dumps(result, indent=1) + "\n")


def sim_versions() -> dict[str, str]:
    from franka_arm import SIM

    said = subprocess.run(
        [SIM / "bin" / "python", "-c", "from importlib.metadata import version; print(version('franka-sim'))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {"franka-sim": said.stdout.strip()}


if __name__ == "__main__":
    main()
