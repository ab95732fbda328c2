"""The locomotion tasks that ``embodyrl list`` shows; any other id of Gymnasium's works as well."""

from __future__ import annotations

from embodyrl.registry import TaskInfo

SPLITS = {"train": "resets with seeds from 0", "eval": "resets with seeds from 2^31"}
TASKS = (
    "Hopper-v5",
    "HalfCheetah-v5",
    "Walker2d-v5",
    "Ant-v5",
    "Humanoid-v5",
    "Reacher-v5",
    "Pusher-v5",
)


def list_tasks() -> list[TaskInfo]:
    """One row per id; the instruction is the id itself."""
    return [TaskInfo(name, name, f"env.id={name}", group="MuJoCo v5") for name in TASKS]
