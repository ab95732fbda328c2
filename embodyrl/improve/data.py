"""The data sets that rounds learn from, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embodyrl.algorithms.gate import too_few
from embodyrl.data.lerobot_read import open_dataset

FLAGS = {"human_frames": "intervention", "recovery_frames": "recovery"}
"""Figure -> the column whose true frames it counts."""


@dataclass(frozen=True)
class DataSet:
    """A data set and its figures (``data_figures``)."""

    path: str
    figures: dict[str, int]


def data_figures(path: str | Path) -> dict[str, int]:
    """Numbers of ``episodes``, ``solved`` ones, ``frames``, ``human_frames``, ``recovery_frames``."""
    names = ["success", "next.success", *FLAGS.values()]
    head = open_dataset(path)
    columns = open_dataset(path, [n for n in names if n in head.features]).columns
    episode = columns["episode_index"]
    # An episode is solved if one of its frames says so; a data set that does not say is solved.
    name = next((n for n in names[:2] if n in columns), None)
    flags = np.ones(len(episode), bool) if name is None else columns[name].astype(bool).ravel()
    counted = {
        figure: int(columns[name].astype(bool).sum()) if name in columns else 0
        for figure, name in FLAGS.items()
    }
    return {
        "episodes": len(np.unique(episode)),
        "solved": len(np.unique(episode[flags])),
        "frames": len(episode),
        **counted,
    }


def nothing_to_learn(method: str, data: Sequence[DataSet], gate: str = "") -> str:
    """Why these data teach nothing by that method; empty if they do.

    Args:
        method: how it learns.
        data: all data sets.
        gate: ``algorithm.gate``, where the method has one.
    """
    solved = sum(one.figures["solved"] for one in data)
    failed = sum(one.figures["episodes"] for one in data) - solved
    if not solved:
        return "nothing was solved so far, by the policy or by a person"
    if method != "imitate" and not failed:
        return "nothing failed so far, so critics have nothing to compare with"
    if gate == "require" and (why := too_few(solved, failed)):
        return f"{why} (algorithm.gate=warn goes on without)"
    return ""


def shares(demos: Sequence[DataSet], rounds: Sequence[DataSet]) -> list[tuple[str, float]]:
    """The data sets to imitate, half of every batch from the rounds; those without a success not.

    Within each half the number of frames counts.
    """
    found = []
    for part in (demos, rounds):
        usable = [one for one in part if one.figures["solved"]]
        total = sum(one.figures["frames"] for one in usable)
        found += [(one.path, one.figures["frames"] / total) for one in usable]
    return found
