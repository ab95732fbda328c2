"""Why ticks of the control loop come late: where the time goes, over a transport.

    python benchmarks/robot_late_ticks.py CHECKPOINT --rounds 6 --out benchmarks/robot_late_ticks.json

A checkpoint drives the simulated arm over rosbridge, in real time, in each of ``WAYS`` in turns. A
tick is late if it comes half a tick or more after it was due. For each late tick the largest part
of its time is told: ``waking``, from when the ticker's thread was to wake until it ran, or
``measure``, ``decide``, ``send`` and ``log``, the parts of ``ticker.drive``. ``queued`` is how long
the thread was ready to run while no core was free for it (its ``schedstat`` of Linux). What is late
beyond that, by half a tick or more, waited for Python's lock (``waited_for_lock``).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from robot_transports import SAFETY, twin

from embodyrl.real_robot.commands import deployment
from embodyrl.real_robot.commands.deploy import deploy_checkpoint
from embodyrl.real_robot.control import ticker
from embodyrl.real_robot.control.priority import real_time_priority
from embodyrl.storage.provenance import git_commit, hardware, versions

WAYS = {
    "ordinary": (False, 5e-3),
    "ordinary, 0.5 ms": (False, 5e-4),
    "real-time": (True, 5e-3),
    "real-time, 0.5 ms": (True, 5e-4),
}
"""Whether the ticker's thread asks for real-time priority, and Python's switch interval (s)."""
PARTS = ("waking", "measure", "decide", "send", "log")


class Stopwatch:
    """Notes the parts of each tick, as the clock, the robot and the log of ``ticker.drive``."""

    def __init__(self, robot: Any, clock: Any, log: Any) -> None:
        self.robot = robot
        self.clock = clock
        self.log = log
        self.rows: list[list[float]] = []  # per tick: s of each part, and s queued
        self._file = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._marks = [0.0] * len(PARTS)
        self._queued = self._queue_seconds()

    def _queue_seconds(self) -> float:
        return int(self._file.read_text().split()[1]) / 1e9

    # ---- As the clock.

    def now(self) -> float:
        return self.clock.now()

    def sleep_until(self, stamp: float) -> None:
        self._marks[4] = time.monotonic() - self._began  # the log, and whether the episode is over
        due = max(stamp, time.monotonic())
        self.clock.sleep_until(stamp)
        self._began = time.monotonic()
        queued = self._queue_seconds()
        # The next tick's waking belongs to this one's parts: together they make it late.
        self.rows.append([self._began - due, *self._marks[1:], queued - self._queued])
        self._queued = queued

    # ---- As the robot and the log.

    def __getattr__(self, name: str) -> Any:
        return getattr(self.robot, name)

    def state(self) -> Any:
        self._began = getattr(self, "_began", time.monotonic())
        state = self.robot.state()
        self._marks[1] = self._lap()
        return state

    def send(self, command: Any) -> None:
        self._marks[2] = self._lap()
        self.robot.send(command)
        self._marks[3] = self._lap()

    def _lap(self) -> float:
        before = self._began
        self._began = time.monotonic()
        return self._began - before


def timed(watches: list[Stopwatch], priority: bool, interval: float) -> Any:
    """``ticker.drive`` with a stopwatch, with or without priority, and with a switch interval."""

    def drive(robot: Any, clock: Any, guard: Any, executor: Any, decoder: Any, log: Any, **k: Any):
        watch = Stopwatch(robot, clock, log)
        watches.append(watch)
        before = sys.getswitchinterval()
        try:
            # The stopwatch hides the clock from the ticker, which so asks for no priority itself.
            with real_time_priority(clock) if priority else nullcontext():
                sys.setswitchinterval(interval)
                return ticker.drive(watch, watch, guard, executor, decoder, log, **k)
        finally:
            sys.setswitchinterval(before)

    return drive


def spread(seconds: np.ndarray) -> dict[str, float]:
    """Median and largest, in ms; nothing of nothing."""
    if not len(seconds):
        return {}
    return {
        "p50": round(float(np.median(seconds)) * 1e3, 1),
        "max": round(float(seconds.max()) * 1e3, 1),
    }


def late_ticks(rows: np.ndarray, tick: float) -> dict[str, Any]:
    """What made ticks late.

    Args:
        rows: (T, 6), see ``Stopwatch``.
        tick: s between two ticks.
    """
    work = rows[:, 1:5].sum(1)
    # Work that fits into the tick makes nothing late.
    late = rows[:, 0] + np.maximum(work - tick, 0.0)
    bad = late >= 0.5 * tick
    causes = Counter(PARTS[int(np.argmax(row[:5]))] for row in rows[bad])
    return {
        "ticks": len(rows),
        "late": round(float(bad.mean()), 5),
        "late_percent": round(100 * float(bad.mean()), 2),
        "largest_part": dict(causes),
        "ms_late": spread(late[bad]),
        "ms_queued_of_late": spread(rows[bad, 5]),
        "waited_for_lock": int((late[bad] - rows[bad, 5] >= 0.5 * tick).sum()),
        "p99_ms": {
            part: round(float(np.percentile(rows[:, k], 99)) * 1e3, 2)
            for k, part in enumerate((*PARTS, "queued"))
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--episodes", type=int, default=2)
    parser.add_argument("--speed", type=float, default=0.25)
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=[*WAYS])
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    rows: dict[str, list[list[float]]] = {way: [] for way in a.ways}
    watches: list[Stopwatch] = []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, twin(a.checkpoint, "rosbridge") as address:
        file = Path(folder) / "twin.yaml"
        file.write_text(json.dumps({"preset": "twin", "safety": SAFETY}))
        for number in range(a.rounds):
            for way in a.ways[:: -1 if number % 2 else 1]:
                deployment.drive = timed(watches, *WAYS[way])
                deploy_checkpoint(
                    a.checkpoint, robot="rosbridge", address=address, robot_file=str(file),
                    episodes=a.episodes, speed=a.speed, out=f"{folder}/out",
                )  # fmt: skip
                rows[way] += [row for watch in watches for row in watch.rows]
                watches.clear()
                print(way, json.dumps(late_ticks(np.array(rows[way]), 0.01)), flush=True)
    result = {
        "checkpoint": a.checkpoint,
        "rows": {way: late_ticks(np.array(rows[way]), 0.01) for way in a.ways},
    }
    result |= {"load": [load, os.getloadavg()[0]], "commit": git_commit()}
    result |= {"hardware": hardware(), "versions": versions()}
    if a.out:
        a.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
