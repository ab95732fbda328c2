"""What the tables of a LeRobotDataset v3 say, held against one another: the cheap part of a check.

``load_demonstrations`` asks this before anything is learned; ``verify`` decodes the pictures too.
A check yields a sentence for each fault, with the file, the episode and the row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from embodyrl.data.lerobot_read import DatasetFiles, as_flags, file_of
from embodyrl.errors import UserError
from embodyrl.storage.paths import FileAccessError

MOST = 10
"""Faults of one kind that are named one by one; the rest is counted."""
EDIT = "lerobot-edit-dataset --repo_id local/data --root"
"""LeRobot's command that edits a data set; its folder comes next."""


class Fault(str):
    """A sentence on what is wrong, and the episodes that it is about, if it is about some."""

    episodes: frozenset[int]

    def __new__(cls, text: str, *episodes: int) -> Fault:  # noqa: D102
        fault = super().__new__(cls, text)
        fault.episodes = frozenset(episodes)
        return fault


def require_sound_tables(data: DatasetFiles) -> None:
    """Refuses a data set whose tables are damaged or contradict one another.

    Args:
        data: with the columns that are to be used.

    Raises:
        UserError: says what is wrong.
    """
    faults = found_by(CHECKS, data)
    if not faults:
        return
    more = f" ({len(faults) - 1} more faults.)" if len(faults) > 1 else ""
    rest = ""
    bad = [getattr(fault, "episodes", frozenset()) for fault in faults]
    if all(bad):
        skip = sorted(data.skip.union(*bad))
        rest = f" To learn from the other episodes: data.skip={skip}."
    raise UserError(
        f"The data set {data.path} is not sound, so nothing is learned from it. {faults[0]}{more}"
        f"{rest} See all of it: embodyrl data verify {data.path}"
    )


def left_aside(data: DatasetFiles) -> Iterator[str]:
    """Sentences on what nothing here reads."""
    for key, what in data.no_colours.items():
        yield f"{key!r} is {what}: nothing here reads that, so it is left aside."


def found_by(
    checks: Iterable[Callable[[DatasetFiles], Iterator[str]]], data: DatasetFiles
) -> list[str]:
    """The faults that some checks find; one that cannot go on is a fault itself."""
    faults: list[str] = []
    for check in checks:
        try:
            faults += check(data)
        except (FileAccessError, PermissionError):
            raise  # nothing is known about what may not be read
        except Exception as error:  # on a damaged table a check may raise anything
            faults.append(as_sentence(error))
    return faults


