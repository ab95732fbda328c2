"""Reads ``meta.json`` and the evaluations ``evals/NAME.json`` of a run, and checks them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embodyrl.storage.paths import files_of
from embodyrl.storage.plain_data import ANYTHING, COUNT, FLAG, NUMBER, TEXT, Kind, inside, read_json

INDEX = Kind("a whole number", lambda value: type(value) is int and abs(value) < 2**53)
EPISODE = {
    "init": INDEX,
    "task": TEXT,
    "success": (FLAG, NUMBER),
    "length": COUNT,
    "return": (NUMBER, None),
    "video?": (TEXT, None),
    "success_once?": FLAG,
    "person?": FLAG,
    "instruction?": TEXT,
}
EVALUATION = {
    "iteration": COUNT,
    "env_steps?": COUNT,
    "minutes?": NUMBER,
    "reports_success?": FLAG,
    "execute?": COUNT,
    "horizon?": COUNT,
    "faults?": COUNT,
    "tasks?": {...: {...: ANYTHING}},
    "episodes": [EPISODE],
}
"""Structure of an evaluation's file."""
META = {
    "started?": TEXT,
    "sessions?": [{"started?": TEXT, "command?": TEXT, "commit?": (TEXT, None)}],
    "command?": TEXT,
    "seed?": NUMBER,
    "commit?": (TEXT, None),
    "device?": TEXT,
    "threads?": (COUNT, None),
    "versions?": {...: TEXT},
    "hardware?": {
        "cpu?": TEXT,
        "cores?": (COUNT, None),
        "memory_gib?": NUMBER,
        "gpu?": (TEXT, None),
    },
    "inputs?": {...: TEXT},
    "finished?": (TEXT, None),
    "verdict?": TEXT,
}
"""Structure of a run's ``meta.json``."""


def read_evaluation(path: Path) -> dict[str, Any]:
    """What an evaluation's file holds; its videos lie in the run's folder.

    Raises:
        UserError: the file is damaged, or names a video elsewhere.
    """
    found = read_json(
        path, EVALUATION, "Bring back a copy of it, or move it out of evals/ to go on without it."
    )
    for row in found["episodes"]:
        if row.get("video"):
            inside(path.parent.parent, row["video"])
    return found


def read_evaluations(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> evaluation, of all evaluations of the run in ``folder``; the oldest come first.

    Raises:
        UserError: see ``read_evaluation``.
    """
    found = {path.stem: read_evaluation(path) for path in files_of(folder / "evals", "*.json")}
    return dict(sorted(found.items(), key=lambda item: item[1]["iteration"]))


def read_meta(path: Path) -> dict[str, Any]:
    """What a run's ``meta.json`` holds.

    Raises:
        UserError: the file is damaged.
    """
    return read_json(
        path, META, "Move this file away: the same command then writes it anew and goes on."
    )
