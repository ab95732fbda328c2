"""Numbers in the tables of the results: a JSON of ``benchmarks/`` holds each of them, or the notebook does."""

from __future__ import annotations

import dataclasses

import pytest
from doc_numbers import OTHERS, PAGES, DocTable, missing, printed, tables

TABLES = [table for page in PAGES for table in tables(page)]


def made_up(mark: str, *row: str) -> list[str]:
    return missing(DocTable("page", 1, mark, (("row", *row),)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_are_held_by_their_source(page):
    wrong = [f"{t.name}: {text}" for t in tables(page) for text in missing(t)]
    assert not wrong, "\n".join(wrong)


def test_marked_tables_of_other_pages_are_held_too():
    marked = [t for page in OTHERS for t in tables(page) if t.mark]
    assert len(marked) > 10
    wrong = [f"{t.name}: {text}" for t in marked for text in missing(t)]
    assert not wrong, "\n".join(wrong)


def test_most_tables_of_results_have_a_json():
    marked = [table for table in TABLES if table.mark.startswith("from:")]
    assert len(marked) > 50


def test_a_changed_digit_is_noticed():
    """A test of the test: of each table of one number per seed and look, another number fails."""
    for table in TABLES:
        if table.mark.endswith("each row: seed"):
            first = table.rows[0]
            for at in range(1, len(first)):
                if numbers := printed(first[at]):
                    old = numbers[0].text
                    other = first[at].replace(old, f"{numbers[0].value + 1.37:.2f}", 1)
                    row = (*first[:at], other, *first[at + 1 :])
                    assert missing(dataclasses.replace(table, rows=(row,))), (table.name, other)


def test_rates_are_of_one_seed():
    mark = "from: benchmarks/quickstart.json; each row: seed"
    assert not made_up(mark, "48%", "**96% [93, 98]**")
    assert made_up(mark, "48%", "**74%**")  # 74% is seed 1's


def test_marks():
    assert made_up("", "94%") == ["it has numbers and no mark above it"]
    assert not made_up("", "`env.num_envs=4`", "PickCube-v1 at 64x64")
    assert made_up("settings", "94%")
    assert not made_up("settings", "4", "its 95% interval")
    assert made_up("notebook", "93.2178%")
    assert made_up("from: benchmarks/no_such_file.json", "94%")
    assert not made_up("from: the row's files", "96, 88, 96%", "`quickstart.json`")


def test_numbers_of_a_cell():
    found = {n.text: n.half for n in printed("**97.5%** [.25, 98], 96,000 steps, 470; `x=3`, v5")}
    assert found == {"97.5": 0.05, ".25": 0.005, "98": 0.5, "96,000": 500.0, "470": 5.0}