def as_sentence(error: Exception) -> str:
    """What an error says, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, UserError):
        return text
    return f"It cannot be read ({type(error).__name__}: {text[:300]})."


def by_episode(data: DatasetFiles) -> Iterator[tuple[int, np.ndarray]]:
    """The number of each episode that is used, and the rows of its frames."""
    episode = data.columns["episode_index"]
    order = np.argsort(episode, kind="stable")
    numbers, starts = np.unique(episode[order], return_index=True)
    for number, rows in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
        if number not in data.skip:
            yield number, rows


def leave_out(data: DatasetFiles, episode: int) -> str:
    """How to go on without an episode, as a sentence."""
    return (
        f" Leave it out with data.skip=[{episode}], or make a copy without it: {EDIT} {data.path} "
        f"--new_repo_id local/mended --new_root {data.path}_mended --operation.type "
        f'delete_episodes --operation.episode_indices "[{episode}]"'
    )


def first_few(faults: Iterable[str], what: str) -> Iterator[str]:
    """The first ``MOST`` faults of a kind, and how many more there are."""
    left = []
    for number, text in enumerate(faults):
        if number < MOST:
            yield text
        else:
            left.append(getattr(text, "episodes", frozenset()))
    if left:
        episodes = frozenset().union(*left) if all(left) else ()
        yield Fault(f"There are {len(left)} more faults of this kind ({what}).", *episodes)


def _place(data: DatasetFiles, row: int) -> str:
    """File, episode and row of a frame."""
    episode = data.columns["episode_index"][row]
    file = data.files[int(data.source[row])].relative_to(data.path)
    return f"{file}, episode {episode}, frame {row}"


def _keys(data: DatasetFiles) -> Iterator[str]:
    """There is a frame rate, and the columns have the shapes that are promised."""
    if not float(data.info.get("fps") or 0) > 0:
        yield f"meta/info.json gives {data.info.get('fps')!r} frames per second."
    for key, values in data.columns.items():
        said = data.features.get(key, {}).get("shape")
        if said is None or values.dtype == object:
            continue
        shape = values.shape[1:] or (1,)
        if shape != tuple(said):
            file = data.files[0].relative_to(data.path)
            yield f"The column {key!r} of {file} has the shape {shape}, not {tuple(said)}."


def _index(data: DatasetFiles) -> Iterator[str]:
    """Frames are numbered without gaps, overall and within each episode."""
    index = data.columns["index"].reshape(-1)
    total = data.info.get("total_frames")
    # If the rows of meta/episodes agree with the total, the episode that is cut is named there.
    listed = sum(row["length"] for row in data.episodes)
    if len(index) != total and listed != total:
        yield (
            f"The tables hold {len(index)} frames, but meta/info.json says {total}: a parquet file "
            "is missing or cut."
        )
    gaps = False
    for number, here in by_episode(data):
        if len(wrong := np.flatnonzero(np.diff(index[here]) != 1)):
            gaps = True
            at = int(here[wrong[0] + 1])
            yield Fault(
                f"Frame {index[here[wrong[0]]] + 1} is numbered {index[at]} ({_place(data, at)}): frames of "
                f"this episode are missing or there twice.{leave_out(data, number)}",
                number,
            )
    if not gaps and len(twice := np.flatnonzero(np.diff(index) < 1)):
        at = int(twice[0]) + 1
        yield (
            f"Frame {at} is numbered {index[at]} ({_place(data, at)}; {len(twice)} in all): frames "
            "are there twice, or the numbers begin anew in each episode."
        )
    numbers = np.unique(data.columns["episode_index"])
    total = data.info.get("total_episodes")
    if len(numbers) != total:
        yield f"The tables hold {len(numbers)} episodes, but meta/info.json says {total}."
    if len(wrong := np.flatnonzero(numbers != np.arange(len(numbers)))):
        yield f"Episode {wrong[0]} is missing: the next one is numbered {numbers[wrong[0]]}."
    # The rows of an episode stand together.
    episode = data.columns["episode_index"]
    starts = np.flatnonzero(np.diff(episode)) + 1
    firsts = np.concatenate([[0], starts])
    _, begun = np.unique(episode[firsts], return_index=True)
    if len(again := np.setdiff1d(np.arange(len(firsts)), begun)):
        yield f"The frames of an episode do not stand together: {_place(data, int(firsts[again[0]]))}."
    if "frame_index" in data.columns:
        within = np.arange(len(episode)) - np.repeat(firsts, np.diff([*firsts, len(episode)]))
        found = data.columns["frame_index"].reshape(-1)
        for number, here in by_episode(data):
            if len(wrong := here[found[here] != within[here]]):
                at = int(wrong[0])
                yield Fault(
                    f"'frame_index' is {found[at]}, not {within[at]} ({_place(data, at)}; "
                    f"{len(wrong)} in all).",
                    number,
                )


def _times(data: DatasetFiles) -> Iterator[str]:
    """Every frame has its time, one frame's duration after the one before it."""
    fps = float(data.info.get("fps") or 0)
    if not fps > 0:
        return

    def faults() -> Iterator[str]:
        for number, here in by_episode(data):
            stamp = data.columns["timestamp"][here].astype(np.float64).reshape(-1)
            late = np.abs(stamp - np.arange(len(stamp)) / fps)
            wrong = np.flatnonzero(~(late <= 0.1 / fps))
            if len(wrong):
                at = int(wrong[0])
                yield Fault(
                    f"The times of episode {number} do not fit {fps:g} frames per second: "
                    f"{stamp[at]:.4f} s, not {at / fps:.4f} s ({_place(data, int(here[at]))}; "
                    f"{len(wrong)} in all).{leave_out(data, number)}",
                    number,
                )

    yield from first_few(faults(), "times")


