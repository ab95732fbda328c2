"""Builds MetaWorld's own env objects for MuJoCo 3.17, and resets them to numbered states."""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's module is native and its wheel describes it only in part to a type checker.
from __future__ import annotations

import functools
from typing import Any

import mujoco
import numpy as np

from embodyrl.errors import MissingDependencyError

STATE_DIM = 39
HAND_DIM = 4
"""Numbers of the state that are the hand's: place and opening. They come first."""

_WELD = (0, 0, 0, 0, 0, 0, -1, 0, 0, 0, 5)


class _Welds:
    """MetaWorld's weld of hand and mocap body.

    MetaWorld sets all 11 numbers of an equality; MuJoCo 3.17 has a twelfth, which stays as it is.
    """

    def reset_mocap_welds(self) -> None:
        # The hand follows the mocap body through this weld, and nothing else moves the arm.
        model: Any = self.model
        for k in np.flatnonzero(model.eq_type == int(mujoco.mjtEq.mjEQ_WELD)):
            model.eq_data[k, : len(_WELD)] = _WELD


@functools.cache
def _task_class(task: str) -> type:
    """MetaWorld's class of a task, mended for this MuJoCo.

    Raises:
        MissingDependencyError: MetaWorld is not installed.
    """
    try:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    except ImportError as error:
        raise MissingDependencyError(
            f"MetaWorld cannot be imported ({error}). Install it with `pip install "
            "'embodyrl[metaworld]'`."
        ) from error
    base: Any = ALL_V3_ENVIRONMENTS[task]
    return type(base.__name__, (_Welds, base), {})


def make_simulation(task: str, max_episode_steps: int) -> Any:
    """MetaWorld's env of a task, with the goal in its state and its resets drawn from a seed.

    Raises:
        MissingDependencyError: MetaWorld is not installed.
    """
    simulation: Any = _task_class(task)()
    # In the multi-task suites the goal is seen. The bounds of the state depend on that.
    simulation._partially_observable = False
    vars(simulation).pop("sawyer_observation_space", None)
    # Initial states are drawn, as for MetaWorld's own lists of 50 goals, but from the env's generator.
    simulation._freeze_rand_vec = False
    simulation.seeded_rand_vec = True
    simulation._set_task_called = True
    simulation.max_path_length = max_episode_steps + 1  # the env API counts the steps
    return simulation


def start(simulation: Any, seed: int) -> np.ndarray:
    """Puts a simulation into the initial state of a seed; returns its state (39,)."""
    # Its reset ignores a seed; this one reaches the generator that draws objects and goal.
    simulation.seed(seed)
    state, _ = simulation.reset()
    return state


def make_scripted_policy(task: str) -> Any:
    """MetaWorld's scripted policy of a task."""
    from metaworld.policies import ENV_POLICY_MAP

    return ENV_POLICY_MAP[task]()
