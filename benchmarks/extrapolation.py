"""How well fitted curves predict what more training then gave: held-out evaluations of our own runs.

    python benchmarks/extrapolation.py         seconds; reads the other JSONs, trains nothing

Of every benchmark of ``post_train.py`` the first evaluations are fitted, and the last one is
predicted: from half of its compute, and from all but the last evaluation. Seeds of a benchmark are
fitted together, and each alone. Beside the fit stands the guess that nothing will change. Where
``embodyrl report --extrapolate`` refuses to draw a curve, the curve that it would have drawn is
scored as well. The result is ``benchmarks/extrapolation.json``.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from shared import HERE, write

from embodyrl.functional.scaling_curve import extrapolate, fit_curves

CUTS = {"half of the compute": 0.5, "all but the last evaluation": 0.999}


def post_trained() -> dict[str, list[list[dict[str, Any]]]]:
    """Benchmark -> the evaluations of each of its seeds, in order."""
    found = {}
    for path in sorted(HERE.glob("*.json")):
        data = json.loads(path.read_text())
        seeds = data.get("seeds") if isinstance(data, dict) else None
        if isinstance(seeds, list) and seeds and "evals" in seeds[0]:
            found[path.stem] = [sorted(s["evals"], key=lambda e: e["env_steps"]) for s in seeds]
    return found


def predicted(seeds: list[list[dict[str, Any]]], cut: float) -> dict[str, Any]:
    """The last evaluation of some seeds: its success, and what was said of it before."""
    last = max(e["env_steps"] for seed in seeds for e in seed)
    final = [seed[-1] for seed in seeds]
    seen = [[e for e in seed if e["env_steps"] <= 1.02 * cut * last] for seed in seeds]
    seen = [
        early if early[-1] is not seed[-1] else early[:-1]
        for early, seed in zip(seen, seeds, strict=True)
    ]
    rows = np.array(
        [
            (e["env_steps"], e["successes"], e["episodes"], k)
            for k, seed in enumerate(seen)
            for e in seed
        ],
        dtype=float,
    )
    compute, solved, played, run = rows.T
    ahead = last / compute.max()
    found = extrapolate(compute, solved, played, run.astype(int), ahead=(ahead,))
    truth = sum(e["successes"] for e in final) / sum(e["episodes"] for e in final)
    stays = sum(s[-1]["successes"] for s in seen) / sum(s[-1]["episodes"] for s in seen)
    smooth = (solved + 1) / (played + 2)
    curve = fit_curves(compute, (solved / played)[None], (played / smooth / (1 - smooth))[None])
    row = {
        "evaluations": max(map(len, seen)),
        "ahead": ahead,
        "truth": truth,
        "stays": stays,
        "curve": float(curve.at(np.array([last]))[0, 0]),
        "refused": found["refused"],
    }
    if not found["refused"]:
        value, low, high = found["ahead"][f"{ahead:g}"]
        row |= {"predicted": value, "interval": [low, high], "held": low <= truth <= high}
    return row


def scored(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean absolute errors in points of those that were drawn, and of those that were refused."""

    def error(part: list[dict[str, Any]], key: str) -> float | None:
        return 100 * float(np.mean([abs(r[key] - r["truth"]) for r in part])) if part else None

    drawn = [r for r in rows if not r["refused"]]
    refused = [r for r in rows if r["refused"]]
    return {
        "drawn": len(drawn),
        "error": error(drawn, "curve"),
        "error_if_nothing_changes": error(drawn, "stays"),
        "held": sum(r["held"] for r in drawn),
        "refused": len(refused),
        "refused_error": error(refused, "curve"),
        "refused_error_if_nothing_changes": error(refused, "stays"),
    }


def main() -> None:
    """Predicts all, prints the errors and writes the JSON."""
    runs = post_trained()
    table = {}
    for name, cut in CUTS.items():
        for kind in ("seeds together", "each seed alone"):
            rows = {}
            for benchmark, seeds in runs.items():
                if kind == "seeds together":
                    rows[benchmark] = predicted(seeds, cut)
                else:
                    for k, seed in enumerate(seeds):
                        rows[f"{benchmark}/{k}"] = predicted([seed], cut)
            table[f"{name}, {kind}"] = scored([*rows.values()]) | {"runs": rows}
    for title, row in table.items():
        print(title, {key: value for key, value in row.items() if key != "runs"})
    write("extrapolation", {"unit": "points of success", "table": table})


if __name__ == "__main__":
    main()
