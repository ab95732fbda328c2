"""Reads a data set into ``Demonstrations``: chosen, translated for an env, and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.data.camera_names import dataset_cameras
from embodyrl.data.conventions import conventions_of
from embodyrl.data.demonstrations import Demonstrations, check_dims
from embodyrl.data.frames import MEMORY_LIMIT, decode_camera
from embodyrl.data.lerobot_read import DatasetFiles, as_flags, open_dataset
from embodyrl.data.meaning_notes import env_notes
from embodyrl.data.resample import Resampled
from embodyrl.data.table_checks import instruction_fault, left_aside, require_sound_tables
from embodyrl.errors import UserError
from embodyrl.storage.profiles import profile_named
from embodyrl.storage.translation import Translation, translate, within_reach
from embodyrl.types import EnvSpec

INTERVENTION = ("intervention", "is_intervention", "complementary_info.is_intervention")
"""Possible names of the column that says whether a person had taken over; the last is LeRobot's."""


def load_demonstrations(
    path: str | Path,
    horizon: int,
    *,
    execute: int = 0,
    spec: EnvSpec | None = None,
    skip: Sequence[int] = (),
    episodes: int = 0,
    keep: str = "success",
    cameras: Mapping[str, str] | None = None,
    profile: str = "",
    convention: Mapping[str, Any] | None = None,
    rate: str = "keep",
    state: str = "",
    action: str = "",
    revision: str | None = None,
    memory_limit: int = MEMORY_LIMIT,
    pictures: bool = True,
) -> Demonstrations:
    """Reads a LeRobotDataset (v2.0, v2.1 or v3), of embodyrl or of others.

    Args:
        path: folder, or id on the Hugging Face hub.
        horizon: C.
        execute: H; 0 for all of C.
        spec: of the env that the policy is for; the data must fit it, and pictures are resized
            to its cameras.
        skip: episodes that are left out, whatever is wrong with them.
        episodes: use only the first so many of those that are kept; 0 means all.
        keep: ``"success"`` leaves failed episodes out, if the data set says which failed;
            ``"all"`` keeps them.
        cameras: name of the policy's camera -> key in the data set; see ``dataset_cameras``.
        profile: family of the data set (``profiles.PROFILES``).
        convention: fields of ``Conventions`` that are known better than the data set and the
            profile say. With ``spec``, what differs from the env is translated.
        rate: ``"resample"`` brings episodes to the rate of ``spec``; ``"keep"`` takes the
            frames as they are.
        state: key of the proprioception; by default the profile's.
        action: key of the actions; by default the profile's.
        revision: of a hub id.
        memory_limit: see ``decode_camera``.
        pictures: False leaves the pictures undecoded, to see whether the data fit.

    Raises:
        UserError: no such data set or key, or it does not fit ``spec``; the message names what
            is there.
    """
    if keep not in ("success", "all"):
        raise UserError(f"keep is {keep!r}; it must be 'success' or 'all'.")
    if episodes < 0:
        raise UserError(f"episodes is {episodes}; it must be 0 (all) or a number of episodes.")
    # Find the columns, and read them.
    family = profile_named(profile)
    state = state or family.state
    action = action or family.action
    data = open_dataset(path, revision=revision)
    wanted = ("success", "next.success", "next.reward", "init", "privileged", *INTERVENTION)
    optional = [c for c in wanted if c in data.features]
    numeric = [
        k for k, f in data.features.items() if f["dtype"] not in ("video", "image", "string")
    ]
    data = open_dataset(
        path,
        [data.need(state, numeric), data.need(action, numeric), *optional],
        revision=revision,
        skip=skip,
    )
    require_sound_tables(data)
    # Choose cameras and episodes.
    chosen = dataset_cameras(data, spec, cameras, family.cameras)
    success = _episode_success(data)
    rows = _rows(data, success, keep, episodes)
    columns = {name: values[rows] for name, values in data.columns.items()}
    # What they mean, and at which rate.
    meaning = conventions_of(data, family.conventions, convention or {})
    hz = family.rate or _rate(data)
    change = Translation()
    cut: list[str] = []
    if spec is not None:
        check_dims(spec, columns[action], columns[state], str(path))
        change = translate(meaning, spec, f"the data set {path}")
        columns[action], cut = within_reach(
            change.of_actions(columns[action], columns["episode_index"], columns[state]), change
        )
    if spec is not None and rate == "resample" and hz and hz != spec.control_hz:
        kind = spec.conventions.actions or meaning.actions
        plan = Resampled.plan(columns["episode_index"], hz, spec.control_hz)
        columns = _resampled(columns, plan, (state, action, kind), str(path))
        rows = rows[plan.rows]
    ids = sorted(set(columns["task_index"].tolist()))
    taken_over = [as_flags(columns[c], c) for c in INTERVENTION if c in columns]
    demos = Demonstrations(
        horizon,
        images={},
        proprio=_float(columns[state]),
        actions=_float(columns[action]),
        episode=torch.from_numpy(columns["episode_index"].copy()),
        instruction=torch.from_numpy(np.searchsorted(ids, columns["task_index"])),
        sentences=[data.tasks[i] for i in ids],
        success=torch.from_numpy(success[rows].copy()),
        init=torch.from_numpy(columns["init"].astype(np.int64)) if "init" in columns else None,
        reward=_float(columns["next.reward"])[:, 0] if "next.reward" in columns else None,
        solved=torch.from_numpy(as_flags(columns["next.success"], "next.success"))
        if "next.success" in columns
        else None,
        intervention=torch.from_numpy(taken_over[0]) if taken_over else None,
        privileged=_float(columns["privileged"]) if "privileged" in columns else None,
        execute=execute,
    )
    # Check them before the pictures are decoded, which takes time.
    demos.control_mode = data.origin.get("control_mode", "")
    demos.origin = data.origin
    demos.conventions = meaning
    demos.rate = hz
    demos.path = str(path)
    demos.remarks = [*data.corrections, *_left_out(data, success, keep)]
    demos.no_instruction = instruction_fault(data)
    if spec is not None:
        demos.history = spec.history
        demos.check(spec, str(path))
        whole = data.columns
        actions = change.of_actions(whole[action], whole["episode_index"], whole[state])
        seen = dataclasses.replace(data, columns={**data.columns, action: actions})
        unnamed = {} if cameras or profile else chosen
        demos.remarks += env_notes(seen, spec, unnamed, hz, resampled=rate == "resample")
        if words := change.said():
            demos.remarks.append(f"{path} is translated for {spec.name}: {words}.")
        demos.remarks += [f"{path}: {text}" for text in cut]
    for name, key in chosen.items() if pictures else ():
        size = spec.cameras[name] if spec is not None else None
        demos.images[name] = decode_camera(
            data, key, rows, size, change=change, memory_limit=memory_limit
        )
    return demos


