"""Checks a LeRobotDataset v3, of embodyrl or of others, and reports faults as sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.data.frames import decode_video, videos_by_file
from embodyrl.data.lerobot_read import (
    DatasetFiles,
    file_of,
    load_pictures,
    open_dataset,
    picture_array,
)
from embodyrl.errors import UserError


@dataclass
class Verdict:
    """The result of a check.

    Attributes:
        path: of the data set.
        episodes, frames, fps, cameras: from its ``meta/info.json``.
        faults: sentences; a data set with faults is damaged or contradicts itself.
        notes: sentences on what is no fault but may matter; empty if there are faults.
    """

    path: str
    episodes: int = 0
    frames: int = 0
    fps: float = 0.0
    cameras: dict[str, tuple[int, int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verify_dataset(path: str | Path) -> Verdict:
    """Reads every table and decodes every picture of a data set.

    Args:
        path: folder or hub id, see ``open_dataset``.
    """
    verdict = Verdict(str(path))
    try:
        data = open_dataset(path)
    except Exception as error:  # on a damaged file a parser may raise anything: that is the fault
        verdict.faults.append(_as_sentence(error))
        return verdict
    # What it says about itself.
    info = data.info
    verdict.episodes = int(info.get("total_episodes", 0))
    verdict.frames = int(info.get("total_frames", 0))
    verdict.fps = float(info.get("fps", 0))
    verdict.cameras = data.cameras
    # The tables.
    for check in (_features, _index, _episodes, _language, _numbers, _success):
        try:
            verdict.faults += check(data)
        except Exception as error:
            verdict.faults.append(_as_sentence(error))
    # The pictures.
    if not verdict.fps > 0:
        verdict.faults.append(f"meta/info.json gives {info.get('fps')!r} frames per second.")
    else:
        for key in data.cameras:
            verdict.faults += _pictures(data, key)
    if not verdict.faults:
        verdict.notes += _notes(data)
    return verdict


def _as_sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, UserError):
        return text
    return f"It cannot be read ({type(error).__name__}: {text[:300]})."


def _features(data: DatasetFiles) -> Iterator[str]:
    """The columns that learning needs are there, and every file has all columns in their shapes."""
    import pyarrow.parquet as pq

    for key in ("action", "observation.state"):
        if key not in data.features:
            yield f"There is no {key!r} among its features."
    stored = {key: f for key, f in data.features.items() if f["dtype"] != "video"}
    for file in sorted((data.path / "data").glob("*/*.parquet")):
        parquet = pq.ParquetFile(file)
        name = file.relative_to(data.path)
        there = parquet.schema_arrow.names
        for key in stored:
            if key not in there:
                yield f"{name} lacks the column {key!r}, which meta/info.json lists."
        shaped = [
            key
            for key, f in stored.items()
            if key in there and f["dtype"] not in ("image", "string")
        ]
        # The first row shows the shapes.
        for batch in parquet.iter_batches(batch_size=1, columns=shaped):
            for key in shaped:
                shape = np.shape(batch.column(key)[0].as_py()) or (1,)
                said = tuple(stored[key]["shape"])
                if shape != said:
                    yield f"The column {key!r} of {name} has the shape {shape}, not {said}."
            break


def _by_episode(data: DatasetFiles) -> Iterator[tuple[int, np.ndarray]]:
    """The number of each episode, and the rows of its frames."""
    episode = data.columns["episode_index"]
    order = np.argsort(episode, kind="stable")
    numbers, starts = np.unique(episode[order], return_index=True)
    yield from zip(numbers.tolist(), np.split(order, starts[1:]), strict=True)


def _index(data: DatasetFiles) -> Iterator[str]:
    """Frames are numbered without gaps, and their times fit the frame rate."""
    index = data.columns["index"]
    episode = data.columns["episode_index"]
    total = data.info.get("total_frames")
    if len(index) != total:
        yield (
            f"The tables hold {len(index)} frames, but meta/info.json says {total}: a parquet file "
            "is missing or cut."
        )
    if wrong := np.flatnonzero(index != np.arange(len(index))).tolist():
        yield f"Frame {wrong[0]} is numbered {index[wrong[0]]}: frames are missing or there twice."
    numbers = np.unique(episode)
    total = data.info.get("total_episodes")
    if len(numbers) != total:
        yield f"The tables hold {len(numbers)} episodes, but meta/info.json says {total}."
    fps = float(data.info.get("fps") or 0)
    for number, here in _by_episode(data):
        stamp = data.columns["timestamp"][here].astype(np.float64)
        if fps and np.abs(stamp - np.arange(len(stamp)) / fps).max() > 0.1 / fps:
            yield f"The times of episode {number} do not fit {fps:g} frames per second."


def _episodes(data: DatasetFiles) -> Iterator[str]:
    """Each episode's row agrees with its frames, and its files are there."""
    # Compare the frames that there are with what the episode tables say.
    frames = dict(_by_episode(data))
    rows = {int(row["episode_index"]): row for row in data.episodes}
    for number in sorted(rows.keys() | frames.keys()):
        row = rows.get(number)
        here = frames.get(number, np.empty(0, dtype=np.int64))
        if row is None:
            yield f"Episode {number} has frames but no row in meta/episodes."
            continue
        if len(here) != row["length"]:
            yield (
                f"Episode {number} has {len(here)} frames, but meta/episodes says {row['length']}."
            )
            continue
        said = [row["dataset_from_index"], row["dataset_to_index"]]
        if len(here) and [here[0], here[-1] + 1] != said:
            yield (
                f"Episode {number} is at the frames {here[0]} to {here[-1]}, not where "
                "meta/episodes says."
            )
    for file in sorted({_data_file(data, row) for row in data.episodes}):
        if not file.is_file():
            yield f"{file}, which meta/episodes names, is missing."


