"""Notes on data whose numbers are sound, and may not mean what an env means by them.

A table cannot say what an action means. But the state answers to it: an action that is the change
of a position goes along with what that position does next. Each note says what was seen, and it is
no proof: look at an episode, or replay one in the env.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from embodyrl.data.camera_names import short_name
from embodyrl.data.lerobot_read import DatasetFiles
from embodyrl.types import EnvSpec

FEWEST = 20
"""Pairs of frames below which nothing is concluded."""
CLEAR = 0.95
"""Correlation from which an action and a number of the state are taken to belong together."""
SEVERAL = 2
"""Numbers of an action that must agree: a gripper alone may well repeat its state, or follow it."""
LEAD = 0.1
"""How much better the frame before must fit than the frame itself."""


def motion_notes(data: DatasetFiles) -> Iterator[str]:
    """Sentences on the actions of a data set, beside its state.

    Data that embodyrl wrote say their control mode; of them only those of changes are looked at.
    """
    if not {"action", "observation.state"} <= data.columns.keys():
        return
    rows = len(data.columns["action"])
    actions = np.asarray(data.columns["action"], dtype=np.float64).reshape(rows, -1)
    state = np.asarray(data.columns["observation.state"], dtype=np.float64).reshape(rows, -1)
    episode = data.columns["episode_index"]
    mode = data.origin.get("control_mode", "")
    if not data.origin or "delta" in mode:
        yield from _beside_state(actions, state, episode[1:] == episode[:-1])
    if not data.origin:
        yield from _ranges(actions)


def env_notes(
    data: DatasetFiles,
    spec: EnvSpec,
    cameras: Mapping[str, str],
    rate: float,
    *,
    resampled: bool = False,
) -> Iterator[str]:
    """Sentences on data that fit an env, and may not mean what the env means.

    What the state says about the actions is for envs that take changes.

    Args:
        data: of a run.
        spec: of its env.
        cameras: the env's camera -> key in the data set, of those that nobody named.
        rate: actions per second of the data; 0 if they do not say.
        resampled: whether they are brought to the env's rate.
    """
    for name, key in cameras.items():
        short = short_name(key)
        if short != name:
            yield f"The camera {short!r} of {data.path} is taken as {name!r} of {spec.name}."
    if rate and abs(rate - spec.control_hz) > 0.01 * spec.control_hz:
        yield (
            f"{data.path} has {rate:g} actions per second, and {spec.name} takes "
            f"{spec.control_hz:g}: "
            + (
                "its episodes are resampled."
                if resampled
                else "each action lasts another time there. Resample the data "
                "(data.rate=resample), or give the env the rate of the data."
            )
        )
    env = data.origin.get("env", spec.name)
    if env != spec.name:
        yield f"{data.path} was recorded in {env}, and this run is in {spec.name}."
    if "delta" in spec.control_mode or spec.conventions.actions == "delta":
        yield from (f"{data.path}: {text}" for text in motion_notes(data))


def _beside_state(actions: np.ndarray, state: np.ndarray, same: np.ndarray) -> Iterator[str]:
    """Absolute positions, actions that belong to another frame, axes that point the other way.

    Args:
        actions: (F, A).
        state: (F, P).
        same: (F - 1,) whether a frame and the next one are of the same episode.
    """
    if same.sum() < FEWEST:
        return
    # Actions that repeat the position which the state has.
    repeats = []
    for i in range(actions.shape[1]):
        distance = np.abs(actions[:, i, None] - state).mean(axis=0)
        spread = state.std(axis=0)
        if ((spread > 0) & (distance < 0.25 * spread)).any():
            repeats.append(i)
    if len(repeats) >= SEVERAL:
        yield (
            f"'action' repeats 'observation.state' in {_numbers(repeats)}: that looks like "
            "absolute positions, and an env whose control mode has 'delta' takes changes."
        )
    # What the state does after an action, and what it had done just before.
    change = (state[1:] - state[:-1])[same]
    now = correlation(actions[:-1][same], change)
    before = correlation(actions[1:][same], change)
    late = [
        i
        for i in range(actions.shape[1])
        if (best := np.abs(before[i]).max()) >= CLEAR
        and best > np.abs(now[i, np.abs(before[i]).argmax()]) + LEAD
        and best > np.abs(now[i]).max()
    ]
    if len(late) >= SEVERAL:
        yield (
            f"'action' goes along with what the state did before it, not with what it does next, "
            f"in {_numbers(late)}: each action seems to stand one frame late."
        )
    # An axis of which the state moves the other way, where others go along.
    best = np.abs(now).argmax(axis=1)
    clear = {i: now[i, j] for i, j in enumerate(best) if abs(now[i, j]) >= CLEAR}
    against = [i for i, value in clear.items() if value < 0]
    if 0 < len(against) < len(clear):
        what = ", ".join(f"{i} and state {best[i]}" for i in against)
        yield (
            f"'action' and 'observation.state' move against each other in action {what}, while "
            "other actions go along with their state: the sign of an axis may be wrong."
        )


def _ranges(actions: np.ndarray) -> Iterator[str]:
    """Actions that never change, and grippers in other units."""
    constant = [i for i in range(actions.shape[1]) if np.ptp(actions[:, i]) == 0]
    if constant:
        yield (
            f"'action' holds the same value in all frames in {_numbers(constant)}: a policy "
            "learns that constant. Look whether it was recorded."
        )
    for i in range(actions.shape[1]):
        values = actions[:, i]
        ends = np.minimum(np.abs(values), np.abs(values - 1)) < 0.05
        if i not in constant and values.min() >= 0 and values.max() <= 1 and ends.mean() > 0.8:
            yield (
                f"Number {i} of 'action' lies in 0 to 1, like a gripper of other projects. "
                "embodyrl's envs take -1 to 1. Say what closes and what opens it: "
                "data.convention={gripper: [0,1]} if 1 opens, data.convention={gripper: [1,0]} "
                "if 0 opens."
            )


def correlation(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Pearson's correlation of each column of ``x`` (n, A) with each of ``y`` (n, P): (A, P).

    A column that does not vary has the correlation 0 with all.
    """
    x = x - x.mean(axis=0)
    y = y - y.mean(axis=0)
    scale = np.sqrt(np.outer((x * x).sum(axis=0), (y * y).sum(axis=0)))
    return np.divide(x.T @ y, scale, out=np.zeros_like(scale), where=scale > 1e-12)


def _numbers(indices: list[int]) -> str:
    """For example "numbers 0, 2"."""
    return f"number{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