def _episodes(data: DatasetFiles) -> Iterator[str]:
    """Each episode's row agrees with its frames, and its files are there."""
    frames = dict(by_episode(data))
    numbers = [int(row["episode_index"]) for row in data.episodes]
    rows = dict(zip(numbers, data.episodes, strict=True))
    rows = {number: row for number, row in rows.items() if number not in data.skip}
    index = data.columns["index"].reshape(-1)
    for number in sorted(
        {n for n in rows if numbers.count(n) > 1} if len(set(numbers)) < len(numbers) else ()
    ):
        yield f"meta/episodes has {numbers.count(number)} rows for episode {number}."

    def faults() -> Iterator[str]:
        for number in sorted(rows.keys() | frames.keys()):
            row = rows.get(number)
            here = frames.get(number, np.empty(0, dtype=np.int64))
            if row is None:
                yield f"Episode {number} has frames but no row in meta/episodes."
            elif len(here) != row["length"]:
                yield Fault(
                    f"Episode {number} has {len(here)} frames, but meta/episodes says "
                    f"{row['length']}.{leave_out(data, number)}",
                    number,
                )
            elif not len(here):
                yield Fault(f"Episode {number} has no frame.{leave_out(data, number)}", number)
            elif [index[here[0]], index[here[-1]] + 1] != [
                row["dataset_from_index"],
                row["dataset_to_index"],
            ]:
                yield Fault(
                    f"Episode {number} is at the frames {index[here[0]]} to {index[here[-1]]}, not "
                    "where meta/episodes says.",
                    number,
                )
            elif (file := _data_file(data, row)) != (found := _found_in(data, here)):
                yield Fault(
                    f"Episode {number} is in {found}, but meta/episodes says {file}.", number
                )

    yield from first_few(faults(), "rows of meta/episodes")
    for file in sorted({_data_file(data, row) for row in rows.values()}):
        if not (data.path / file).is_file():
            yield f"{file}, which meta/episodes names, is missing."


def _data_file(data: DatasetFiles, row: dict[str, Any]) -> str:
    chunk = row["data/chunk_index"]
    file = file_of(data, "data_path", chunk_index=chunk, file_index=row["data/file_index"])
    return os.path.relpath(file, data.path)


def _found_in(data: DatasetFiles, rows: np.ndarray) -> str:
    files = [data.files[i].relative_to(data.path) for i in np.unique(data.source[rows])]
    return " and ".join(map(str, files))


def _language(data: DatasetFiles) -> Iterator[str]:
    """Every frame has an instruction, and every task stands in the table once."""
    for column, values in (
        ("task_index", [number for number, _ in data.task_rows]),
        ("task", [text for _, text in data.task_rows]),
    ):
        seen: set[Any] = set()
        for row, value in enumerate(values):
            if value in seen and str(value).strip():
                yield f"Row {row} of meta/tasks.parquet repeats the {column} {value!r}."
            seen.add(value)
    index = data.columns["task_index"].reshape(-1)
    for number in np.unique(index[_used(data)]).tolist():
        row = int(np.flatnonzero((index == number) & _used(data))[0])
        if number not in data.tasks:
            yield (
                f"Frames have the task {number}, which meta/tasks.parquet does not list "
                f"({_place(data, row)})."
            )
    # The episode table repeats the instructions.
    known = set(data.tasks.values())
    empty = without_instruction(data)
    for row in data.episodes:
        number = row["episode_index"]
        unknown = [text for text in row.get("tasks") or () if text not in known]
        if unknown and number not in data.skip and number not in empty:
            yield Fault(
                f"The row of episode {number} in meta/episodes names the task {unknown[0]!r}, which "
                "meta/tasks.parquet does not list.",
                number,
            )


def without_instruction(data: DatasetFiles) -> list[int]:
    """The episodes of which a frame has no instruction."""
    empty = [number for number, text in data.tasks.items() if not str(text).strip()]
    rows = np.isin(data.columns["task_index"].reshape(-1), empty) & _used(data)
    return np.unique(data.columns["episode_index"][rows]).tolist()


def instruction_fault(data: DatasetFiles) -> str:
    """A sentence on episodes without an instruction; empty if each has one."""
    if not (episodes := without_instruction(data)):
        return ""
    return (
        f"{data.path} has no instruction in {len(episodes)} of its {len(data.episodes)} episodes, "
        f"the first of which is {episodes[0]}. Give them one: {EDIT} {data.path} "
        '--operation.type modify_tasks --operation.new_task "WORDS"'
    )


def _used(data: DatasetFiles) -> np.ndarray:
    """(F,) the frames of episodes that are used."""
    return ~np.isin(data.columns["episode_index"].reshape(-1), list(data.skip))