def _rate(data: DatasetFiles) -> float:
    """Actions per second; frames per second are whole numbers, and the env's rate need not be."""
    fps = float(data.info.get("fps") or 0)
    exact = float(data.origin.get("control_hz") or 0)
    return exact if max(1, round(exact)) == fps else fps


def _resampled(
    columns: dict[str, np.ndarray], plan: Resampled, names: tuple[str, str, str], path: str
) -> dict[str, np.ndarray]:
    """All columns at another rate; ``names`` are the state, the action and the action's kind."""
    state, action, kind = names
    flags = [name for name in ("next.success", "next.done") if name in columns]
    changed = {
        state: plan.of_state(columns[state]),
        action: plan.of_actions(columns[action], kind, path),
        **{name: plan.of_flags(as_flags(columns[name], name)) for name in flags},
    }
    if "next.reward" in columns:
        changed["next.reward"] = plan.of_rewards(columns["next.reward"])
    return {name: values[plan.rows] for name, values in columns.items()} | changed


def _float(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.reshape(len(values), -1).astype(np.float32))


def _episode_success(data: DatasetFiles) -> np.ndarray:
    """(F,) bool, whether each frame's episode was solved; True if the data set does not say."""
    columns = data.columns
    episode = data.columns["episode_index"]
    name = next((n for n in ("success", "next.success") if n in columns), None)
    if name is None:
        return np.ones(len(episode), dtype=bool)
    # An episode is solved if one of its frames says so.
    _, number = np.unique(episode, return_inverse=True)
    solved = np.zeros(number.max() + 1, dtype=bool)
    np.logical_or.at(solved, number, as_flags(columns[name], name))
    return solved[number]


def _left_out(data: DatasetFiles, success: np.ndarray, keep: str) -> Iterator[str]:
    """Sentences on what of a data set is not used."""
    if data.skip:
        listed = ", ".join(map(str, sorted(data.skip)))
        yield f"Left out of {data.path}: the episodes {listed} (data.skip)."
    failed = np.setdiff1d(data.columns["episode_index"][~success], list(data.skip))
    if keep == "success" and len(failed):
        yield (
            f"Left out of {data.path}: {len(failed)} of {len(data.episodes)} episodes, which failed "
            "(data.keep=success)."
        )
    yield from left_aside(data)


def _rows(data: DatasetFiles, success: np.ndarray, keep: str, episodes: int) -> np.ndarray:
    """Numbers of the frames of the episodes that are used."""
    episode = data.columns["episode_index"]
    mask = success if keep == "success" else np.ones(len(episode), dtype=bool)
    mask = mask & ~np.isin(episode, list(data.skip))
    kept = np.unique(episode[mask])
    if len(kept) == 0 and len(data.skip) == len(data.episodes):
        raise UserError(f"data.skip leaves out all {len(data.skip)} episodes of {data.path}.")
    if len(kept) == 0:
        raise UserError(
            f"None of the {len(np.unique(episode))} episodes of {data.path} is marked as a "
            "success. To imitate failed ones too, or those of a task without a success flag, set "
            "data.keep=all."
        )
    if episodes > len(kept):
        raise UserError(
            f"{episodes} episodes were asked for, but {data.path} has only {len(kept)} of that "
            "kind."
        )
    if episodes:
        mask = mask & np.isin(episode, kept[:episodes])
    return np.flatnonzero(mask)
