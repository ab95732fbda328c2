"""How the package is laid out and reads: rooms, circles of imports, names, widths."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import measure_code  # noqa: E402

FIGURES = measure_code.measure(ROOT)
SAME_ON_PURPOSE = {
    "main": "entry points of processes",
    "list_tasks": "the function that a simulator's tasks module has",
    "ScriptedExpert": "each simulator's own",
}
"""Names that mean the same thing in every module that has them."""


@pytest.mark.parametrize(
    ("figure", "most"),
    [
        ("circles of imports", 0),
        ("loose modules", 14),
        ("lines over 100 columns, %", 2),
        ("parallel assignments per 1,000 lines", 6),
    ],
)
def test_it_stays_within(figure, most):
    assert FIGURES[figure] <= most


def test_comments_say_what_a_step_does():
    assert FIGURES["comments per 1,000 lines"] >= 30


def test_tests_mirror_the_package():
    rooms = {p.name for p in (ROOT / "embodyrl").iterdir() if (p / "__init__.py").exists()}
    untested = {name for name in rooms if not (ROOT / "tests" / name).is_dir()}
    assert untested <= {"configs"}, "these rooms have no folder in tests/"


def test_links_at_the_top_lead_into_the_package():
    for name in ("sims", "world_models", "policies", "real_robot", "configs"):
        assert (ROOT / name).resolve() == ROOT / "embodyrl" / name
