"""The list of mutants that may survive names code that is there, and says why."""

import importlib
import inspect
import tomllib
from pathlib import Path

import pytest

RULES = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text())["survivor"]


def source_of(function: str) -> str:
    """The source of a function of a module or of a class in it, on one line."""
    parts = function.split(".")
    module = importlib.import_module(".".join(parts[:3]))
    found = module
    for name in parts[3:]:
        found = inspect.getattr_static(found, name)
    return " ".join(line.strip() for line in inspect.getsource(found).splitlines())


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r["function"].split(".", 2)[-1])
def test_a_reason_is_of_code_that_is_there(rule):
    assert set(rule) <= {"function", "from", "to", "reason"} and rule["reason"].endswith(".")
    assert rule["from"] in source_of(rule["function"])
    assert rule.get("to") != rule["from"]
