"""Gives actions to a data set that has none, by inverse dynamics learned from one that has them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.data.frames import decode_camera
from embodyrl.data.inverse_dynamics import SIDE, Footage, explained, fit_namer
from embodyrl.data.lerobot_read import DatasetFiles, open_dataset
from embodyrl.data.lerobot_tables import parquet, read_table
from embodyrl.data.lerobot_write import require_free
from embodyrl.data.table_checks import require_sound_tables
from embodyrl.errors import UserError
from embodyrl.storage.atomic_files import replacing_folder, write_json
from embodyrl.storage.translation import Translation

ACTION, STATE = "action", "observation.state"
DOUBT = "action_doubt"
"""Column of the result: the largest standard deviation among the numbers of an action."""
HELD_OUT = 0.15
"""Share of the labelled episodes on which the net is tried."""
LEAST_EPISODES = 4
"""Labelled episodes, of which one is held out."""


def label_dataset(
    path: str,
    like: str,
    out: str,
    *,
    least: float = 0.5,
    steps: int = 2000,
    replace: bool = False,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Writes a copy of a data set with actions, and with states where it has none either.

    Videos are copied as they are. What an action means is what it means in ``like``.

    Args:
        path: the data set without actions.
        like: the data set with actions, of the same cameras and rate; their states are used where
            both have some.
        out: folder of the result.
        least: R^2 that every action dim must have on held-out episodes of ``like``.
        steps: gradient steps.
        replace: whether ``path`` may have actions, which are replaced and compared with.
        seed: of the net, and of the held-out episodes.
        say: is told what happens.

    Returns:
        ``episodes`` and ``frames`` that were labelled, ``explained`` (R^2 of each action dim),
        ``states`` likewise where they were named too, ``doubtful`` (share of frames of which the net
        is less sure than of 99% of the held-out ones) and, with ``replace``, ``agrees`` (R^2 against
        the actions that were there).

    Raises:
        UserError: the two do not fit together, or the actions cannot be told from what is seen.
    """
    require_free(out)
    target, source, cameras = _open(path, like, replace)
    with_states = STATE in target.features and STATE in source.features
    learned, shown = (_film(data, cameras, with_states) for data in (source, target))
    # 1. Learn from most labelled episodes, and try the others.
    train, held_out = _split(learned.episode, seed)
    say(f"learning from {len(train):,} frames of {like}; {len(held_out):,} are held out")
    wanted = torch.from_numpy(source.columns[ACTION].astype(np.float32))
    net = fit_namer(learned, wanted, train, steps=steps, seed=seed, say=say)
    named, doubt = net.name(learned, held_out)
    score = explained(named, wanted[held_out])
    result: dict[str, Any] = {"explained": score}
    if min(score) < least:
        raise UserError(
            f"The actions cannot be told well enough from what is seen: of the held-out episodes of "
            f"{like} the net explains {_shares(score)} of each number (R^2), and --least asks "
            f"for {least:g}. More labelled episodes or --steps may help, or a camera that sees the "
            "hand; a lower --least takes them as they are."
        )
    # 2. Name those of the others.
    limit = doubt.max(1).values.quantile(0.99)
    every = torch.arange(len(shown.episode))
    values, stds = net.name(shown, every)
    unsure = stds.max(1).values
    result |= {
        "episodes": len(target.episodes),
        "frames": len(values),
        "doubtful": float((unsure > limit).float().mean()),
    }
    actions = values.clamp(*_range(wanted))
    columns = {ACTION: actions, DOUBT: unsure[:, None]}
    # 3. Where the videos alone are there, name states too: by a net of their own, because they are
    # easier, and in one net their likelihood would outweigh that of the actions.
    if STATE not in target.features and STATE in source.features:
        states = torch.from_numpy(source.columns[STATE].astype(np.float32))
        net = fit_namer(learned, states, train, steps=steps, seed=seed, say=say)
        result["states"] = explained(net.name(learned, held_out)[0], states[held_out])
        columns[STATE] = net.name(shown, every)[0]
    if replace:
        before = torch.from_numpy(target.columns[ACTION].astype(np.float32))
        result["agrees"] = explained(actions, before)
    about = {"labelled_like": like, "explained": result["explained"]}
    _write(target, source, Path(out), columns, about)
    return result


