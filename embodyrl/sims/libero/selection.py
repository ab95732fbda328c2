"""Which tasks a run plays: those of one suite, of several, or of one of LIBERO's collections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from embodyrl.errors import UserError
from embodyrl.ranges import names_in
from embodyrl.sims.libero.suites import Task, load_suite

COLLECTIONS = {
    "libero_100": ("libero_90", "libero_10"),
    "libero_130": ("libero_spatial", "libero_object", "libero_goal", "libero_90", "libero_10"),
}
"""LIBERO's own names for several suites (Liu et al. 2023, arXiv:2306.03310)."""


def suites_in(text: str, ending: str = "") -> dict[str, str]:
    """The suites that ``env.suite`` names, in its order, and the name by which it has each.

    Args:
        text: names of suites and of collections, separated by commas.
        ending: put behind each name, such as ``_swap``.

    Raises:
        UserError: a suite is among them twice.
    """
    pairs = [
        (suite + ending, name + ending)
        for name in names_in(text)
        for suite in COLLECTIONS.get(name, (name,))
    ]
    found = [suite for suite, _ in pairs]
    if twice := [suite for suite in found if found.count(suite) > 1]:
        raise UserError(
            f"env.suite={text} has {twice[0]} twice. Name each suite once; libero_100 holds "
            "libero_90 and libero_10, and libero_130 holds all five."
        )
    return dict(pairs)


def choose_tasks(suites: Mapping[str, str], task_ids: Sequence[int]) -> list[Task]:
    """The tasks of a run.

    Args:
        suites: what ``suites_in`` gives.
        task_ids: numbers of tasks, which count on through the suites: with two suites of ten tasks,
            10 is the first task of the second. Empty means all.

    Raises:
        UserError: no such suite or task, a task that is named twice, or a suite that is named and
            none of its tasks.
        MissingDependencyError: a suite's files are not in the installed package.
    """
    tasks = [task for suite in suites for task in load_suite(suite)]
    if not task_ids:
        return tasks
    where = " and ".join(dict.fromkeys(suites.values()))
    if wrong := [i for i in task_ids if not 0 <= i < len(tasks)]:
        raise UserError(f"{where} has no task {wrong[0]}: it has {len(tasks)}, numbered from 0.")
    if twice := [i for i in task_ids if list(task_ids).count(i) > 1]:
        raise UserError(f"env.task_ids names task {twice[0]} twice. Name each task once.")
    chosen = [tasks[i] for i in task_ids]
    # Whoever thinks that the numbers begin anew with each suite is told, and not misunderstood.
    for name in dict.fromkeys(suites.values()):
        if name not in {suites[task.suite] for task in chosen}:
            own = [i for i, task in enumerate(tasks) if suites[task.suite] == name]
            raise UserError(
                f"env.task_ids takes no task of {name}. The numbers count on through the suites: "
                f"those of {name} are {own[0]} to {own[-1]}. Add some, or leave {name} out of "
                "env.suite."
            )
    return chosen


def unique_names(tasks: Sequence[Task]) -> tuple[str, ...]:
    """The tasks' names; where they are of several suites, each with its suite before it."""
    if len({task.suite for task in tasks}) == 1:
        return tuple(task.name for task in tasks)
    return tuple(f"{task.suite}/{task.name}" for task in tasks)
