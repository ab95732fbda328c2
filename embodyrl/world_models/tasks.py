"""What ``embodyrl list`` says about world models."""

from __future__ import annotations

from embodyrl.registry import TaskInfo

SPLITS = {
    "train": "dreams that start from the moments the model was trained on",
    "eval": "dreams that start from held-out moments",
}


def list_tasks() -> list[TaskInfo]:
    """One row: what a world model dreams of is what it was trained on."""
    return [
        TaskInfo(
            "dream", "what the data said", "env.model=FOLDER (see `embodyrl world train --help`)"
        )
    ]
