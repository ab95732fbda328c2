"""LeRobotDataset v3: written with LeRobot's own library, read straight from its parquet and mp4 files.

Reading does without the library because importing it takes some 10 s (it loads transformers and torchvision), which
every training run would pay; the format is plain enough: ``meta/info.json``, parquet tables of frames, episodes and
tasks, and video files in which the episodes of a camera follow one another.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.data.recording import Recording
from embodyrl.errors import MissingDependencyError, UserError, did_you_mean
from embodyrl.types import EnvSpec

IMAGE_PREFIX = "observation.images."
SMALL = 256  # pixels; below it a picture is stored without chroma subsampling


class DatasetWriter:
    """Writes recordings into a new data set; use as a context manager.

    Everything goes into ``PATH.partial``, which becomes ``PATH`` when the block ends, also by Ctrl-C (with the
    episodes saved so far), so that a data set that exists is complete.

    Args:
        path: folder of the data set.
        spec: of the env that the recordings come from.
        split: the env's split, for the record.
        overwrite: replace a data set that is there.

    Raises:
        UserError: ``path`` exists.
        MissingDependencyError: LeRobot is not installed.
    """

    def __init__(self, path: str | Path, spec: EnvSpec, *, split: str = "train", overwrite: bool = False) -> None:
        self.path, self.spec, self.split = Path(path), spec, split
        self.partial = self.path.with_name(self.path.name + ".partial")
        require_free(path, overwrite)
        self.count = 0
        lerobot = _import_lerobot()
        shutil.rmtree(self.partial, ignore_errors=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        small = all(max(size) < SMALL for size in spec.cameras.values())
        encoder: dict[str, Any] = {}
        if spec.cameras and small:
            # Halving the colour resolution, as video players want, ruins a 64-pixel picture (33 dB against 43 dB).
            encoder["rgb_encoder"] = lerobot.RGBEncoderConfig(vcodec="h264", pix_fmt="yuv444p", crf=12, g=2)
        self._dataset = lerobot.LeRobotDataset.create(
            repo_id=f"local/{self.path.name}",
            fps=max(1, round(spec.control_hz)),
            features=_features(spec),
            root=self.partial,
            robot_type=spec.name,
            use_videos=True,
            video_backend="pyav",  # torchcodec, LeRobot's first choice, wants a system FFmpeg
            # Joining an episode to a file copies the file: small files keep long recordings linear.
            video_files_size_in_mb=16,
            metadata_buffer_size=100,
            **encoder,
        )

    def __enter__(self) -> DatasetWriter:
        return self

    def add(self, recording: Recording) -> None:
        """Appends one episode.

        Raises:
            UserError: the recording does not fit ``spec``.
        """
        if len(recording) == 0:
            raise UserError("A recording without a single step cannot be saved.")
        if set(recording.images) != set(self.spec.cameras):
            raise UserError(f"The recording has cameras {sorted(recording.images)}, not {sorted(self.spec.cameras)}.")
        last = len(recording) - 1
        with _quiet():
            for t in range(len(recording)):
                frame: dict[str, Any] = {IMAGE_PREFIX + name: frames[t] for name, frames in recording.images.items()}
                frame |= {
                    "observation.state": recording.proprio[t].astype(np.float32),
                    "action": recording.actions[t].astype(np.float32),
                    "next.reward": np.asarray([recording.reward[t]], dtype=np.float32),
                    "next.done": np.asarray([t == last]),
                    "next.success": np.asarray([t == last and recording.success]),
                    "success": np.asarray([recording.success]),
                    "init": np.asarray([recording.init], dtype=np.int64),
                    "noise": np.asarray([recording.noise], dtype=np.float32),
                    "task": recording.instruction,
                }
                self._dataset.add_frame(frame)
            # In parallel it would fork this process, which may hold the simulator's threads.
            self._dataset.save_episode(parallel_encoding=False)
        self.count += 1

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        with _quiet():
            self._dataset.finalize()
        if self.count == 0 or (kind is not None and not issubclass(kind, KeyboardInterrupt)):
            shutil.rmtree(self.partial, ignore_errors=True)
            return
        origin = {
            "env": self.spec.name,
            "split": self.split,
            "control_mode": self.spec.control_mode,
            "control_hz": self.spec.control_hz,
            "tasks": list(self.spec.tasks),
        }
        (self.partial / "meta" / "embodyrl.json").write_text(json.dumps(origin, indent=2))
        shutil.rmtree(self.partial / "images", ignore_errors=True)
        if self.path.exists():
            shutil.rmtree(self.path)
        os.replace(self.partial, self.path)


def require_free(path: str | Path, overwrite: bool = False) -> None:
    """Raises a ``UserError`` where something is at ``path`` that may not be replaced."""
    if Path(path).exists() and not overwrite:
        raise UserError(f"{path} exists already. Choose another folder, or delete that one.")


def write_dataset(
    path: str | Path,
    recordings: Iterable[Recording],
    spec: EnvSpec,
    *,
    split: str = "train",
    overwrite: bool = False,
) -> Path:
    """Writes all ``recordings`` (see ``DatasetWriter``) and returns the folder."""
    with DatasetWriter(path, spec, split=split, overwrite=overwrite) as writer:
        for recording in recordings:
            writer.add(recording)
    return Path(path)


def _features(spec: EnvSpec) -> dict[str, dict[str, Any]]:
    names = ["height", "width", "channels"]
    features: dict[str, dict[str, Any]] = {
        IMAGE_PREFIX + camera: {"dtype": "video", "shape": (*size, 3), "names": names}
        for camera, size in spec.cameras.items()
    }
    features["observation.state"] = {"dtype": "float32", "shape": (spec.proprio_dim,), "names": None}
    features["action"] = {"dtype": "float32", "shape": (spec.action_dim,), "names": None}
    single = {
        "next.reward": "float32",
        "next.done": "bool",
        "next.success": "bool",
        "success": "bool",
        "init": "int64",
        "noise": "float32",
    }
    return features | {name: {"dtype": dtype, "shape": (1,), "names": None} for name, dtype in single.items()}


@dataclass
class _LeRobot:
    LeRobotDataset: Any
    RGBEncoderConfig: Any


def _import_lerobot() -> _LeRobot:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # creating a local data set never asks the hub
    os.environ.setdefault("SVT_LOG", "1")
    try:
        import datasets
        from lerobot.configs import RGBEncoderConfig
        from lerobot.datasets.lerobot_dataset import LeRobotDataset
    except ImportError as error:
        raise MissingDependencyError(
            f"Writing a data set needs LeRobot, which is not installed here ({error}). Install it: "
            "pip install 'embodyrl[data]'."
        ) from error
    datasets.disable_progress_bars()
    return _LeRobot(LeRobotDataset, RGBEncoderConfig)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """FFmpeg writes some lines for every episode; errors are raised anyway."""
    import av.logging

    # LeRobot restores FFmpeg's own printing after each video; this level holds for that one as well.
    av.logging.set_libav_level(av.logging.PANIC)
    try:
        yield
    finally:
        av.logging.set_libav_level(av.logging.ERROR)


@dataclass
class DatasetFiles:
    """A LeRobotDataset v3 on disk, opened for reading; row numbers count frames in the order of ``index``.

    Attributes:
        path: its folder.
        info: ``meta/info.json``.
        origin: ``meta/embodyrl.json``, empty for a data set that embodyrl did not write.
        columns: name -> (F, ...) numpy array of the numeric columns asked for.
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
            if feature["dtype"] in ("video", "image") and not (feature.get("info") or {}).get("is_depth_map"):
                shape = [s for s in feature["shape"] if s != 3] or list(feature["shape"])
                found[key] = (int(shape[0]), int(shape[1]))
        return found

    def need(self, key: str, valid: Iterable[str] | None = None) -> str:
        """``key`` itself.

        Raises:
            UserError: there is no such column; the message names those that there are.
        """
        valid = list(self.features if valid is None else valid)
        if key in valid:
            return key
        raise UserError(
            f"The data set {self.path} has no {key!r}. {did_you_mean(key, valid)} It holds: {', '.join(sorted(valid))}."
        )


