"""Claims of the results: the tests against hand-made numbers, and every claim against the table."""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from claims import HERE, _needed, compare_sides, rows_of, verdict


def test_with_one_seed_the_test_is_pearson_s():
    """Up to the factor (n - 1) / n of Cochran, Mantel and Haenszel."""
    found = compare_sides({0: (10, 40)}, {0: (24, 50)})
    table = np.array([[10, 30], [24, 26]])
    chi2 = stats.chi2_contingency(table, correction=False).statistic
    assert found["p_policies"] == pytest.approx(stats.chi2.sf(chi2 * 89 / 90, 1))
    # One run says nothing of training anew.
    assert found["p_anew"] == 1.0 and found["interval"] is None


def test_over_seeds_it_is_student_s():
    a = {0: (10, 100), 1: (20, 100), 2: (30, 100)}
    b = {0: (30, 100), 1: (50, 100), 2: (55, 100)}
    found = compare_sides(a, b)
    assert found["p_anew"] == pytest.approx(
        stats.ttest_rel([0.3, 0.5, 0.55], [0.1, 0.2, 0.3]).pvalue
    )
    assert found["difference"] == pytest.approx(0.25)
    # Seeds that only one side has are left out.
    assert compare_sides(a | {3: (0, 100)}, b)["seeds"] == [0, 1, 2]


def test_seeds_needed_are_those_of_power_tables():
    """Paired t test, two-sided, 5%: an effect of 1 takes 10 pairs, of .8 takes 15, of .5 takes 34."""
    assert [_needed(0.1, 0.1 / effect) for effect in (1.0, 0.8, 0.5)] == [10, 15, 34]
    assert _needed(0.001, 1.0) is None


def test_a_verdict_says_the_least_that_is_shown():
    row = {"difference": 0.2, "p_anew": 0.01, "p_anew_holm": 0.01, "p_policies_holm": 0.0}
    assert verdict(row) == "holds"
    assert verdict(row | {"difference": -0.2}) == "the opposite holds"
    assert verdict(row | {"p_anew_holm": 0.2}) == "holds by itself"
    policies = row | {"p_anew_holm": 1.0, "p_anew": 0.2}
    assert verdict(policies) == "holds for these policies"
    assert verdict(policies | {"p_policies_holm": 0.3}) == "not shown"


def test_a_side_that_is_not_there_or_not_one_number_is_refused():
    row = {"benchmark": "x", "run": "r", "metric": "m", "seed": 0, "episodes": 10, "value": 0.5}
    table = [row | {"index": 0}, row | {"index": 5, "value": 0.7}]
    assert rows_of(table, ["x", "r", "m", "last"]) == {0: (7, 10)}
    assert rows_of(table, ["x", "r", "m", "first"]) == {0: (5, 10)}
    with pytest.raises(SystemExit, match="2 rows of seed 0"):
        rows_of(table, ["x", "r", "m"])
    with pytest.raises(SystemExit, match="no seeds"):
        rows_of(table, ["y", "r", "m"])


def test_the_json_has_every_claim_and_its_numbers():
    """What a reader sees was made from the table that lies beside it."""
    table = pq.read_table(HERE / "results.parquet").to_pylist()
    claims = yaml.safe_load((HERE / "claims.yaml").read_text())
    written = json.loads((HERE / "claims.json").read_text())["claims"]
    assert [row["claim"] for row in written] == [of["claim"] for of in claims]
    for of, row in zip(claims, written, strict=True):
        now = compare_sides(rows_of(table, of["a"]), rows_of(table, of["b"]))
        assert (row["a"], row["b"]) == (now["a"], now["b"]), of["claim"]
