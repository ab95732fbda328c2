"""How the package is laid out and reads: rooms, circles of imports, names, widths."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import measure_code  # noqa: E402

FIGURES = measure_code.measure(ROOT)
MODULES = {
    name: ast.parse(path.read_text())
    for name, path in measure_code.files(ROOT / "embodyrl").items()
}
SAME_ON_PURPOSE = {
    "main": "the entry point of a process or a command",
    "list_tasks": "what the tasks module of every simulator has",
    "make_env": "build's, and the factory of each simulator",
    "load": "of a module that loads one kind of thing: registry.load, checkpoint.load",
    **dict.fromkeys(
        ("ScriptedExpert", "ReadableEnv", "Waypoint", "View", "Task", "Renderer"),
        "each simulator's own; they share no code because they share no engine",
    ),
    **dict.fromkeys(("check_config", "layout", "warm_up"), "the same step of each simulator"),
    **dict.fromkeys(
        ("exp_rotation", "forward", "ik_step"),
        "kinematics of a batch in a simulator, and of one arm without torch on the robot's computer",
    ),
    **dict.fromkeys(("pack", "unpack"), "of the two wire formats"),
    "to_fields": "of the two versions of ROS",
    "serve": "of the two kinds of child process",
}
"""Public names that stand in several modules, and why that helps a reader."""


def test_one_name_for_one_thing():
    found = set(measure_code.public_names(MODULES))
    assert found <= SAME_ON_PURPOSE.keys(), "the same name for two things; rename one of them"


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
