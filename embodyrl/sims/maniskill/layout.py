"""Finds positions of hands, objects and goal marks among the numbers of a ManiSkill observation.

ManiSkill gives every number a name, and the names say what they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from embodyrl.sims.maniskill.observations import visual_state

POINT_OR_POSE = (3, 7)
HANDS = ("tcp", "hand", "gripper")
MARKS = ("goal", "target")

Place = tuple[str, int, int]


def layout(base: Any, rgb: bool) -> tuple[Place, ...]:
    """What ``EnvSpec.layout`` says of proprio and the flat task state.

    Args:
        base: ManiSkill's env.
        rgb: whether proprio is what policies with cameras get; otherwise it is the task state, too.

    Returns:
        (kind, first index, number of entries), counted over proprio and then the task state.
    """
    info = base.get_info()
    state = base._get_obs_state_dict(info)
    proprio = visual_state(base, info) if rgb else state
    found = []
    start = 0
    for tree in (proprio, state):
        for name, leaf in _leaves(tree):
            numbers = torch.as_tensor(leaf).numel() // base.num_envs
            if kind := _kind(name, numbers):
                found.append((kind, start, numbers))
            start += numbers
    return tuple(found)


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of all entries of nested dicts, in ManiSkill's order."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, key)
    else:
        yield name, tree


def _kind(name: str, numbers: int) -> str:
    """``"mark"``, ``"hand"`` or ``"object"``; empty for what is no absolute position."""
    if any(word in name for word in MARKS):
        return "mark"
    if numbers not in POINT_OR_POSE or "_to_" in name:
        return ""
    if any(word in name for word in HANDS):
        return "hand"
    return "object" if name.endswith(("_pos", "_pose")) else ""
