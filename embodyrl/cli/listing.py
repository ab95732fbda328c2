"""What there is: environments, tasks, policies, algorithms, presets and loops, without importing anything heavy."""

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
    """Rows of names and what they stand for, as plain data.

    Args:
        what: one of ``KINDS``; None gives all of them.
        env: only this environment's rows among ``envs`` and ``tasks``.

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
        package = importlib.import_module(
            target.partition(":")[0].rpartition(".")[0] or target.partition(":")[0]
        )
        row["summary"] = _first_line(package.__doc__)
        module = registry.tasks_module(name)
        if module is not None:
            row["splits"] = dict(getattr(module, "SPLITS", {}))
            row["tasks"] = len(module.list_tasks())
    except (UserError, ImportError) as error:
        row |= {"available": False, "mend": _mend(error)}
    return row


def _tasks(env: str) -> list[Row]:
    """One row per task; a simulator whose package is not here gives one row that says so."""
    try:
        module = registry.tasks_module(env)
        tasks = module.list_tasks() if module is not None else []
    except (UserError, ImportError) as error:
        nothing = {"name": "", "group": "", "instruction": "", "select": "", "missing": []}
        return [{"env": env, **nothing, "available": False, "mend": _mend(error)}]
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
    if isinstance(error, UserError):
        return str(error)
    return f"It cannot be imported ({error}). `embodyrl doctor` says what is missing."


def _summary(target: str) -> str:
    """The first line of a module's docstring, read as text: importing it would bring in PyTorch."""
    try:
        spec = importlib.util.find_spec(target.partition(":")[0])
        source = (
            Path(spec.origin).read_text(encoding="utf-8")
            if spec is not None and spec.origin
            else ""
        )
    except (ImportError, OSError):
        return "cannot be imported"
    return _first_line(ast.get_docstring(ast.parse(source)))


def _first_line(text: str | None) -> str:
    return (text or "").strip().split("\n")[0].replace("`", "")


def _first_comment(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line.lstrip("# ").strip() for line in lines if line.startswith("#")), "")


def print_listing(found: dict[str, list[Row]]) -> None:
    """Prints tables. The more is asked for at once, the less is said of each task: a name, a line, or all of it."""
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
                console.print(
                    Text(
                        "`embodyrl list tasks ENV` says more: each suite's tasks, and the mend.",
                        "dim",
                    )
                )
        else:
            table(("name", "what it is"), [(row["name"], row["summary"]) for row in rows])


def _env_cells(row: Row) -> tuple[str, ...]:
    splits = (
        f"{row['summary']} Splits: {', '.join(row['splits'])}." if row["splits"] else row["summary"]
    )
    return (
        row["name"],
        str(row["tasks"]),
        "yes" if row["available"] else "no",
        splits if row["available"] else row["mend"],
    )


def _task_summary(rows: list[Row]) -> list[tuple[str, ...]]:
    """One line per env: how many of its tasks can run, and the names of those tasks or their suites."""
    cells = []
    for env in dict.fromkeys(row["env"] for row in rows):
        own = [row for row in rows if row["env"] == env]
        ready = [row for row in own if row["available"]]
        names = ", ".join(dict.fromkeys(row["group"] or row["name"] for row in ready))
        cells.append(
            (
                env,
                f"{len(ready)} of {len(own)}" if own[0]["name"] else "no",
                names or own[0]["mend"],
            )
        )
    return cells


def _task_cells(rows: list[Row], brief: bool) -> list[tuple[str, ...]]:
    """One line per task; if ``brief``, one per suite where there are suites, and no mend for single tasks."""
    cells = []
    for env, group in dict.fromkeys((row["env"], row["group"] if brief else "") for row in rows):
        members = [
            row for row in rows if row["env"] == env and (not brief or row["group"] == group)
        ]
        if group:
            text = f"{len(members)} tasks, such as: {members[0]['instruction']}"
            cells.append((env, members[0]["select"].split()[0], "yes", text))
            continue
        for row in members:
            can = (
                "yes"
                if row["available"]
                else "no: " + (", ".join(row["missing"]) or "not installed")
            )
            text = row["instruction"]
            if row["mend"] and not (brief and row["name"]):
                text = f"{text}\n{row['mend']}".strip()
            cells.append((env, row["select"], can, text))
    return cells
