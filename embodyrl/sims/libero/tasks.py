"""LIBERO's tasks for ``embodyrl list``: those of every suite that can run here."""

from __future__ import annotations

from embodyrl.registry import TaskInfo
from embodyrl.sims.libero import suites

SPLITS = {
    "train": "initial states drawn from the task's own regions",
    "eval": "the official initial states",
    "ood_swap": "LIBERO-PRO's suite with the objects' places swapped; "
    "likewise ood_lan, ood_task, ood_object ...",
}


def list_tasks() -> list[TaskInfo]:
    """All tasks, suite by suite.

    Raises:
        MissingDependencyError: the package is not installed.
    """
    return [
        TaskInfo(
            task.name, task.instruction, f"env.suite={suite} env.task_ids=[{number}]", group=suite
        )
        for suite in suites.suite_names()
        for number, task in enumerate(suites.load_suite(suite))
    ]
