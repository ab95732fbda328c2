"""Reads a LeRobotDataset v3 directly from its parquet and mp4 files.

It does not use LeRobot's library, whose import takes about 10 s in every training run (it loads
transformers and torchvision). The format is simple: ``meta/info.json``; parquet tables of frames,
episodes and tasks; and video files in which the episodes of a camera follow one another.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.data import lerobot_v2
from embodyrl.data.lerobot_tables import (
    NUMBERING,
    REMEDY,
    load_columns,
    parquet,
    parquet_files,
    read_table,
)
from embodyrl.errors import MissingDependencyError, UserError, did_you_mean
from embodyrl.storage.paths import expand_home, is_hub_id
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
    "synthetic?": {...: ANYTHING},
}
"""Structure of ``meta/embodyrl.json``."""
PICTURES = ("video", "image")
"""Values of a feature's dtype that are pictures."""


@dataclass
class DatasetFiles:
    """A LeRobotDataset on disk, opened for reading. Rows are frames in the order of ``index``.

    One of v2.0 or v2.1 is described as one of v3 (``lerobot_v2``).

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
        position: (F,) place of each frame among the rows of all files, one file after the other.
        skip: episodes that are not used, so that nothing is said about what is wrong with them.
        corrections: sentences on what was put right.
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
    position: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    skip: frozenset[int] = frozenset()
    corrections: list[str] = field(default_factory=list)

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """Column name -> dtype, shape and names."""
        return self.info["features"]

    @property
    def cameras(self) -> dict[str, tuple[int, int]]:
        """Keys of the colour images -> (height, width)."""
        found = {}
        for key, feature in self.features.items():
            if feature["dtype"] in PICTURES and key not in self.no_colours:
                # The 3 of the colours may come first or last.
                shape = [s for s in feature["shape"] if s != 3] or list(feature["shape"])
                found[key] = (int(shape[0]), int(shape[1]))
        return found

    @property
    def no_colours(self) -> dict[str, str]:
        """Keys of pictures that nothing here reads -> what they are."""
        found = {}
        for key, feature in self.features.items():
            notes = {**(feature.get("video_info") or {}), **(feature.get("info") or {})}
            if feature["dtype"] not in PICTURES:
                continue
            if notes.get("is_depth_map") or notes.get("video.is_depth_map"):
                found[key] = "marked as depth"
            elif len(feature["shape"]) != 3 or 3 not in feature["shape"]:
                found[key] = f"of the shape {tuple(feature['shape'])}, without the 3 of colours"
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
    skip: Iterable[int] = (),
) -> DatasetFiles:
    """Opens a data set: a folder, or an id on the hub, ``OWNER/NAME``, if no such folder exists.

    Where OWNER is a folder here, or ``data`` or ``runs``, it is no id (``storage.paths.is_hub_id``).

    Args:
        path: folder or hub id; only a hub id is ever looked up on the network.
        columns: columns to load, besides ``index``, ``episode_index``, ``task_index``,
            ``timestamp`` and, where there is one, ``frame_index``.
        revision: of a hub id.
        report: called with each fault of a column, which is then left out; None raises it.
        skip: episodes that will not be used, whatever is wrong with them.

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
    # Versions 2 and 3 can be read.
    said = read_json(info_path, {"codebase_version": TEXT, ...: ANYTHING}, REMEDY)
    version = said["codebase_version"]
    if not version.startswith(("v2", "v3")):
        raise UserError(
            f"{folder} is a LeRobotDataset {version}; embodyrl reads v2.0, v2.1 and v3.0. Convert "
            "it with the LeRobot that wrote it."
        )
    info = read_json(info_path, INFO, REMEDY)
    old = version.startswith("v2")
    if old:
        info = lerobot_v2.new_info(info)
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
        skip=frozenset(skip),
    )
    # Read the tables.
    numbering = [name for name in NUMBERING if name in data.features or name != "frame_index"]
    wanted = [*numbering, *map(data.need, columns)]
    found = load_columns(folder, list(dict.fromkeys(wanted)), data.skip, report)
    data.columns, data.files = found.values, found.files
    data.source, data.position = found.source, found.position
    data.episodes = lerobot_v2.episodes(folder, info) if old else _load_episodes(folder)
    data.task_rows = lerobot_v2.tasks(folder) if old else _load_tasks(folder)
    data.tasks = dict(data.task_rows)
    if unknown := data.skip - {row["episode_index"] for row in data.episodes}:
        raise UserError(
            f"Episode {min(unknown)} shall be left out (data.skip), but {folder} has no such "
            f"episode. It has {len(data.episodes)}."
        )
    _number_anew(data)
    return data


