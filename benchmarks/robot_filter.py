"""Fuzzes the safety filter and measures its time per tick.

    python benchmarks/robot_filter.py --ticks 1000000 --out benchmarks/robot_filter.json
    python benchmarks/robot_filter.py --against CHECKOUT    # of another commit, in turns

Half of the ticks run with a workspace box and half without, for both robots and at 100 Hz and 1
kHz. ``peak`` is the largest share of each limit that any command used (above 1 is a violation).
``hand`` is what ``BoundMonitor`` saw of the hand.
Times are of ``SafetyFilter.tick`` alone: by the wall clock, which on a busy machine (``load``) is
that of the others too, and of the processor. With ``--against`` both checkouts take turns at the
same targets (``robot_filter_ticks.py``), so that a busy machine slows both down alike.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.real_robot.control.fuzz import fuzz
from embodyrl.storage.provenance import git_commit, hardware, versions

ROUNDS = 12
ROUND_TICKS = 2000
PERCENTILES = ("p50", "p90", "p99", "own_p99")
"""See ``robot_filter_ticks.py``."""
HERE = Path(__file__).resolve()


def in_turns(other: Path) -> dict[str, Any]:
    """Medians over the rounds of the processor's time per tick, of another checkout and of this."""
    found: dict[str, list[dict[str, float]]] = {"before": [], "now": []}
    checkouts = {"before": other, "now": HERE.parents[1]}
    for seed in range(ROUNDS):
        for which in sorted(checkouts, reverse=bool(seed % 2)):
            command = [sys.executable, str(HERE.with_name("robot_filter_ticks.py"))]
            done = subprocess.run(
                [*command, str(ROUND_TICKS), str(seed)],
                env=os.environ | {"PYTHONPATH": str(checkouts[which])},
                stdout=subprocess.PIPE,
                check=True,
            )
            found[which].append(json.loads(done.stdout))
    medians = {
        which: {k: round(float(np.median([r[k] for r in rows])), 1) for k in PERCENTILES}
        for which, rows in found.items()
    }
    ratios = {
        k: [now[k] / old[k] for old, now in zip(*found.values(), strict=True)] for k in PERCENTILES
    }
    return {
        "commits": {"before": _commit(other), "now": git_commit()},
        "rounds": ROUNDS,
        "ticks": ROUND_TICKS,
        "processor_microseconds": medians,
        "now_over_before": {k: round(float(np.median(rows)), 3) for k, rows in ratios.items()},
        "rounds_now_over_before": {k: np.round(rows, 3).tolist() for k, rows in ratios.items()},
        "real_time": all(row["real_time"] for rows in found.values() for row in rows),
    }


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ticks", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", type=Path, help="a checkout of another commit")
    a = parser.parse_args()
    pair = in_turns(a.against.resolve()) if a.against else None
    if pair:
        print(json.dumps(pair), flush=True)
    cases = [
        (robot, tick, wide)
        for robot in ("fr3", "panda")
        for tick in (0.01, 0.001)
        for wide in (False, True)
    ]
    rows, durations, load = [], [], os.getloadavg()[0]
    for number, (robot, tick, wide) in enumerate(cases):
        began, took = time.perf_counter(), []
        watch, bounds, modes = fuzz(robot, a.ticks // len(cases), a.seed + number, tick, took, wide)
        durations += took
        row = {
            "robot": robot,
            "hz": round(1 / tick),
            "box": not wide,
            "ticks": watch.ticks,
            "modes": modes,
        }
        row |= {
            "peak": {k: round(v, 4) for k, v in watch.peak.items()},
            "violated": watch.violated | bounds.violated,
        }
        row |= {"hand": {k: round(v, 4) for k, v in bounds.peak.items()}}
        rows.append(row | {"seconds": round(time.perf_counter() - began, 1)})
        print(json.dumps(rows[-1]), flush=True)
    percents = np.percentile(np.array(durations) / 1e3, [50, 90, 99], axis=0).round(1).tolist()
    wall, processor = (
        {f"p{p}": row[k] for p, row in zip((50, 90, 99), percents, strict=True)} for k in (0, 1)
    )
    result = {
        "ticks": sum(r["ticks"] for r in rows),
        "violations": sum(len(r["violated"]) for r in rows),
        "microseconds": {"wall": wall, "processor": processor},
        "load": [load, os.getloadavg()[0]],
        "in_turns": pair,
        "cases": rows,
        "commit": git_commit(),
        "hardware": hardware(),
        "versions": versions(),
    }
    if a.out:
        a.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: result[k] for k in ("ticks", "violations", "microseconds", "load")}))


if __name__ == "__main__":
    main()
