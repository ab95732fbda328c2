"""How well a detector tells failures from successes, on episodes that it was not fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from embodyrl.detectors.detector import Detector
from embodyrl.detectors.episodes import Watched
from embodyrl.functional.by_task import short
from embodyrl.functional.intervals import format_rate, wilson

TENTHS = range(1, 11)
"""Of the time limit, at which the failures are counted that have been detected."""


def evaluate_detector(
    detector: Detector, episodes: Sequence[Watched], control_hz: float, max_steps: int
) -> dict[str, Any]:
    """Counts detected failures and false alarms.

    Args:
        detector: fitted, to none of the episodes.
        episodes: recorded, successes and failures.
        control_hz: actions per second.
        max_steps: the time limit in actions.

    Returns:
        ``detected`` of the failures and ``false_alarms`` of the successes, each with k, n and the
        Wilson interval; ``seconds_early`` before the end of a detected failure (quartiles, None
        for none); ``by_time``, the failures detected by each share of the time limit; and
        ``tasks``, the two counts of each instruction.
    """
    # When each episode was called a failure, if ever.
    alarms = [detector.alarm(episode) for episode in episodes]
    pairs = list(zip(episodes, alarms, strict=True))
    # Of the failures: how long before their end, and how many by each time.
    failures = [(e, at) for e, at in pairs if not e.success]
    early = [(e.length - at) / control_hz for e, at in failures if at is not None]
    by_time = [
        {
            "share": tenths / 10,
            **_count([at is not None and 10 * at < tenths * max_steps for _, at in failures]),
        }
        for tenths in TENTHS
    ]
    # Both counts of each instruction.
    tasks = {
        task: _rates([pair for pair in pairs if pair[0].task == task])
        for task in sorted({episode.task for episode in episodes})
    }
    return {
        "kind": detector.signal.kind,
        "asked": detector.false_alarms,
        "episodes": len(pairs),
        **_rates(pairs),
        "seconds_early": [float(q) for q in np.quantile(early, (0.25, 0.5, 0.75))]
        if early
        else None,
        "by_time": by_time,
        "tasks": tasks,
    }


def _rates(pairs: Sequence[tuple[Watched, int | None]]) -> dict[str, Any]:
    return {
        "detected": _count([at is not None for e, at in pairs if not e.success]),
        "false_alarms": _count([at is not None for e, at in pairs if e.success]),
    }


def _count(hits: Sequence[bool]) -> dict[str, Any]:
    k = sum(hits)
    return {"k": k, "n": len(hits), "interval": wilson(k, len(hits))}


def print_detection(result: dict[str, Any]) -> None:
    """The same for people to read."""
    rows = [("failures detected before the end", result["detected"])]
    rows += [(f"by {row['share']:.0%} of the time limit", row) for row in result["by_time"][1:-1:2]]
    rows.append((f"false alarms (asked: {result['asked']:.0%})", result["false_alarms"]))
    for title, row in rows:
        print(f"{title:>34}  {format_rate(row['k'], row['n'])}")
    if result["seconds_early"]:
        low, middle, high = result["seconds_early"]
        print(
            f"{'seconds before the end':>34}  {middle:.1f} (half of them {low:.1f} to {high:.1f})"
        )
    if len(result["tasks"]) > 1:
        for task, row in result["tasks"].items():
            found = format_rate(row["detected"]["k"], row["detected"]["n"])
            wrong = format_rate(row["false_alarms"]["k"], row["false_alarms"]["n"])
            print(f"{short(task):>34}  detected {found}, false alarms {wrong}")