def _data_file(data: DatasetFiles, row: dict[str, Any]) -> Path:
    chunk = row["data/chunk_index"]
    return file_of(data, "data_path", chunk_index=chunk, file_index=row["data/file_index"])


def _language(data: DatasetFiles) -> Iterator[str]:
    """Every frame has an instruction."""
    for number in np.unique(data.columns["task_index"]).tolist():
        if number not in data.tasks:
            yield f"Frames have the task {number}, which meta/tasks.parquet does not list."
        elif not str(data.tasks[number]).strip():
            yield f"Task {number} has an empty instruction."


def _numeric(data: DatasetFiles) -> dict[str, np.ndarray]:
    """All numeric columns."""
    kinds = ("float16", "float32", "float64", "int64", "int32", "bool")
    wanted = [key for key, feature in data.features.items() if feature["dtype"] in kinds]
    return open_dataset(data.path, wanted).columns


def _numbers(data: DatasetFiles) -> Iterator[str]:
    """No NaN and no infinity."""
    for key, values in _numeric(data).items():
        bad = ~np.isfinite(values.reshape(len(values), -1).astype(np.float64)).all(axis=1)
        if bad.any():
            first = int(np.flatnonzero(bad)[0])
            where = f"first in frame {first}, episode {data.columns['episode_index'][first]}"
            yield f"{key!r} holds NaN or infinity in {int(bad.sum())} frames, {where}."


def _success(data: DatasetFiles) -> Iterator[str]:
    """The success flag is one per episode, and agrees with that of the last step."""
    columns = _numeric(data)
    if "success" not in columns:
        return
    flag = columns["success"].reshape(-1).astype(bool)
    last = columns["next.success"].reshape(-1).astype(bool) if "next.success" in columns else None
    for number, here in _by_episode(data):
        if flag[here].any() != flag[here].all():
            yield f"'success' changes within episode {number}."
        elif last is not None and last[here].any() != flag[here].any():
            yield f"'success' and 'next.success' of episode {number} contradict each other."


def _pictures(data: DatasetFiles, key: str) -> Iterator[str]:
    """Every picture can be decoded, and has the time and the size that the tables say."""
    rows = np.arange(len(data.columns["index"]))
    size = data.cameras[key]
    if data.features[key]["dtype"] == "image":
        try:
            for k, encoded in enumerate(load_pictures(data, key, rows)):
                if (found := picture_array(encoded).shape[:2]) != size:
                    yield f"{key!r} of frame {k} is {found} (height, width), not {size}."
                    return
        except Exception as error:
            yield f"{key!r}: {_as_sentence(error)}"
        return
    try:
        files = list(videos_by_file(data, key, rows))
    except KeyError as error:
        yield f"meta/episodes does not say where the videos of {key!r} are: it lacks {error}."
        return
    for path, _, times in files:
        found: set[tuple[int, ...]] = set()

        def take(k: int, picture: np.ndarray, found: set[tuple[int, ...]] = found) -> None:
            found.add(picture.shape[:2])

        try:
            decode_video(path, times, take, tolerance=0.5 / float(data.info["fps"]))
        except UserError as error:
            yield str(error)
        if found - {size}:
            yield (
                f"{path.relative_to(data.path)} has pictures of {min(found)} (height, width), but "
                f"{key!r} is {size}."
            )


def _notes(data: DatasetFiles) -> Iterator[str]:
    """What is no fault, but may matter."""
    if not data.cameras:
        yield "It has no camera images."
    if not {"success", "next.success"} & data.features.keys():
        yield (
            "It has no success flag ('success' or 'next.success'): every episode counts as a "
            "success."
        )
    elif "action" in data.features:
        columns = open_dataset(data.path, ["action", *({"success"} & data.features.keys())]).columns
        largest = float(np.abs(columns["action"]).max())
        if largest > 1.0 + 1e-4:
            yield (
                f"Actions reach {largest:.3g}: they are not in the units [-1, 1] of embodyrl's "
                "envs."
            )
    if not data.origin:
        yield (
            "It does not say its control mode, because embodyrl did not write it: make sure that "
            "its actions mean the same as your env's."
        )


def print_verdict(verdict: Verdict) -> None:
    """The findings as text."""
    sizes = ", ".join(f"{name} {h}x{w}" for name, (h, w) in verdict.cameras.items()) or "no cameras"
    if verdict.frames:
        print(
            f"{verdict.path}: {verdict.episodes} episodes, {verdict.frames} frames at "
            f"{verdict.fps:g} Hz, {sizes}"
        )
    for text in verdict.faults:
        print(f"  FAULT  {text}")
    for text in verdict.notes:
        print(f"  note   {text}")
    count = len(verdict.faults)
    endings = {0: "Sound.", 1: "1 fault."}
    print(endings.get(count, f"{count} faults."))