def _open(path: str, like: str, replace: bool) -> tuple[DatasetFiles, DatasetFiles, list[str]]:
    """Both data sets, and the cameras that they share.

    Raises:
        UserError: they do not fit together.
    """
    # Open both with the columns that they have.
    source = open_dataset(like)
    wanted = [source.need(ACTION), *([STATE] if STATE in source.features else [])]
    source = open_dataset(like, wanted)
    target = open_dataset(path)
    if ACTION in target.features and not replace:
        raise UserError(f"{path} has actions already. To replace them, add --replace.")
    there = [key for key in (STATE, ACTION) if key in target.features]
    target = open_dataset(path, there)
    for data in (source, target):
        require_sound_tables(data)
    # Rate, cameras and states must be alike.
    if target.info["fps"] != source.info["fps"]:
        raise UserError(
            f"{path} has {target.info['fps']} frames a second and {like} {source.info['fps']}: an "
            "action would last longer in one than in the other. Record or resample them alike."
        )
    cameras = [key for key in source.cameras if key in target.cameras]
    states = STATE in source.features and STATE in target.features
    if states and source.columns[STATE].shape[1:] != target.columns[STATE].shape[1:]:
        raise UserError(
            f"A state of {path} has {target.columns[STATE].shape[1]} numbers, and one of {like} "
            f"{source.columns[STATE].shape[1]}: they are not of the same arm."
        )
    # Something must be seen of both.
    if not cameras and not states:
        raise UserError(
            f"{path} has the cameras {sorted(target.cameras)}, and {like} {sorted(source.cameras)}. "
            "Actions are told from what both show: give data sets with a camera in common."
        )
    if len(source.episodes) < LEAST_EPISODES:
        raise UserError(
            f"{like} has {len(source.episodes)} episodes with actions; at least {LEAST_EPISODES} are "
            "needed, to learn from and to try it on."
        )
    return target, source, cameras


def _film(data: DatasetFiles, cameras: list[str], with_states: bool) -> Footage:
    """What is seen of all frames, scaled."""
    # Pictures of one size, whatever the cameras'.
    episode = data.columns["episode_index"].reshape(-1)
    rows = np.arange(len(episode))
    size, how = (SIDE, SIDE), Translation(fit="squeeze")
    pictures = {key: decode_camera(data, key, rows, size, change=how) for key in cameras}
    states = (
        data.columns[STATE].astype(np.float32)
        if with_states
        else np.zeros((len(rows), 0), np.float32)
    )
    return Footage(pictures, torch.from_numpy(states), torch.from_numpy(episode.astype(np.int64)))


def _split(episode: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Frames to learn from, and those of held-out episodes."""
    # Whole episodes are held out.
    numbers = episode.unique()
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
    count = max(1, round(HELD_OUT * len(numbers)))
    held_out = torch.isin(episode, numbers[order[:count]])
    return (~held_out).nonzero().flatten(), held_out.nonzero().flatten()


def _range(actions: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest action that was seen, of each dim."""
    return actions.amin(0), actions.amax(0)


def _shares(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _write(
    target: DatasetFiles,
    source: DatasetFiles,
    out: Path,
    columns: dict[str, Tensor],
    about: dict[str, Any],
) -> None:
    """A copy of the data set with these columns; what exists is complete."""
    # Tables have the frames in the order of their files.
    ordered = {}
    for name, values in columns.items():
        ordered[name] = np.empty(tuple(values.shape), np.float32)
        ordered[name][target.position] = values.numpy()
    # Copy everything, then change tables and descriptions.
    with replacing_folder(out) as folder:
        shutil.copytree(
            target.path, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".cache")
        )
        begin = 0
        for file in target.files:
            begin += _add_columns(folder / file.relative_to(target.path), ordered, begin)
        _describe(folder, columns)
        origin = source.origin or target.origin
        write_json(folder / "meta" / "embodyrl.json", {**origin, **about}, indent=2)


def _add_columns(file: Path, columns: dict[str, np.ndarray], begin: int) -> int:
    """Writes the columns into one table; returns its number of rows."""
    import pyarrow as pa

    # Replace a column that is there, append one that is not.
    table = read_table(file)
    for name, values in columns.items():
        rows = values[begin : begin + len(table)]
        flat = pa.array(rows.reshape(-1), pa.float32())
        column: Any = pa.FixedSizeListArray.from_arrays(flat, rows.shape[1])
        if rows.shape[1] == 1:
            column = flat
        if name in table.column_names:
            table = table.set_column(table.column_names.index(name), name, column)
        else:
            table = table.append_column(name, column)
    # The note of Hugging Face's datasets lists the old columns.
    metadata = {k: v for k, v in (table.schema.metadata or {}).items() if k != b"huggingface"}
    parquet().write_table(table.replace_schema_metadata(metadata), file)
    return len(table)


def _describe(folder: Path, columns: dict[str, Tensor]) -> None:
    """Features and statistics of the new columns."""
    # What is in the columns, and their statistics, if the data set keeps some.
    info_path = folder / "meta" / "info.json"
    info = json.loads(info_path.read_text())
    stats_path = folder / "meta" / "stats.json"
    stats = json.loads(stats_path.read_text()) if stats_path.exists() else None
    for name, values in columns.items():
        info["features"][name] = {"dtype": "float32", "shape": [values.shape[1]], "names": None}
        if stats is not None:
            low, high = values.amin(0), values.amax(0)
            std = values.std(0, correction=0)
            found = {"min": low, "max": high, "mean": values.mean(0), "std": std}
            stats[name] = {key: x.tolist() for key, x in found.items()} | {"count": [len(values)]}
    write_json(info_path, info, indent=2)
    if stats is not None:
        write_json(stats_path, stats, indent=2)
