"""Reads the parquet tables of a LeRobotDataset, and says what keeps a column from being read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.storage.paths import files_of, require_readable

REMEDY = "Fetch or record the data set again."
NUMBERING = ("index", "episode_index", "task_index", "timestamp", "frame_index")
"""Columns that number the frames; every data set has all but the last."""


def parquet() -> Any:
    """Pyarrow's module for parquet files."""
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingDependencyError(
            "Reading a LeRobot data set needs pyarrow, which is not installed here. Install it: "
            "pip install 'embodyrl[data]'."
        ) from error
    return pq


def parquet_files(folder: Path, what: str) -> list[Path]:
    """The files of the tables ``what`` of a data set; there must be one."""
    files = files_of(folder / what, "*/*.parquet")
    if not files:
        raise UserError(f"The data set {folder} is incomplete: {what}/ holds no parquet file.")
    return files


def read_table(file: Path, columns: list[str] | None = None) -> Any:
    """A parquet table, with those of ``columns`` that it has; an error message names the file."""
    import pyarrow as pa

    pq = parquet()
    require_readable(file)
    try:
        if columns is not None:
            there = pq.read_schema(file).names
            columns = [name for name in columns if name in there]
        return pq.read_table(file, columns=columns)
    except (OSError, pa.ArrowException) as error:
        text = " ".join(str(error).split())
        raise UserError(
            f"{file} cannot be read ({text[:200]}); fetch or record the data set again."
        ) from error


@dataclass
class Columns:
    """Columns of all files of a data set, in the order of ``index``.

    Attributes:
        values: name -> (F, ...).
        files: the parquet files.
        source: (F,) which of ``files`` each row stands in.
        position: (F,) place of each row among the rows of all files, one file after the other.
    """

    values: dict[str, np.ndarray]
    files: list[Path]
    source: np.ndarray
    position: np.ndarray


def load_columns(
    folder: Path,
    names: list[str],
    skip: frozenset[int],
    report: Callable[[str], None] | None,
) -> Columns:
    """Reads columns of the frames.

    Args:
        folder: of the data set.
        names: of the columns, those of ``NUMBERING`` among them.
        skip: episodes that are not used. Whatever their rows hold is nothing (0) here.
        report: called with each fault of a column, which is then left out; None raises it.

    Raises:
        UserError: a file cannot be read, or a column that is needed is damaged.
    """
    damaged = f"The data set {folder} is damaged."
    files = parquet_files(folder, "data")
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    lengths = []
    used: list[np.ndarray] = []
    for file in files:
        table = read_table(file, names)
        lengths.append(len(table))
        # What numbers the frames is read of all of them, the rest of the episodes that are used.
        used.append(~np.isin(_episodes_of(table), list(skip)))
        sound = table if used[-1].all() else table.filter(used[-1])
        for name in names:
            rows = table if name in NUMBERING else sound
            fault = _column_fault(rows, name, file.relative_to(folder))
            if not fault:
                parts[name].append(_numpy(rows.column(name).combine_chunks()))
            elif report is None or name in NUMBERING:
                raise UserError(f"{damaged} {fault}")
            else:
                report(fault)
    source = np.repeat(np.arange(len(lengths)), lengths)
    # Join the files.
    values = {}
    for name, arrays in parts.items():
        # A column with a fault was reported.
        if len(arrays) < len(lengths):
            continue
        # A file with skipped episodes alone has no row, and so no shape.
        arrays = [array for array in arrays if len(array)] or arrays[:1]
        if len(shapes := {array.shape[1:] for array in arrays}) > 1:
            fault = f"The column {name!r} has different shapes in its files: {sorted(shapes)}."
            if report is None:
                raise UserError(f"{damaged} {fault}")
            report(fault)
            continue
        values[name] = np.concatenate(arrays)
        if name not in NUMBERING and skip:
            values[name] = _spread(values[name], np.concatenate(used))
    # The order of the files need not be that of the frames.
    order = np.argsort(values["index"].reshape(-1), kind="stable")
    return Columns({name: v[order] for name, v in values.items()}, files, source[order], order)


def _episodes_of(table: Any) -> np.ndarray:
    """(rows,) the episode of each row; -1 if the table does not say."""
    if "episode_index" not in table.column_names:
        return np.full(len(table), -1)
    return table.column("episode_index").to_numpy()


def _spread(values: np.ndarray, used: np.ndarray) -> np.ndarray:
    """``values`` in the rows ``used``, and nothing (0, or an empty text) in the others."""
    nothing = "" if values.dtype == object else 0
    full = np.full((len(used), *values.shape[1:]), nothing, dtype=values.dtype)
    full[used] = values
    return full


def _column_fault(table: Any, name: str, file: Path) -> str:
    """What keeps a column from being read, in words; or nothing."""
    import pyarrow as pa
    import pyarrow.compute

    pc: Any = pyarrow.compute  # its type stubs lack the functions

    if name not in table.column_names:
        return f"{file} lacks the column {name!r}, which meta/info.json lists."
    column = table.column(name).combine_chunks()
    wrong = np.flatnonzero(pc.is_null(column).to_numpy(zero_copy_only=False))
    what = "is empty"
    while not len(wrong) and (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        # The usual number of entries in a row is the right one.
        counts = pc.list_value_length(column).to_numpy(zero_copy_only=False)
        usual = np.bincount(counts).argmax() if len(counts) else 0
        wrong = np.flatnonzero(counts != usual)
        if len(wrong):
            what = f"has {counts[wrong[0]]} numbers, where others have {usual}"
            break
        column = column.flatten()
        inner = np.flatnonzero(pc.is_null(column).to_numpy(zero_copy_only=False))
        wrong = np.unique(inner // max(1, usual))
    if not len(wrong):
        return ""
    episodes = _episodes_of(table)
    row = int(wrong[0])
    frame = row - int(np.flatnonzero(episodes == episodes[row])[0])
    bad = np.unique(episodes[wrong]).tolist()
    return (
        f"{name!r} {what} in frame {frame} of episode {episodes[row]} ({file}; {len(wrong)} such "
        f"rows). Record or fetch the data set again, or leave them out: data.skip={bad}."
    )


def _numpy(column: Any) -> np.ndarray:
    """A parquet column as an array; (nested) lists of equal length become further dimensions."""
    import pyarrow as pa

    if (
        pa.types.is_fixed_size_list(column.type)
        or pa.types.is_list(column.type)
        or pa.types.is_large_list(column.type)
    ):
        if not len(column):
            return np.zeros((0, getattr(column.type, "list_size", 0)), np.float32)
        return _numpy(column.flatten()).reshape(len(column), -1)
    return column.to_numpy(zero_copy_only=False)
