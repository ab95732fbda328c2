"""``embodyrl list``: environments, tasks, policies, algorithms, presets and loops.

It reads docstrings and comments as text, so that it need not import torch or a simulator.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from embodyrl import registry
from embodyrl.errors import UserError, did_you_mean

KINDS = ("envs", "tasks", "policies", "algorithms", "presets", "loops")
Row = dict[str, Any]


def listing(what: str | None = None, env: str = "") -> dict[str, list[Row]]:
    """The rows of the lists, as plain data.

    Args:
        what: one of ``KINDS``; None means all of them.
        env: list only this environment and its tasks.

    Raises:
        UserError: no such kind or environment.
    """
    if what is not None and what not in KINDS:
        raise UserError(f"There is no list of {what!r}. {did_you_mean(what, KINDS)}")
    known = registry.names("envs")
    if env and env not in known:
        raise UserError(f"There is no env {env!r}. {did_you_mean(env, known)}")
    envs = [env] if env else list(known)
    kinds = KINDS if what is None else (what,)
    found: dict[str, list[Row]] = {}
    for kind in kinds:
        if kind == "envs":
            found[kind] = [_env(name, known[name]) for name in envs]
        elif kind == "tasks":
            found[kind] = [row for name in envs for row in _tasks(name)]
        elif kind in ("presets", "loops"):
            found[kind] = [
                {"name": name, "summary": _first_comment(path), "file": str(path)}
                for name, path in registry.preset_names("" if kind == "presets" else kind).items()
            ]
        else:
            found[kind] = [
                {"name": name, "summary": _summary(target), "class": target}
                for name, target in registry.names(kind).items()
            ]
    return found


def _env(name: str, target: str) -> Row:
    """The row of an environment, whose class is at ``target`` ("module:Class")."""
    row: Row = {
        "name": name,
        "class": target,
        "summary": "",
        "splits": {},
        "tasks": 0,
        "available": True,
        "mend": "",
    }
    try:
        # The summary is the docstring of the env's package, or of its module if it is in none.
        module_name = target.partition(":")[0]
        package_name = module_name.rpartition(".")[0] or module_name
        row["summary"] = _first_line(importlib.import_module(package_name).__doc__)
        if name not in registry.BUILT_IN["envs"]:
            row["summary"] = row["summary"] or _summary(target)
        module = registry.tasks_module(name)
        if module is not None:
            row["splits"] = dict(getattr(module, "SPLITS", {}))
            row["tasks"] = len(module.list_tasks())
    except (UserError, ImportError) as error:
        row |= {"available": False, "mend": _mend(error)}
    return row


def _tasks(env: str) -> list[Row]:
    """One row per task; a single row if the simulator is not installed."""
    try:
        module = registry.tasks_module(env)
        tasks = module.list_tasks() if module is not None else []
    except (UserError, ImportError) as error:
        empty = {"name": "", "group": "", "instruction": "", "select": "", "missing": []}
        return [{"env": env, **empty, "available": False, "mend": _mend(error)}]
    return [
        {
            "env": env,
            "name": task.name,
            "group": task.group,
            "instruction": task.instruction,
            "select": task.select,
            "missing": list(task.missing),
            "available": not task.missing,
            "mend": task.mend,
        }
        for task in tasks
    ]


def _mend(error: Exception) -> str:
    """What to do about an environment that cannot be imported."""
    if isinstance(error, UserError):
        return str(error)
    return f"It cannot be imported ({error}). `embodyrl doctor` says what is missing."


def _summary(target: str) -> str:
    """The first line of a module's docstring, without importing the module."""
    source = ""
    try:
        spec = importlib.util.find_spec(target.partition(":")[0])
        if spec is not None and spec.origin:
            source = Path(spec.origin).read_text(encoding="utf-8")
    except (ImportError, OSError):
        spec = None
    if spec is None:
        return f"cannot be imported ({target})"
    return _first_line(ast.get_docstring(ast.parse(source)))


def _first_line(text: str | None) -> str:
    return (text or "").strip().split("\n")[0].replace("`", "")


def _first_comment(path: Path) -> str:
    """The first line of comment in a YAML file; it says what a preset is."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            return line.lstrip("# ").strip()
    return ""


def print_listing(found: dict[str, list[Row]]) -> None:
    """Prints the result of ``listing`` as tables.

    Tasks have three levels of detail:

        all kinds                one line per environment, with names of tasks or suites
        tasks                    one line per task or suite
        tasks of an environment  one line per task, with what it lacks
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 160)

    def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
        out = Table(*columns, box=None, header_style="bold", padding=(0, 2, 0, 0))
        for row in rows:
            out.add_row(*(Text(cell, overflow="fold") for cell in row))
        console.print(out)

    for kind, rows in found.items():
        if len(found) > 1:
            console.print(Text(f"\n{kind}", style="bold cyan"))
        if not rows:
            console.print("none")
        elif kind == "envs":
            table(
                ("name", "tasks", "can run", "what it is, and its splits"),
                [_env_cells(row) for row in rows],
            )
        elif kind == "tasks" and len(found) > 1:
            table(("env", "can run", "tasks, or suites of tasks"), _task_summary(rows))
        elif kind == "tasks":
            brief = len({row["env"] for row in rows}) > 1
            table(("env", "choose it by", "can run", "instruction"), _task_cells(rows, brief))
            if brief:
                hint = (
                    "`embodyrl list tasks ENV` shows every task of a suite, and how to get what is "
                    "missing."
                )
                console.print(Text(hint, "dim"))
        else:
            table(("name", "what it is"), [(row["name"], row["summary"]) for row in rows])


def _env_cells(row: Row) -> tuple[str, ...]:
    """The line of an environment: its summary and splits, or what to do if it cannot run."""
    if not row["available"]:
        return row["name"], str(row["tasks"]), "no", row["mend"]
    text = row["summary"]
    if row["splits"]:
        text = f"{text} Splits: {', '.join(row['splits'])}."
    return row["name"], str(row["tasks"]), "yes", text


def _task_summary(rows: list[Row]) -> list[tuple[str, ...]]:
    """One line per environment: how many tasks can run, and their names or their suites'."""
    cells = []
    for env in dict.fromkeys(row["env"] for row in rows):
        own = [row for row in rows if row["env"] == env]
        ready = [row for row in own if row["available"]]
        names = ", ".join(dict.fromkeys(row["group"] or row["name"] for row in ready))
        can_run = f"{len(ready)} of {len(own)}" if own[0]["name"] else "no"
        cells.append((env, can_run, names or own[0]["mend"]))
    return cells


def _task_cells(rows: list[Row], brief: bool) -> list[tuple[str, ...]]:
    """One line per task.

    If ``brief``, a suite is one line, and single tasks do not say how to get what they lack.
    """
    cells = []
    for env, group in dict.fromkeys((row["env"], row["group"] if brief else "") for row in rows):
        members = [
            row for row in rows if row["env"] == env and (not brief or row["group"] == group)
        ]
        # A suite: the number of its tasks, and an example.
        if group:
            text = f"{len(members)} tasks, such as: {members[0]['instruction']}"
            cells.append((env, members[0]["select"].split()[0], "yes", text))
            continue
        # Single tasks.
        for row in members:
            can_run = "yes"
            if not row["available"]:
                can_run = "no: " + (", ".join(row["missing"]) or "not installed")
            text = row["instruction"]
            if row["mend"] and not (brief and row["name"]):
                text = f"{text}\n{row['mend']}".strip()
            cells.append((env, row["select"], can_run, text))
    return cells
