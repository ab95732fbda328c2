"""What a robot's log costs: processor time per tick at 100 Hz, with and without pictures at 25 Hz.

    python benchmarks/robot_log.py --out benchmarks/robot_log.json

``ticker`` is what the thread that moves the arm spends on it, ``all`` what the whole process does:
the most that the ticker may have to wait for the writer. Each is the best of several runs. A row is
added to the file, so that versions of the log stand beside each other.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from embodyrl.real_robot.control.messages import Command, Mode, RobotState
from embodyrl.real_robot.logs.mcap_log import RunLog, read
from embodyrl.storage.provenance import git_commit, hardware, versions


def cost(ticks: int, pictures: int, size: int, file: Path) -> dict[str, float]:
    """Microseconds per tick and bytes per tick; the pictures are smooth with a little noise, as a camera's are."""
    rng = np.random.default_rng(0)
    q, dq, ddq = rng.normal(size=(3, ticks, 7))
    motion = [(Command(0.01 * k, q[k], dq[k], ddq[k], 0.08, Mode.RUN), RobotState(0.01 * k, q[k], dq[k], 0.08))
              for k in range(ticks)]  # fmt: skip
    noise = rng.normal(0, 3, (size, size, 3))
    scene = (np.linspace(0, 200, size)[:, None, None] + noise).clip(0, 255).astype(np.uint8)
    # No two alike, or the compression of the file would find them.
    scenes = [
        np.roll(scene, k, axis=1) + np.uint8(k % 50) for k in range(-(-ticks // 4) * pictures)
    ]
    action, proprio = rng.normal(size=(2, 7)).astype(np.float32)
    ticker = 0.0
    began = time.process_time()
    log = RunLog(file, {}, 0.0)
    for k, (command, state) in enumerate(motion):
        at = time.thread_time()
        log.tick(command, state)
        if pictures and k % 4 == 0:
            images = {f"camera{c}": scenes[k // 4 * pictures + c] for c in range(pictures)}
            log.action(
                command.stamp, action, False, {"images": images, "proprio": proprio, "prompt": "go"}
            )
        ticker += time.thread_time() - at
        while log._items.qsize() > 100:  # as in a run, where the writer keeps up
            time.sleep(0.001)
    log.close()
    whole = time.process_time() - began
    assert len(read(file)["/command"]) == ticks
    return {
        "ticker": ticker / ticks * 1e6,
        "all": whole / ticks * 1e6,
        "bytes": file.stat().st_size / ticks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ticks", type=int, default=1000)
    parser.add_argument("--size", type=int, default=224, help="of each of the two cameras")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    row = {"commit": git_commit(), "ticks": a.ticks, "size": a.size}
    with tempfile.TemporaryDirectory() as folder:
        for cameras in (0, 2):
            runs = [
                cost(a.ticks, cameras, a.size, Path(folder) / "run.mcap") for _ in range(a.runs)
            ]
            row[f"{cameras} cameras"] = {
                what: round(min(run[what] for run in runs), 1) for what in runs[0]
            }
    row |= {"hardware": hardware(), "versions": versions()}
    print(json.dumps(row))
    if a.out:
        rows = json.loads(a.out.read_text()) if a.out.is_file() else []
        a.out.write_text(json.dumps([*rows, row], indent=1) + "\n")


if __name__ == "__main__":
    main()
