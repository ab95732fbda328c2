"""``embodyrl report --extrapolate``: how far success may still rise with more compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from embodyrl.functional.scaling_curve import extrapolate
from embodyrl.report.read import same_but_seeds

AXES = {"env_steps": "env steps", "minutes": "minutes"}
"""What an evaluation has in it -> what it is called."""


def fit_runs(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Curves of success against env steps and minutes, see ``functional.scaling_curve``.

    Args:
        runs: what ``read_run`` returned; if they differ in their seeds alone, they are fitted
            together.

    Returns:
        One entry for each fit: ``runs``, their places in the list, and for each of ``AXES`` what
        ``extrapolate`` returned.
    """
    together = [list(range(len(runs)))] if same_but_seeds(runs) else [[k] for k in range(len(runs))]
    return [
        {"runs": members, **{axis: _fit([runs[k] for k in members], axis) for axis in AXES}}
        for members in together
    ]


def _fit(runs: Sequence[dict[str, Any]], axis: str) -> dict[str, Any]:
    if not all(run["reports_success"] for run in runs):
        return {"refused": "the env reports no success"}
    # At the start and the end the same training may have been scored twice: the first of each counts.
    points = {}
    for number, run in enumerate(runs):
        for e in run["evals"]:
            if e["n"] and e.get(axis) is not None:
                points.setdefault((number, e["iteration"]), (e[axis], e["k"], e["n"]))
    rows = np.array([[*row, number] for (number, _), row in points.items()], dtype=float)
    compute, solved, played, run = rows.reshape(-1, 4).T
    return extrapolate(compute, solved, played, run.astype(int))


def print_fits(runs: Sequence[dict[str, Any]], fits: Sequence[dict[str, Any]]) -> None:
    """What ``fit_runs`` found, as text."""
    for fit in fits:
        members = [runs[k]["name"] for k in fit["runs"]]
        print(f"\n{', '.join(members)}{': fitted together' if len(members) > 1 else ''}")
        for axis, words in AXES.items():
            found = fit[axis]
            if found["refused"]:
                print(f"  by {words:<10} no curve: {found['refused']}")
                continue
            read = [f"at {m}x {_range(of)}" for m, of in found["ahead"].items()]
            print(
                f"  by {words:<10} {', '.join(read)}, at the end {_range(found['asymptote'])}; half "
                f"of the rise after {found['middle'][0]:,.4g} of {found['last']:,.4g}"
            )
    if any(len(fit["runs"]) == 1 for fit in fits):
        print("\nA curve of one run says nothing of training anew.")


def _range(of: Sequence[float]) -> str:
    value, low, high = of
    return f"{value:.0%} [{100 * low:.0f}, {100 * high:.0f}]"