def open_dataset(path: str | Path, columns: Sequence[str] = (), *, revision: str | None = None) -> DatasetFiles:
    """Opens a data set: a folder, or a hub id ``user/name`` where no such folder exists.

    Args:
        path: folder or hub id; only a hub id is ever looked up on the network.
        columns: numeric columns to load, besides ``episode_index``, ``task_index`` and ``timestamp``.
        revision: of a hub id.

    Raises:
        UserError: no data set there, another version of the format, or a column it lacks.
    """
    folder = Path(path)
    if not folder.is_dir() and _looks_like_hub_id(str(path)):
        folder = _download(str(path), revision)
    info_path = folder / "meta" / "info.json"
    if not info_path.is_file():
        partial = folder.with_name(folder.name + ".partial")
        more = f" {partial} is what an unfinished recording left." if partial.exists() else ""
        raise UserError(
            f"{folder} holds no LeRobot data set (there is no meta/info.json).{more} `embodyrl collect` makes one."
        )
    info = json.loads(info_path.read_text())
    version = str(info.get("codebase_version"))
    if not version.startswith("v3"):
        raise UserError(
            f"{folder} is a LeRobotDataset {version}; embodyrl reads v3.0. Convert it: "
            "python -m lerobot.scripts.convert_dataset_v21_to_v30 --repo-id=USER/NAME (--root=FOLDER if it is local)."
        )
    origin_path = folder / "meta" / "embodyrl.json"
    data = DatasetFiles(
        path=folder,
        info=info,
        origin=json.loads(origin_path.read_text()) if origin_path.is_file() else {},
        columns={},
        episodes=[],
        tasks={},
    )
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


