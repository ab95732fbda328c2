"""Reads a LeRobotDataset v3 directly from its parquet and mp4 files.

It does not use LeRobot's library, whose import takes about 10 s in every training run (it loads
transformers and torchvision). The format is simple: ``meta/info.json``; parquet tables of frames,
episodes and tasks; and video files in which the episodes of a camera follow one another.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.errors import MissingDependencyError, UserError, did_you_mean
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
    """

    path: Path
    info: dict[str, Any]
    origin: dict[str, Any]
    columns: dict[str, np.ndarray]
    episodes: list[dict[str, Any]]
    tasks: dict[int, str]

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """Column name -> dtype, shape and names."""
        return self.info["features"]

    @property
    def cameras(self) -> dict[str, tuple[int, int]]:
        """Keys of the colour images -> (height, width)."""
        found = {}
        for key, feature in self.features.items():
            if feature["dtype"] in ("video", "image") and not (feature.get("info") or {}).get(
                "is_depth_map"
            ):
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
    path: str | Path, columns: Sequence[str] = (), *, revision: str | None = None
) -> DatasetFiles:
    """Opens a data set: a folder, or a hub id ``user/name`` if no such folder exists.

    Args:
        path: folder or hub id; only a hub id is ever looked up on the network.
        columns: numeric columns to load, besides ``episode_index``, ``task_index`` and
            ``timestamp``.
        revision: of a hub id.

    Raises:
        UserError: no data set there, another version of the format, or a column it lacks.
    """
    # Find the folder, on this machine or on the hub.
    folder = Path(path)
    if not folder.is_dir() and _looks_like_hub_id(str(path)):
        folder = _download(str(path), revision)
    info_path = folder / "meta" / "info.json"
    if not info_path.is_file():
        parts = folder.with_name(folder.name + ".parts")
        more = (
            f" {parts} holds an unfinished collection: repeat its command to continue it."
            if parts.exists()
            else ""
        )
        raise UserError(
            f"{folder} holds no LeRobot data set (there is no meta/info.json).{more} `embodyrl "
            "collect` makes one."
        )
    # Only version 3 can be read.
    info = read_json(info_path, INFO, REMEDY)
    version = str(info.get("codebase_version"))
    if not version.startswith("v3"):
        raise UserError(
            f"{folder} is a LeRobotDataset {version}; embodyrl reads v3.0. Convert it: python -m "
            "lerobot.scripts.convert_dataset_v21_to_v30 --repo-id=USER/NAME (--root=FOLDER if it "
            "is local)."
        )
    origin_path = folder / "meta" / "embodyrl.json"
    data = DatasetFiles(
        path=folder,
        info=info,
        origin=read_json(origin_path, ORIGIN, REMEDY) if origin_path.is_file() else {},
        columns={},
        episodes=[],
        tasks={},
    )
    # Read the tables.
    wanted = ["index", "episode_index", "task_index", "timestamp", *(data.need(c) for c in columns)]
    data.columns = _load_columns(folder, list(dict.fromkeys(wanted)))
    data.episodes = _load_episodes(folder)
    data.tasks = _load_tasks(folder)
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
    files = sorted((folder / what).glob("*/*.parquet"))
    if not files:
        raise UserError(f"The data set {folder} is incomplete: {what}/ holds no parquet file.")
    return files


def _read(file: Path, columns: list[str] | None = None) -> Any:
    """A parquet table; an error message names the file."""
    import pyarrow as pa

    pq = _parquet()
    try:
        return pq.read_table(file, columns=columns)
    except (OSError, pa.ArrowException) as error:
        text = " ".join(str(error).split())
        raise UserError(
            f"{file} cannot be read ({text[:200]}); fetch or record the data set again."
        ) from error


def _load_columns(folder: Path, names: list[str]) -> dict[str, np.ndarray]:
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for file in _tables(folder, "data"):
        table = _read(file, names)
        for name in names:
            parts[name].append(_numpy(table.column(name).combine_chunks()))
    # The order of the files need not be that of the frames.
    columns = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    order = np.argsort(columns["index"], kind="stable")
    return {name: values[order] for name, values in columns.items()}


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


def _load_episodes(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for file in _tables(folder, "meta/episodes"):
        rows += _without_stats(_read(file)).to_pylist()
    return sorted(rows, key=lambda row: row["episode_index"])


def _without_stats(table: Any) -> Any:
    return table.select([name for name in table.column_names if not name.startswith("stats/")])


def _load_tasks(folder: Path) -> dict[int, str]:
    table = _read(folder / "meta" / "tasks.parquet").to_pydict()
    # LeRobot stores the sentences in a column, or as the index of a pandas table.
    texts = table.get("task") or table.get("__index_level_0__")
    return dict(zip(table["task_index"], texts, strict=True))


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


def _looks_like_hub_id(text: str) -> bool:
    return text.count("/") == 1 and not text.startswith((".", "/", "~")) and "\\" not in text


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
