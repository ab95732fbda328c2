"""Names the numbers of ManiSkill's observations, and puts those of several tasks into one vector.

ManiSkill gives every number a name, and the names say what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from embodyrl.sims.maniskill.observations import visual_state

POINT_OR_POSE = (3, 7)
HANDS = ("tcp", "hand", "gripper")
MARKS = ("goal", "target")

Place = tuple[str, int, int]


class Entry(NamedTuple):
    """Numbers of an observation that have a name.

    Attributes:
        path: where ManiSkill has them, such as ``extra/tcp_pose``.
        numbers: how many.
    """

    path: str
    numbers: int


class SharedColumns:
    """Where the numbers of several tasks stand in one vector.

    What has the same name and size in several tasks, such as the joints or the goal's place, stands
    in the same columns; what only some of them have stands behind it. So a policy finds a number
    where it was in every other task.

    Args:
        tasks: the entries of each task, in ManiSkill's order.

    Attributes:
        size: length of the vector.
        of: for each task, the columns of its numbers, in its own order.
        common: the entries that every task has, and their first column.
    """

    def __init__(self, tasks: Sequence[Sequence[Entry]]) -> None:
        start: dict[Entry, int] = {}
        self.size = 0
        for entry in (entry for task in tasks for entry in task):
            if entry not in start:
                start[entry] = self.size
                self.size += entry.numbers
        self.of = [
            np.concatenate([np.arange(start[e], start[e] + e.numbers) for e in task])
            for task in tasks
        ]
        self.common = [(e, at) for e, at in start.items() if all(e in task for task in tasks)]


def named_entries(base: Any, rgb: bool) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """The entries of proprio and of the flat task state of a task.

    Args:
        base: ManiSkill's env.
        rgb: whether proprio is what policies with cameras get; otherwise it is the task state, too.
    """
    info = base.get_info()
    state = base._get_obs_state_dict(info)
    proprio = visual_state(base, info) if rgb else state
    found = [
        tuple(
            Entry(path, torch.as_tensor(leaf).numel() // base.num_envs)
            for path, leaf in _leaves(tree)
        )
        for tree in (proprio, state)
    ]
    return found[0], found[1]


def layout(proprio: SharedColumns, state: SharedColumns) -> tuple[Place, ...]:
    """What ``EnvSpec.layout`` says of proprio and the task state: what every task has.

    Returns:
        (kind, first index, number of entries), counted over proprio and then the task state.
    """
    return tuple(
        (kind, before + start, entry.numbers)
        for columns, before in ((proprio, 0), (state, proprio.size))
        for entry, start in columns.common
        if (kind := _kind(entry))
    )


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of all entries of nested dicts, in ManiSkill's order."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}/{key}" if path else key)
    else:
        yield path, tree


def _kind(entry: Entry) -> str:
    """``"mark"``, ``"hand"`` or ``"object"``; empty for what is no absolute position."""
    name = entry.path.rpartition("/")[2]
    if any(word in name for word in MARKS):
        return "mark"
    if entry.numbers not in POINT_OR_POSE or "_to_" in name:
        return ""
    if any(word in name for word in HANDS):
        return "hand"
    return "object" if name.endswith(("_pos", "_pose")) else ""
