"""Builds OGBench's own env objects so that an episode repeats, and reads state and goal from them."""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's module is native and its wheel describes it only in part to a type checker.
from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium
import mujoco
import numpy as np

from embodyrl.errors import MissingDependencyError
from embodyrl.sims.ogbench.scenes import SceneInfo

ROBOT_DIM = 19
"""Numbers of OGBench's state that are the robot's: they come first."""

_CENTRE = np.array([0.425, 0.0, 0.0])
_POSITION_SCALE = 10.0
_DRAWER_SCALE = 18.0
_WINDOW_SCALE = 15.0


@functools.cache
def scene_class(kind: str) -> type:
    """OGBench's class of a kind of scene.

    Raises:
        MissingDependencyError: OGBench is not installed.
    """
    try:
        # dm_control looks for a screen, which nothing here needs.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from ogbench.manipspace.envs.cube_env import CubeEnv
            from ogbench.manipspace.envs.puzzle_env import PuzzleEnv
            from ogbench.manipspace.envs.scene_env import SceneEnv
    except ImportError as error:
        raise MissingDependencyError(
            f"OGBench cannot be imported ({error}). Install it with `pip install "
            "'embodyrl[ogbench]'`."
        ) from error
    return {"cube": CubeEnv, "scene": SceneEnv, "puzzle": PuzzleEnv}[kind]


def goal_infos(scene: SceneInfo) -> Sequence[dict[str, Any]]:
    """What OGBench says of a scene's goals, without building it.

    Raises:
        MissingDependencyError: OGBench is not installed.
    """
    # OGBench lists its goals in a method that needs these attributes and no more.
    blank: Any = object.__new__(scene_class(scene.kind))
    blank._env_type = scene.env_type
    blank._reward_task_id = None
    if scene.kind == "puzzle":
        blank._num_rows, blank._num_cols = map(int, scene.env_type.split("x"))
    blank.set_tasks()
    return blank.task_infos


class _Repeatable:
    """Changes OGBench's env so that the same seed and actions give the same episode.

    OGBench plays a few random actions in each reset, to settle the scene in its goal. It draws them
    without a seed, and contacts and the solver's start are left over from them. Here they are the
    same each time.
    It also leaves out what nobody reads: the ``info`` of a step.
    """

    @property
    def action_space(self) -> gymnasium.spaces.Box:
        return gymnasium.spaces.Box(-1.0, 1.0, (5,), np.float32, seed=0)

    def build_mjcf_model(self) -> Any:
        model = super().build_mjcf_model()
        # The pictures' colours are in the model now. Observations stay numbers.
        self._ob_type = "states"
        return model

    def get_step_info(self) -> dict[str, Any]:
        return {}


def make_simulations(scene: SceneInfo, pixels: bool, count: int) -> list[Any]:
    """OGBench's env objects, each for all goals of a scene.

    Only the first is built, which takes seconds. The others are copies of it with a model and data
    of their own.

    Args:
        scene: which.
        pixels: colours as for OGBench's pixel policies, and the arm transparent.
        count: how many.

    Raises:
        MissingDependencyError: OGBench is not installed.
    """
    base = scene_class(scene.kind)
    repeatable: Any = type(base.__name__, (_Repeatable, base), {})
    # Each cube keeps its colour's goal, as in OGBench's single tasks.
    options: dict[str, Any] = {} if scene.kind == "puzzle" else {"permute_blocks": False}
    first = repeatable(
        env_type=scene.env_type,
        ob_type="pixels" if pixels else "states",
        terminate_at_goal=False,
        visualize_info=False,
        **options,
    )
    # The first reset compiles the model.
    first.reset(options={"task_id": 1}, seed=0)
    simulations = [first]
    for _ in range(count - 1):
        # All that differs between episodes is the model, the data, and what a reset sets anew.
        other = copy.copy(first)
        other._model = copy.copy(first.model)
        other._data = mujoco.MjData(other.model)
        other.reset(options={"task_id": 1}, seed=0)
        simulations.append(other)
    return simulations


def part_successes(simulation: Any) -> list[bool]:
    """Which parts are as the goal wants them: cubes, then buttons, drawer and window."""
    # Cubes and puzzles give one list, the scene a tuple of lists and flags.
    found = simulation._compute_successes()
    flat = found if isinstance(found, tuple) else (found,)
    return [bool(part) for entry in flat for part in np.atleast_1d(entry)]


def goal_numbers(simulation: Any) -> np.ndarray:
    """(G,) the goal of the episode in the units of OGBench's state, as its oracle representation.

    Cubes' positions, buttons' states, then drawer and window, as far as the scene has them.
    """
    # A scene has cubes, buttons or both.
    parts = []
    if hasattr(simulation, "_cube_target_mocap_ids"):
        targets = simulation.data.mocap_pos[simulation._cube_target_mocap_ids]
        parts.append(((targets - _CENTRE) * _POSITION_SCALE).ravel())
    if hasattr(simulation, "_target_button_states"):
        parts.append(np.asarray(simulation._target_button_states, dtype=float))
    if hasattr(simulation, "_target_drawer_pos"):
        parts.append(np.array([simulation._target_drawer_pos * _DRAWER_SCALE]))
        parts.append(np.array([simulation._target_window_pos * _WINDOW_SCALE]))
    return np.concatenate(parts)
