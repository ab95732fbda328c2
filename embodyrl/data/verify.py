"""Checks a LeRobotDataset v3, of embodyrl or of others, and reports faults as sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.data.doubts import motion_doubts
from embodyrl.data.frames import decode_video, videos_by_file
from embodyrl.data.lerobot_read import (
    DatasetFiles,
    episode_tables,
    load_pictures,
    open_dataset,
    picture_array,
)
from embodyrl.data.meaning_notes import motion_notes
from embodyrl.data.table_checks import (
    CHECKS,
    EDIT,
    as_sentence,
    by_episode,
    first_few,
    found_by,
    instruction_fault,
    left_aside,
)
from embodyrl.env import EnvConfig
from embodyrl.errors import UserError
from embodyrl.storage.paths import FileAccessError


@dataclass
class Verdict:
    """The result of a check.

    Attributes:
        path: of the data set.
        episodes, frames, fps, cameras: from its ``meta/info.json``.
        faults: sentences; a data set with faults is damaged or contradicts itself.
        notes: sentences on what is no fault but may matter; empty if there are faults.
        env: that it was held against; empty if none was.
        differs: sentences on what means something else than in that env.
        picture: a picture of recorded frames above the env's; empty if none was drawn.
    """

    path: str
    episodes: int = 0
    frames: int = 0
    fps: float = 0.0
    cameras: dict[str, tuple[int, int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    env: str = ""
    differs: list[str] = field(default_factory=list)
    picture: str = ""


def verify_dataset(
    path: str | Path,
    env: EnvConfig | None = None,
    options: Mapping[str, Any] | None = None,
    picture: str | Path = "",
) -> Verdict:
    """Reads every table and decodes every picture of a data set, and holds it against an env.

    Args:
        path: folder or hub id, see ``open_dataset``.
        env: that its pictures, states and actions are compared with; None compares with none.
        options: what is known of the data set, see ``env_check.data_options``.
        picture: file for recorded frames above the env's, a PNG; empty writes none.

    Raises:
        FileAccessError: a file may not be read, which says nothing about the data set.
    """
    verdict = Verdict(str(path))
    try:
        data = open_dataset(path)
        data = open_dataset(path, _columns(data), report=verdict.faults.append)
    except FileAccessError:
        raise
    except Exception as error:  # on a damaged file a parser may raise anything: that is the fault
        verdict.faults.append(as_sentence(error))
        return verdict
    # What it says about itself.
    info = data.info
    verdict.episodes = int(info.get("total_episodes", 0))
    verdict.frames = int(info.get("total_frames", 0))
    verdict.fps = float(info.get("fps") or 0)
    verdict.cameras = data.cameras
    # The tables.
    verdict.faults += found_by((_features, *CHECKS, _statistics), data)
    # The pictures.
    if verdict.fps > 0:
        for key in data.cameras:
            verdict.faults += found_by([partial(_pictures, key=key)], data)
    if not verdict.faults:
        verdict.notes += _notes(data)
        if env is not None:
            _hold_against(verdict, env, options or {}, picture)
    return verdict


def _hold_against(
    verdict: Verdict, env: EnvConfig, options: Mapping[str, Any], picture: str | Path
) -> None:
    """Fills in what an env says of the data set."""
    from embodyrl.data.env_check import check_with_env, findings_in_words

    try:
        check = check_with_env(verdict.path, env, options)
    except FileAccessError:
        raise
    except UserError as error:  # it does not fit the env at all
        verdict.env = env.name
        verdict.differs.append(str(error))
        return
    verdict.env = check.env
    given = {
        **(options.get("convention") or {}),
        **({"cameras": 1} if options.get("cameras") else {}),
    }
    for _, text, refused in findings_in_words(check, check.conventions, given, verdict.path):
        (verdict.differs if refused else verdict.notes).append(text)
    if check.rate_differs and not options.get("rate"):
        verdict.differs.append(check.rate_differs)
    verdict.notes += check.unchecked
    if picture and check.write_picture(picture):
        verdict.picture = str(picture)


def _columns(data: DatasetFiles) -> list[str]:
    """All columns but pictures."""
    return [key for key, f in data.features.items() if f["dtype"] not in ("video", "image")]


def _features(data: DatasetFiles) -> Iterator[str]:
    """The columns that learning needs are there."""
    for key in ("action", "observation.state"):
        if key not in data.features:
            yield f"There is no {key!r} among the features in meta/info.json."


def _statistics(data: DatasetFiles) -> Iterator[str]:
    """The statistics that policies of LeRobot normalise with are finite."""
    mend = f" Compute them anew: {EDIT} {data.path} --operation.type recompute_stats"
    path = data.path / "meta" / "stats.json"
    if path.is_file():
        try:
            finite = {
                (key, name): np.isfinite(_flat(values)).all()
                for key, entries in json.loads(path.read_text()).items()
                for name, values in entries.items()
            }
        except (ValueError, TypeError, AttributeError, RecursionError):
            yield f"meta/stats.json holds no table of statistics.{mend}"
            finite = {}
        for key, name in (where for where, holds in finite.items() if not holds):
            yield f"meta/stats.json: {name!r} of {key!r} holds NaN or infinity.{mend}"

    def faults() -> Iterator[str]:
        for file, table in episode_tables(data.path):
            for name in (n for n in table.column_names if n.startswith("stats/")):
                for row, cell in enumerate(table.column(name).to_pylist()):
                    if cell is not None and not np.isfinite(_flat(cell)).all():
                        number = table.column("episode_index")[row]
                        yield (
                            f"{file.relative_to(data.path)}, row {row} (episode {number}): {name!r} "
                            f"holds NaN or infinity.{mend}"
                        )

    yield from first_few(faults(), "statistics of episodes")


def _flat(cell: Any) -> np.ndarray:
    return np.asarray(cell, dtype=np.float64).reshape(-1)


def _pictures(data: DatasetFiles, key: str) -> Iterator[str]:
    """Every picture can be decoded, and has the time and the size that the tables say."""
    rows = np.arange(len(data.columns["index"]))
    size = data.cameras[key]
    if data.features[key]["dtype"] == "image":
        try:
            for k, encoded in load_pictures(data, key, rows):
                if (found := picture_array(encoded).shape[:2]) != size:
                    yield f"{key!r} of frame {k} is {found} (height, width), not {size}."
                    return
        except FileAccessError:
            raise
        except Exception as error:
            yield f"{key!r}: {as_sentence(error)}"
        return
    try:
        files = list(videos_by_file(data, key, rows))
    except KeyError as error:
        yield f"meta/episodes does not say where the videos of {key!r} are: it lacks {error}."
        return
    for path, targets, times in files:
        found: set[tuple[int, ...]] = set()

        def take(k: int, picture: np.ndarray, found: set[tuple[int, ...]] = found) -> None:
            found.add(picture.shape[:2])

        try:
            count = decode_video(path, times, take, tolerance=0.5 / float(data.info["fps"]))
        except FileAccessError:
            raise
        except UserError as error:
            yield f"{error} It holds the pictures of {_episodes_of(data, targets)}."
        else:
            if count != len(times):
                yield (
                    f"{_inside(data, path)} has {count} frames, but its episodes "
                    f"({_episodes_of(data, targets)}) have {len(times)} rows."
                )
        if found - {size}:
            yield (
                f"{_inside(data, path)} has pictures of {min(found)} (height, width), but "
                f"{key!r} is {size}."
            )


def _inside(data: DatasetFiles, path: Path) -> Path:
    """A file's path in the data set's folder, however that one was named."""
    return path.resolve().relative_to(data.path.resolve())


def _episodes_of(data: DatasetFiles, rows: np.ndarray) -> str:
    numbers = np.unique(data.columns["episode_index"][rows])
    return (
        f"episodes {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"episode {numbers[0]}"
    )


def _notes(data: DatasetFiles) -> Iterator[str]:
    """What is no fault, but may matter."""
    if not data.cameras:
        yield "It has no camera images."
    yield from filter(None, [*data.corrections, instruction_fault(data), *left_aside(data)])
    if not {"success", "next.success"} & data.features.keys():
        yield (
            "It has no success flag ('success' or 'next.success'): every episode counts as a "
            "success."
        )
    elif "action" in data.features:
        largest = float(np.abs(data.columns["action"]).max())
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
    yield from motion_notes(data)
    yield from first_few(_doubts(data), "episodes to look at")


def _doubts(data: DatasetFiles) -> Iterator[str]:
    """Episodes that a person should look at; see ``doubts``."""
    if "observation.state" not in data.columns:
        return
    states = np.asarray(data.columns["observation.state"], np.float64)
    episodes = {number: states[rows].reshape(len(rows), -1) for number, rows in by_episode(data)}
    for doubt in motion_doubts(episodes, float(data.info["fps"])):
        yield f"Look at episode {doubt.episode}, {doubt.seconds:.1f} s: {doubt.why}."


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
    for text in verdict.differs:
        print(f"  DIFFERS  {text}")
    if verdict.picture:
        print(f"Recorded pictures and the env's, side by side: {verdict.picture}")
    count = len(verdict.faults)
    endings = {0: "Sound.", 1: "1 fault."}
    ending = endings.get(count, f"{count} faults.")
    if verdict.env and not count:
        fits = (
            f"It means what {verdict.env} means."
            if not verdict.differs
            else (
                f"But it does not mean what {verdict.env} means: "
                f"{len(verdict.differs)} difference{'s' if len(verdict.differs) > 1 else ''}."
            )
        )
        ending = f"{ending} {fits}"
    print(ending)
