"""What only the simulator knows of a MuJoCo task, as numbers for a critic."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from embodyrl.sims.mujoco.layouts import MAX_BLOCKS
from embodyrl.sims.mujoco.tasks import TASKS, View

Array = NDArray[np.float64]
_KINDS = [name for name, task in TASKS.items() if not task.undoes]
DIM = 3 * MAX_BLOCKS + 16 + len(_KINDS)
"""Entries of the privileged state."""


def privileged_state(view: View, commanded: Array, grip_command: Array, tasks: list[str]) -> Array:
    """(N, DIM): blocks, marker and handle relative to the hand, heights, gripper and task.

    The block that the instruction names comes first. The time left is not among the numbers: where
    the time is up, the critic is asked for the value of a state with no time left, which it was
    never trained on.

    Args:
        view: of N envs.
        commanded: (N, 3) where the hand has been told to be, in m.
        grip_command: (N,) where each finger has been told to be, in m.
        tasks: the name of each env's task.
    """
    num, num_blocks, _ = view.blocks.shape
    blocks = np.zeros((num, MAX_BLOCKS, 3))
    # Parked blocks and unused markers lie metres away: clipped, they say "not here" without
    # dwarfing the other numbers.
    blocks[:, :num_blocks] = np.clip(view.blocks - view.ee[:, None], -1, 1)
    target_height = view.blocks[:, 0, 2] if num_blocks else np.zeros(num)
    return np.concatenate(
        [
            blocks.reshape(num, -1),
            view.ee,
            commanded - view.ee,
            np.clip(view.goal - view.ee, -1, 1),
            np.clip(view.handle - view.ee, -1, 1),
            np.stack([target_height, view.drawer, view.opening, grip_command], axis=1),
            np.array([_code(name) for name in tasks]),
        ],
        axis=1,
    )


def _code(name: str) -> Array:
    """(number of kinds,) one-hot code of a task; a task that undoes another has -1 in its place."""
    task = TASKS[name]
    kind = _KINDS.index(task.undoes or name)
    return (-1.0 if task.undoes else 1.0) * np.eye(len(_KINDS))[kind]


def layout(
    start: int, fewest_blocks: int, marker: bool, drawer: bool
) -> tuple[tuple[str, int, int], ...]:
    """``EnvSpec.layout``: the positions that every episode of every task has.

    Args:
        start: where the privileged state begins behind proprio.
        fewest_blocks: how many blocks are always on the table.
        marker: whether every task has one.
        drawer: the same.
    """
    after_blocks = start + 3 * MAX_BLOCKS
    # The hand, and where it has been told to be, stand in proprio; the hand again in ``view.ee``.
    found = [("hand", 0, 3), ("hand", 3, 3), ("hand", after_blocks, 3)]
    found += [("relative", start + 3 * k, 3) for k in range(fewest_blocks)]
    if marker:
        found.append(("mark", after_blocks + 6, 3))
    if drawer:
        found.append(("relative", after_blocks + 9, 3))
    return tuple(found)