def _load_columns(folder: Path, names: list[str]) -> dict[str, np.ndarray]:
    pq = _parquet()
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for file in _tables(folder, "data"):
        table = pq.read_table(file, columns=names)
        for name in names:
            parts[name].append(_numpy(table.column(name).combine_chunks()))
    columns = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    order = np.argsort(columns["index"], kind="stable")
    return {name: values[order] for name, values in columns.items()}


def _numpy(column: Any) -> np.ndarray:
    """A parquet column as an array; (nested) lists of equal length become further dimensions."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(column.type) or pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return _numpy(column.flatten()).reshape(len(column), -1)
    return column.to_numpy(zero_copy_only=False)


def _load_episodes(folder: Path) -> list[dict[str, Any]]:
    pq = _parquet()
    rows: list[dict[str, Any]] = []
    for file in _tables(folder, "meta/episodes"):
        names = [n for n in pq.read_schema(file).names if not n.startswith("stats/")]
        rows += pq.read_table(file, columns=names).to_pylist()
    return sorted(rows, key=lambda row: row["episode_index"])


def _load_tasks(folder: Path) -> dict[int, str]:
    table = _parquet().read_table(folder / "meta" / "tasks.parquet").to_pydict()
    texts = table.get("task") or table.get("__index_level_0__")
    return dict(zip(table["task_index"], texts, strict=True))


def _looks_like_hub_id(text: str) -> bool:
    return text.count("/") == 1 and not text.startswith((".", "/", "~")) and "\\" not in text


def _download(repo_id: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise MissingDependencyError(
            f"{repo_id} is no folder here, and looking it up on the Hugging Face hub needs huggingface_hub: "
            "pip install 'embodyrl[data]'."
        ) from error
    try:
        return Path(snapshot_download(repo_id, repo_type="dataset", revision=revision))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"{repo_id} is no folder here, and the Hugging Face hub did not give it either ({first}). "
            "Check the path, or the id and the connection."
        ) from error


def load_pictures(data: DatasetFiles, key: str, rows: np.ndarray) -> Iterator[bytes]:
    """The encoded pictures (PNG or JPEG) of a column of dtype ``image``, of the frames ``rows`` (ascending)."""
    pq = _parquet()
    wanted, position = set(rows.tolist()), 0
    for file in _tables(data.path, "data"):
        for batch in pq.ParquetFile(file).iter_batches(batch_size=256, columns=[key]):
            for cell in batch.column(0):
                if position in wanted:
                    value = cell.as_py()
                    yield value["bytes"] or (data.path / value["path"]).read_bytes()
                position += 1


def picture_array(encoded: bytes) -> np.ndarray:
    """(h, w, 3) uint8 of an encoded picture."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))
