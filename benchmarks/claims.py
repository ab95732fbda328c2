"""Which of our own claims hold: every comparison that the results are said to show, tested.

    python benchmarks/claims.py

Nothing is run: the numbers are those of ``results.parquet``. A claim says that side B is better than
side A; both have the same seeds. Two questions are asked:

- **these policies**: of each seed, is B's success higher than A's by more than its episodes tell?
  A two-sided z test of two proportions, over all seeds (Cochran, Mantel and Haenszel).
- **training anew**: would it hold for other seeds? Student's t over the differences of the seeds.

Holm's correction over all claims of the file is made for both, so that all that ``holds`` does so at
once, with 95%. What ``holds by itself`` passes the second test alone, before the correction.
``seeds_needed`` is how many seeds would show the difference that was found, by itself, with a power
of 80%. The result is ``benchmarks/claims.json``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import yaml
from scipy import stats
from shared import HERE, write

from embodyrl.functional.comparison import holm, runs_interval

POWER = 0.8
ALPHA = 0.05
MOST = 100
"""Seeds; more are not asked for."""


def rows_of(table: list[dict[str, Any]], side: list[str]) -> dict[int, tuple[int, int]]:
    """Seed -> solved, episodes.

    Raises:
        SystemExit: the table has no such rows, or several for a seed.
    """
    benchmark, run, metric, *place = side
    found: dict[int, list[dict[str, Any]]] = {}
    for row in table:
        if row["benchmark"] != benchmark or row["metric"] != metric or row["episodes"] is None:
            continue
        for seed in range(10) if "{seed}" in run else [row["seed"]]:
            if seed is not None and row["run"] == run.format(seed=seed):
                found.setdefault(seed, []).append(row)
    if not found:
        raise SystemExit(f"results.parquet has no seeds of {side}.")
    result = {}
    for seed, rows in found.items():
        if len(rows) > 1 and not place:
            raise SystemExit(f"{side} has {len(rows)} rows of seed {seed}: add first or last.")
        rows.sort(key=lambda row: row["index"] or 0)
        row = rows[-1 if place == ["last"] else 0]
        result[seed] = (round(row["value"] * row["episodes"]), row["episodes"])
    return result


def compare_sides(a: dict[int, tuple[int, int]], b: dict[int, tuple[int, int]]) -> dict[str, Any]:
    """The two tests of one claim, B less A."""
    seeds = sorted(a.keys() & b.keys())
    rates = [[side[s][0] / side[s][1] for s in seeds] for side in (a, b)]
    differences = np.subtract(rates[1], rates[0])
    found: dict[str, Any] = {
        "seeds": seeds,
        "a": [[*a[s]] for s in seeds],
        "b": [[*b[s]] for s in seeds],
        "difference": float(differences.mean()),
        "p_policies": _these_policies(a, b, seeds),
    }
    if len(seeds) < 2:
        return found | {"p_anew": 1.0, "interval": None, "seeds_needed": None}
    _, low, high = runs_interval(rates[0], rates[1], paired=True)
    spread = float(differences.std(ddof=1))
    t = differences.mean() / max(spread / math.sqrt(len(seeds)), 1e-12)
    return found | {
        "p_anew": float(2 * stats.t.sf(abs(t), len(seeds) - 1)),
        "interval": [low, high],
        "seeds_needed": _needed(abs(differences.mean()), spread),
    }


def _these_policies(
    a: dict[int, tuple[int, int]], b: dict[int, tuple[int, int]], seeds: list[int]
) -> float:
    """The p of no difference in any seed: observed less expected successes of B, in all strata."""
    excess, variance = 0.0, 0.0
    for seed in seeds:
        (k_a, n_a), (k_b, n_b) = a[seed], b[seed]
        n, k = n_a + n_b, k_a + k_b
        excess += k_b - k * n_b / n
        variance += n_a * n_b * k * (n - k) / (n**2 * (n - 1))
    return float(2 * stats.norm.sf(abs(excess) / math.sqrt(variance))) if variance else 1.0


def _needed(difference: float, spread: float) -> int | None:
    """Seeds with which a t test finds such a difference with ``POWER``; None above ``MOST``."""
    for n in range(2, MOST + 1):
        limit = stats.t.isf(ALPHA / 2, n - 1)
        shift = difference * math.sqrt(n) / max(spread, 1e-9)
        if stats.nct.sf(limit, n - 1, min(shift, 30.0)) >= POWER:
            return n
    return None


def verdict(row: dict[str, Any]) -> str:
    """What may be said of a claim."""
    right = row["difference"] > 0
    if row["p_anew_holm"] <= ALPHA:
        return "holds" if right else "the opposite holds"
    if row["p_anew"] <= ALPHA and row["p_policies_holm"] <= ALPHA:
        return "holds by itself" if right else "the opposite, by itself"
    if row["p_policies_holm"] <= ALPHA:
        return "holds for these policies" if right else "the opposite, for these policies"
    return "not shown"


def main() -> None:
    """Tests every claim, prints the table and writes the JSON."""
    table = pq.read_table(HERE / "results.parquet").to_pylist()
    claims = yaml.safe_load((HERE / "claims.yaml").read_text())
    rows = [
        {"claim": of["claim"]} | compare_sides(rows_of(table, of["a"]), rows_of(table, of["b"]))
        for of in claims
    ]
    for key in ("p_policies", "p_anew"):
        for row, p in zip(rows, holm([row[key] for row in rows]), strict=True):
            row[f"{key}_holm"] = p
    for row in rows:
        row["verdict"] = verdict(row)
        row["points"] = [100 * x for x in (row["difference"], *(row["interval"] or ()))]
        print(f"{row['verdict']:<28} {100 * row['difference']:+6.1f}  {row['claim']}")
    write("claims", {"claims": rows, "source": Path("results.parquet").name})


if __name__ == "__main__":
    main()
