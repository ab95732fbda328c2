"""Reads a LeRobotDataset v3 directly from its parquet and mp4 files.

It does not use LeRobot's library, whose import takes about 10 s in every training run (it loads
transformers and torchvision). The format is simple: ``meta/info.json``; parquet tables of frames,
episodes and tasks; and video files in which the episodes of a camera follow one another.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.errors import MissingDependencyError, UserError, did_you_mean
from embodyrl.storage.paths import expand_home, files_of, is_hub_id, require_readable
from embodyrl.storage.plain_data import ANYTHING, COUNT, NUMBER, TEXT, inside, read_json

IMAGE_PREFIX = "observation.images."
INFO = {
    "codebase_version": TEXT,
    "fps?": NUMBER,
    "video_path?": (TEXT, None),
    "features": {...: {"dtype": TEXT, "shape": [COUNT], ...: ANYTHING}},
}
"""Structure of ``meta/info.json``, as far as it is read."""
ORIGIN = {
    "env?": TEXT,
    "split?": TEXT,
    "control_mode?": TEXT,
    "control_hz?": NUMBER,
    "tasks?": [TEXT],
    "spec?": {...: ANYTHING},
    "config?": {...: ANYTHING},
}
"""Structure of ``meta/embodyrl.json``."""
REMEDY = "Fetch or record the data set again."
NUMBERING = ("index", "episode_index", "task_index", "timestamp")
"""Columns that every data set has."""


@dataclass
class DatasetFiles:
    """A LeRobotDataset v3 on disk, opened for reading. Rows are frames in the order of ``index``.

    Attributes:
        path: its folder.
        info: ``meta/info.json``.
        origin: ``meta/embodyrl.json``; empty for a data set that embodyrl did not write.
        columns: name -> (F, ...) numpy array of the numeric columns that were loaded.
        episodes: the rows of the episode tables, as dicts, in order.
        tasks: task_index -> sentence.
        task_rows: the rows of the task table, as (task_index, sentence).
        files: the parquet files of the frames.
        source: (F,) which of ``files`` each frame stands in.
    """

    path: Path
    info: dict[str, Any]
    origin: dict[str, Any]
    columns: dict[str, np.ndarray]
    episodes: list[dict[str, Any]]
    tasks: dict[int, str]
    task_rows: list[tuple[int, str]]
    files: list[Path]
    source: np.ndarray

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """Column name -> dtype, shape and names."""
        return self.info["features"]

    @property
    def cameras(self) -> dict[str, tuple[int, int]]:
        """Keys of the colour images -> (height, width)."""
        found = {}
        for key, feature in self.features.items():
            notes = feature.get("info") or {}
            depth = notes.get("is_depth_map") or notes.get("video.is_depth_map")
            if feature["dtype"] in ("video", "image") and not depth:
                # The 3 of the colours may come first or last.
                shape = [s for s in feature["shape"] if s != 3] or list(feature["shape"])
                found[key] = (int(shape[0]), int(shape[1]))
        return found

    def need(self, key: str, valid: Iterable[str] | None = None) -> str:
        """Returns ``key`` if there is such a column.

        Raises:
            UserError: there is none; the message names the columns that there are.
        """
        valid = list(self.features if valid is None else valid)
        if key in valid:
            return key
        raise UserError(
            f"The data set {self.path} has no {key!r}. {did_you_mean(key, valid)} It holds: "
            f"{', '.join(sorted(valid))}."
        )


def open_dataset(
    path: str | Path,
    columns: Sequence[str] = (),
    *,
    revision: str | None = None,
    report: Callable[[str], None] | None = None,
) -> DatasetFiles:
    """Opens a data set: a folder, or an id on the hub, ``OWNER/NAME``, if no such folder exists.

    Where OWNER is a folder here, or ``data`` or ``runs``, it is no id (``storage.paths.is_hub_id``).

    Args:
        path: folder or hub id; only a hub id is ever looked up on the network.
        columns: columns to load, besides ``index``, ``episode_index``, ``task_index``,
            ``timestamp`` and, where there is one, ``frame_index``.
        revision: of a hub id.
        report: called with each fault of a column, which is then left out; None raises it.

    Raises:
        UserError: no data set there, another version of the format, or a column it lacks.
    """
    # Find the folder, on this machine or on the hub.
    folder = Path(expand_home(str(path)))
    if not folder.is_dir() and is_hub_id(str(path)):
        folder = _download(str(path), revision)
    info_path = folder / "meta" / "info.json"
    if not info_path.is_file():
        parts = folder.with_name(folder.name + ".parts")
        more = (
            f" {parts} holds an unfinished collection: repeat its command to continue it."
            if parts.exists()
            else ""
        )
        missing = "there is no meta/info.json" if folder.is_dir() else "there is no such folder"
        raise UserError(
            f"{folder} holds no LeRobot data set ({missing}).{more} `embodyrl collect ENV --out "
            f"{folder}` makes one."
        )
    # Only version 3 can be read.
    said = read_json(info_path, {"codebase_version": TEXT, ...: ANYTHING}, REMEDY)
    version = said["codebase_version"]
    if not version.startswith("v3"):
        raise UserError(
            f"{folder} is a LeRobotDataset {version}; embodyrl reads v3.0. Convert it: python -m "
            "lerobot.scripts.convert_dataset_v21_to_v30 --repo-id=USER/NAME (--root=FOLDER if it "
            "is local)."
        )
    info = read_json(info_path, INFO, REMEDY)
    origin_path = folder / "meta" / "embodyrl.json"
    data = DatasetFiles(
        path=folder,
        info=info,
        origin=read_json(origin_path, ORIGIN, REMEDY) if origin_path.is_file() else {},
        columns={},
        episodes=[],
        tasks={},
        task_rows=[],
        files=[],
        source=np.zeros(0, np.int64),
    )
    # Read the tables.
    wanted = [*NUMBERING, *({"frame_index"} & data.features.keys()), *map(data.need, columns)]
    _load_columns(data, list(dict.fromkeys(wanted)), report)
    data.episodes = _load_episodes(folder)
    data.task_rows = _load_tasks(folder)
    data.tasks = dict(data.task_rows)
    return data


def _parquet() -> Any:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingDependencyError(
            "Reading a LeRobot data set needs pyarrow, which is not installed here. Install it: "
            "pip install 'embodyrl[data]'."
        ) from error
    return pq


def _tables(folder: Path, what: str) -> list[Path]:
    files = files_of(folder / what, "*/*.parquet")
    if not files:
        raise UserError(f"The data set {folder} is incomplete: {what}/ holds no parquet file.")
    return files


def _read(file: Path, columns: list[str] | None = None) -> Any:
    """A parquet table, with those of ``columns`` that it has; an error message names the file."""
    import pyarrow as pa

    pq = _parquet()
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


def _load_columns(
    data: DatasetFiles, names: list[str], report: Callable[[str], None] | None
) -> None:
    """Fills ``columns``, ``files`` and ``source``."""
    data.files = _tables(data.path, "data")
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    lengths = []
    for file in data.files:
        table = _read(file, names)
        lengths.append(len(table))
        for name in names:
            fault = _column_fault(table, name, file.relative_to(data.path))
            if not fault:
                parts[name].append(_numpy(table.column(name).combine_chunks()))
            elif report is None or name in NUMBERING:
                raise UserError(f"The data set {data.path} is damaged. {fault}")
            else:
                report(fault)
    source = np.repeat(np.arange(len(lengths)), lengths)
    columns = {}
    for name, arrays in parts.items():
        if len(arrays) < len(lengths):
            continue  # reported
        if len(shapes := {values.shape[1:] for values in arrays}) > 1:
            fault = f"The column {name!r} has different shapes in its files: {sorted(shapes)}."
            if report is None:
                raise UserError(f"The data set {data.path} is damaged. {fault}")
            report(fault)
            continue
        columns[name] = np.concatenate(arrays)
    # The order of the files need not be that of the frames.
    order = np.argsort(columns["index"], kind="stable")
    data.columns = {name: values[order] for name, values in columns.items()}
    data.source = source[order]


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
    row = int(wrong[0])
    episode = table.column("episode_index")[row] if "episode_index" in table.column_names else "?"
    return (
        f"{name!r} {what} in row {row} of {file}, which is in episode {episode} ({len(wrong)} such "
        "rows). Record or fetch the data set again, or leave the episode out: lerobot-edit-dataset "
        "--help, delete_episodes."
    )


def _numpy(column: Any) -> np.ndarray:
    """A parquet column as an array; (nested) lists of equal length become further dimensions."""
    import pyarrow as pa

    if (
        pa.types.is_fixed_size_list(column.type)
        or pa.types.is_list(column.type)
        or pa.types.is_large_list(column.type)
    ):
        return _numpy(column.flatten()).reshape(len(column), -1)
    return column.to_numpy(zero_copy_only=False)


def episode_tables(folder: Path) -> Iterator[tuple[Path, Any]]:
    """The parquet tables of a data set's episodes, each with its file."""
    for file in _tables(folder, "meta/episodes"):
        yield file, _read(file)