def _number_anew(data: DatasetFiles) -> None:
    """Orders the frames by episode and frame, if ``index`` is wrong but these two are right.

    Merged data sets count ``index`` anew in each episode, and parts of data sets keep the numbers
    that they had in the whole.
    """
    columns = data.columns
    count = len(columns["index"])
    # Frames that are missing are no matter of numbering.
    if count != data.info.get("total_frames") or "frame_index" not in columns:
        return
    if (columns["index"] == np.arange(count)).all():
        return
    episode = columns["episode_index"].reshape(-1)
    frame = columns["frame_index"].reshape(-1)
    # Each episode must have its frames 0, 1, 2 and so on.
    order = np.lexsort((frame, episode))
    lengths = np.unique(episode, return_counts=True)[1]
    if (frame[order] != np.concatenate([np.arange(n) for n in lengths])).any():
        return  # frames are missing, or there twice
    # Put the frames in this order, and count them anew.
    data.columns = {name: values[order] for name, values in columns.items()}
    data.source = data.source[order]
    data.position = data.position[order]
    data.columns["index"] = np.arange(count)
    # The episode table says where an episode begins and ends.
    ends = np.cumsum(lengths)
    places = dict(
        zip(np.unique(episode).tolist(), zip(ends - lengths, ends, strict=True), strict=True)
    )
    for row in data.episodes:
        if row["episode_index"] in places:
            row["dataset_from_index"], row["dataset_to_index"] = places[row["episode_index"]]
    data.corrections.append(
        f"The column 'index' of {data.path} does not count all frames: they are taken in the order "
        "of 'episode_index' and 'frame_index'."
    )


def episode_tables(folder: Path) -> Iterator[tuple[Path, Any]]:
    """The parquet tables of a data set's episodes, each with its file; v2 has none."""
    if lerobot_v2.is_old(folder):
        return
    for file in parquet_files(folder, "meta/episodes"):
        yield file, read_table(file)


def _load_episodes(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for _, table in episode_tables(folder):
        rows += _without_stats(table).to_pylist()
    return sorted(rows, key=lambda row: row["episode_index"])


def _without_stats(table: Any) -> Any:
    return table.select([name for name in table.column_names if not name.startswith("stats/")])


def _load_tasks(folder: Path) -> list[tuple[int, str]]:
    table = read_table(folder / "meta" / "tasks.parquet").to_pydict()
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


def load_pictures(data: DatasetFiles, key: str, rows: np.ndarray) -> Iterator[tuple[int, bytes]]:
    """The encoded pictures (PNG or JPEG) of a column of dtype ``image``.

    Args:
        data: the opened data set.
        key: of the column.
        rows: frame numbers.

    Yields:
        (k, picture of the frame ``rows[k]``), in the order of the files.
    """
    pq = parquet()
    wanted = {int(data.position[row]): k for k, row in enumerate(rows)}
    position = 0
    for file in data.files:
        for batch in pq.ParquetFile(file).iter_batches(batch_size=256, columns=[key]):
            for cell in batch.column(0):
                if position in wanted:
                    value = cell.as_py()
                    path = value["path"]
                    picture = value["bytes"] or inside(data.path, path, links=True).read_bytes()
                    yield wanted[position], picture
                position += 1


def picture_array(encoded: bytes) -> np.ndarray:
    """Decodes a picture to (h, w, 3) uint8."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))
