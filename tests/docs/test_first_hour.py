"""The page of the first hour names every check of the code, and what each says when it fails."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from docs_text import ROOT

CONTROL = ROOT / "embodyrl" / "real_robot" / "control"
FIRST_HOUR = (ROOT / "docs" / "robot_setup.md").read_text(encoding="utf-8")
DEVICES = (ROOT / "docs" / "howto" / "cameras_grippers.md").read_text(encoding="utf-8")
ANY = "\0"
"""Stands for what a message fills in."""
# File -> functions whose messages are lines of the table; None for all of its functions.
SAYS = {
    "preflight.py": None,
    "chunk_check.py": None,
    "actions.py": ("action_space", "_check_conventions"),
    "joint_space.py": ("joint_space",),
    "input_checks.py": ("state_problem", "age_problem", "_force_problem"),
    "tracking.py": ("start_problem",),
    "motor_tracking.py": ("start_problem",),
}


def functions(file: str) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse((CONTROL / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            yield node


def text_of(node: ast.expr) -> str:
    """A text with ``ANY`` for each value in it; empty for what is no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or ANY for part in node.values)
    return ""


def check_names() -> list[str]:
    """Names of the checks."""
    calls = [
        node
        for function in functions("preflight.py")
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_check"
    ]
    return [text_of(call.args[0]) for call in calls]


def messages(file: str, names: tuple[str, ...] | None) -> list[str]:
    """First clauses of what these functions raise, or return as what is wrong."""
    found = []
    for function in functions(file):
        if names is not None and function.name not in names:
            continue
        returns = function.name.endswith("_problem")
        for node in ast.walk(function):
            told: ast.expr | None = None
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                told = node.exc.args[0]
            elif isinstance(node, ast.Return) and returns:
                told = node.value.orelse if isinstance(node.value, ast.IfExp) else node.value
            found.append("" if told is None else first_clause(text_of(told)))
    # What another function has said is its own message.
    return [text for text in found if len(re.sub(r"\W", "", text)) > 8]


def first_clause(text: str) -> str:
    """Of a message; two where the first one is short."""
    clauses = re.split(r"(?<=[\w\0)])[.?:,] | \(", text)
    return clauses[0] if len(clauses[0]) > 12 else " ".join(clauses[:2])


def is_in(text: str, page: str) -> bool:
    """Whether a page has a message; it may write any word for what the message fills in."""
    parts = [part.strip().lower() for part in text.strip(".").split(ANY)]
    plain = " ".join(page.split()).lower()
    return all(part in plain for part in parts if len(part) > 3)


def test_every_check_has_a_row() -> None:
    rows = [line.split("|")[1].strip() for line in FIRST_HOUR.splitlines() if line.startswith("| ")]
    names = check_names()
    assert len(names) >= 12
    for name in names:
        start = re.split(rf"{ANY}| \(", name)[0].strip()
        assert any(row.startswith(start) for row in rows), name


@pytest.mark.parametrize("file", SAYS)
def test_what_a_check_says_is_on_the_page(file: str) -> None:
    said = messages(file, SAYS[file])
    assert said
    missing = [text.replace(ANY, "N") for text in said if not is_in(text, FIRST_HOUR)]
    assert not missing, missing


def test_what_cameras_and_grippers_say_is_on_theirs() -> None:
    said = messages("device_checks.py", None)
    assert len(said) >= 9
    missing = [text.replace(ANY, "N") for text in said if not is_in(text, DEVICES)]
    assert not missing, missing


def test_a_message_that_is_missing_is_noticed() -> None:
    assert is_in(f"The arm moves at {ANY} rad/s", FIRST_HOUR)
    assert not is_in(f"The arm swings at {ANY} rad/s", FIRST_HOUR)