def _load_episodes(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for _, table in episode_tables(folder):
        rows += _without_stats(table).to_pylist()
    return sorted(rows, key=lambda row: row["episode_index"])


def _without_stats(table: Any) -> Any:
    return table.select([name for name in table.column_names if not name.startswith("stats/")])


def _load_tasks(folder: Path) -> list[tuple[int, str]]:
    table = _read(folder / "meta" / "tasks.parquet").to_pydict()
    # LeRobot stores the sentences in a column, or as the index of a pandas table.
    texts = table.get("task") or table.get("__index_level_0__")
    return list(zip(table["task_index"], texts, strict=True))


def as_flags(values: np.ndarray, name: str) -> np.ndarray:
    """A column of flags (F,) bool, which other recorders may hold as numbers or as text.

    Raises:
        UserError: a text that is neither true nor false.
    """
    flat = values.reshape(len(values))
    if flat.dtype != object:
        return flat > 0
    meaning = {"true": True, "1": True, "false": False, "0": False, "": False}
    texts = [str(value).strip().lower() for value in flat]
    if wrong := [text for text in texts if text not in meaning]:
        raise UserError(f"The column {name!r} holds {wrong[0]!r}, which is neither true nor false.")
    return np.array([meaning[text] for text in texts], dtype=bool)


def file_of(data: DatasetFiles, template: str, **values: Any) -> Path:
    """A file of the data set, by a template of its ``meta/info.json``.

    Args:
        data: the data set.
        template: ``"data_path"`` or ``"video_path"``.
        values: of the template's fields.

    Raises:
        UserError: the template is no such path, or leads out of the data set.
    """
    text = data.info.get(template) or ""
    fields = "|".join(values)
    if not re.fullmatch(rf"(?:[\w./-]|\{{(?:{fields})(?::0?\dd)?\}})+", text):
        raise UserError(
            f"{data.path / 'meta' / 'info.json'} gives {text[:80]!r} as {template}, which is no "
            f"path with the fields {', '.join(values)}. {REMEDY}"
        )
    return inside(data.path, text.format(**values), links=True)


def _download(repo_id: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise MissingDependencyError(
            f"{repo_id} is no folder here, and looking it up on the Hugging Face hub needs "
            "huggingface_hub: pip install 'embodyrl[data]'."
        ) from error
    try:
        return Path(snapshot_download(repo_id, repo_type="dataset", revision=revision))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"{repo_id} is no folder here, and the Hugging Face hub does not have it either "
            f"({first}). Check the path, or the id and the connection."
        ) from error


def load_pictures(data: DatasetFiles, key: str, rows: np.ndarray) -> Iterator[bytes]:
    """The encoded pictures (PNG or JPEG) of a column of dtype ``image``.

    Args:
        data: the opened data set.
        key: of the column.
        rows: frame numbers, ascending.
    """
    pq = _parquet()
    wanted = set(rows.tolist())
    position = 0
    for file in _tables(data.path, "data"):
        for batch in pq.ParquetFile(file).iter_batches(batch_size=256, columns=[key]):
            for cell in batch.column(0):
                if position in wanted:
                    value = cell.as_py()
                    yield (
                        value["bytes"] or inside(data.path, value["path"], links=True).read_bytes()
                    )
                position += 1


def picture_array(encoded: bytes) -> np.ndarray:
    """Decodes a picture to (h, w, 3) uint8."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))