def _numbers(data: DatasetFiles) -> Iterator[str]:
    """No NaN and no infinity."""
    for key, values in data.columns.items():
        if values.dtype == object:
            if data.features.get(key, {}).get("dtype") not in ("string", "bool", None):
                yield f"{key!r} holds text, and meta/info.json says {data.features[key]['dtype']}."
            continue
        bad = _used(data) & ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        yield from first_few(_not_finite(data, key, np.flatnonzero(bad)), f"numbers of {key!r}")


def _not_finite(data: DatasetFiles, key: str, rows: np.ndarray) -> Iterator[Fault]:
    """A fault for each episode with one of ``rows``."""
    episodes = data.columns["episode_index"].reshape(-1)[rows]
    for number in np.unique(episodes).tolist():
        here = rows[episodes == number]
        yield Fault(
            f"{key!r} holds NaN or infinity in {len(here)} frames of episode {number}, first in "
            f"frame {here[0]} ({data.files[int(data.source[here[0]])].name})."
            f"{leave_out(data, number)}",
            number,
        )


def _success(data: DatasetFiles) -> Iterator[str]:
    """The success flag is one per episode, and agrees with that of the last step."""
    if "success" not in data.columns:
        return
    try:
        flag, last = (
            as_flags(data.columns[name], name) if name in data.columns else None
            for name in ("success", "next.success")
        )
    except UserError as error:
        yield str(error)
        return
    assert flag is not None
    for number, here in by_episode(data):
        if flag[here].any() != flag[here].all():
            at = int(here[np.flatnonzero(flag[here] != flag[here[0]])[0]])
            yield Fault(f"'success' changes within episode {number} ({_place(data, at)}).", number)
        elif last is not None and last[here].any() != flag[here].any():
            yield Fault(
                f"'success' and 'next.success' of episode {number} contradict each other.", number
            )


def _video_times(data: DatasetFiles) -> Iterator[str]:
    """The episodes of a video file follow one another, each as long as its rows."""
    fps = float(data.info.get("fps") or 0)
    videos = [key for key in data.cameras if data.features[key]["dtype"] == "video"]
    for key in videos if fps > 0 else ():
        columns = [f"videos/{key}/{name}" for name in ("chunk_index", "file_index")]
        columns += [f"videos/{key}/{name}_timestamp" for name in ("from", "to")]
        if missing := [c for c in columns if any(row.get(c) is None for row in data.episodes)]:
            yield (
                f"meta/episodes does not say where the videos of {key!r} are: it lacks "
                f"{missing[0]!r}."
            )
            continue
        yield from first_few(_video_order(data, columns, fps), f"video times of {key!r}")


def _video_order(data: DatasetFiles, columns: list[str], fps: float) -> Iterator[str]:
    end: dict[tuple[int, int], tuple[float, int]] = {}
    rows = sorted(data.episodes, key=lambda row: tuple(row[c] for c in columns[:3]))
    for row in rows:
        chunk, file, start, stop = (row[c] for c in columns)
        number = row["episode_index"]
        where = f"{columns[2]} of episode {number} in meta/episodes"
        before, other = end.get((chunk, file), (0.0, -1))
        if not np.isfinite([start, stop]).all():
            if number not in data.skip:
                yield Fault(f"{where} is {start}, and the end is {stop}.", number)
            continue
        if number in data.skip:
            pass
        elif start < before - 0.5 / fps:
            yield Fault(
                f"{where} is {start:.3f} s, but "
                + (f"episode {other} lasts until {before:.3f} s" if other >= 0 else "0 comes first")
                + " in the same video: their pictures are mixed up.",
                number,
            )
        elif abs(stop - start - row["length"] / fps) > 1.5 / fps:
            yield Fault(
                f"The video of episode {number} lasts {stop - start:.3f} s ({columns[2]}), but its "
                f"{row['length']} rows {row['length'] / fps:.3f} s.",
                number,
            )
        end[chunk, file] = (start + row["length"] / fps, number)


CHECKS: tuple[Callable[[DatasetFiles], Iterator[str]], ...] = (
    _keys, _index, _times, _episodes, _language, _numbers, _success, _video_times,
)  # fmt: skip
"""What ``require_sound_tables`` looks at, and ``verify`` before the pictures."""
