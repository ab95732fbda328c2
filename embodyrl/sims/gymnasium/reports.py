"""What a Gymnasium env says of a step: reward, ends and success, in any of the usual places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

SUCCESS = ("success", "is_success", "task_success", "goal_achieved", "solved")
"""The keys of ``info`` by which envs say that a task is solved."""
INSIDE = ("final_info", "episode", "metrics")
"""The keys of ``info`` in which the former may stand, as wrappers leave them."""


class GymStep(NamedTuple):
    """One step.

    Attributes:
        obs: as the env gives it.
        reward: a number.
        terminated: the task itself ended.
        truncated: a time limit ended it.
        success: whether the task is solved; None where ``info`` does not say it.
    """

    obs: Any
    reward: float
    terminated: bool
    truncated: bool
    success: bool | None


def read_reset(result: Any) -> Any:
    """The observation that a reset gave: with its info, or alone as old envs have it."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        return result[0]
    return result


def read_step(result: Any) -> GymStep:
    """A step of five values, or of four as old envs have it (``done`` in place of two flags).

    Raises:
        ValueError: it has another number of values.
    """
    if not isinstance(result, tuple) or len(result) not in (4, 5):
        size = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise ValueError(f"its step gave {size}, not (obs, reward, terminated, truncated, info)")
    obs, reward, *flags, info = result
    terminated = scalar(flags[0]) != 0
    if len(flags) == 2:
        truncated = scalar(flags[1]) != 0
    else:
        truncated = terminated and bool(scalar(info.get("TimeLimit.truncated", False)))
        terminated = terminated and not truncated
    return GymStep(obs, scalar(reward), terminated, truncated, success_in(info))


def success_in(info: Any) -> bool | None:
    """Whether ``info`` says that the task is solved; None where it does not say."""
    if not isinstance(info, Mapping):
        return None
    for key in SUCCESS:
        if info.get(key) is not None:
            return scalar(info[key]) > 0.5
    for key in INSIDE:
        inner = info.get(key)
        if isinstance(inner, list | tuple | np.ndarray) and len(inner) == 1:
            inner = inner[0]  # of a vector env of one
        if (found := success_in(inner)) is not None:
            return found
    return None


def scalar(value: Any) -> float:
    """A number, also where it comes as an array or a tensor with one entry.

    Raises:
        TypeError: there are several.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.size != 1:
        raise TypeError(f"a number of one env was expected, not an array of shape {array.shape}")
    return float(array.reshape(()))
