"""What ``embodyrl list`` says about world models."""

from __future__ import annotations

from embodyrl.registry import TaskInfo

SPLITS = {
    "train": "dreams that start from the moments the model was trained on",
    "eval": "dreams that start from held-out moments",
}


def list_tasks() -> list[TaskInfo]:
    """One row: the task of a world model is that of its training data."""
    return [
        TaskInfo(
            "dream",
            "the data's instructions",
            "env.model=FOLDER (see `embodyrl world train --help`)",
        )
    ]
