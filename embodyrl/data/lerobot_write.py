"""Writes a LeRobotDataset v3 with LeRobot's own library."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.data.lerobot_read import IMAGE_PREFIX
from embodyrl.data.recording import Recording
from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.storage.atomic_files import rename_folder, write_json
from embodyrl.storage.env_spec import spec_to_json
from embodyrl.storage.paths import explain_os_error, no_access, require_writable
from embodyrl.types import EnvSpec

_INTERVENTION = {
    name: {"dtype": "bool", "shape": (1,), "names": None} for name in ("intervention", "recovery")
}
LEAST = 8
"""Pixels of the shortest edge of a picture that becomes a video."""
SMALL = 256
"""Pixels of an edge below which a picture is stored without chroma subsampling."""


NO_LEROBOT = (
    "Writing a data set needs LeRobot, which is not installed here. Install it: pip install "
    "'embodyrl[data]'."
)


class DatasetWriter:
    """Writes recordings into a new data set; use as a context manager.

    Everything goes into ``PATH.partial``, which is renamed to ``PATH`` when the block ends without
    an exception. So a data set that exists is complete. Until then ``partial.EpisodeParts`` keeps
    the episodes, so that an interruption does not lose them.

    Args:
        path: folder of the data set.
        spec: of the env that the recordings come from.
        split: the env's split, which is noted in the data set.
        config: the env's config as plain data, which is noted too: a world model evaluates
            policies in this env.
        human: whether frames say if a person had taken over (``intervention``), and if the arm
            then went back (``recovery``).
        depth: cameras whose depth is kept, too, as ``observation.images.NAME_depth``: LeRobot's
            depth videos, from 1 cm to 10 m in 12 bits.

    Raises:
        UserError: ``path`` exists.
        MissingDependencyError: LeRobot is not installed.
    """

    def __init__(
        self,
        path: str | Path,
        spec: EnvSpec,
        *,
        split: str = "train",
        config: dict[str, Any] | None = None,
        human: bool = False,
        depth: Sequence[str] = (),
    ) -> None:
        self.path = Path(path)
        self.spec = spec
        self.split = split
        self.config = config or {}
        self.depth = tuple(depth)
        self.partial = self.path.with_name(self.path.name + ".partial")
        require_recordable(path, spec)
        self.count = 0
        lerobot = _import_lerobot()
        shutil.rmtree(self.partial, ignore_errors=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        sizes = spec.cameras.values()
        small = all(max(size) < SMALL for size in sizes)
        # Subsampled colours need edges of an even number of pixels.
        even = all(edge % 2 == 0 for size in sizes for edge in size)
        # Chroma subsampling, which most video players need, ruins a 64-pixel picture (33 dB instead
        # of 43 dB). LeRobot's default codec, SVT-AV1, is not used: run as root it gives the
        # process, and all that it starts later, the highest real-time priority. An env's workers
        # would then block their cores for everything else.
        pix_fmt = "yuv420p" if even and not small else "yuv444p"
        colour = {"pix_fmt": pix_fmt, "crf": 12 if small else 20}
        self._dataset = lerobot.LeRobotDataset.create(
            repo_id=f"local/{self.path.name}",
            fps=max(1, round(spec.control_hz)),
            features=_features(spec, self.depth) | (_INTERVENTION if human else {}),
            root=self.partial,
            robot_type=spec.name,
            use_videos=True,
            video_backend="pyav",  # torchcodec, LeRobot's default, needs a system FFmpeg
            # Appending an episode copies the video file: small files keep long recordings fast.
            video_files_size_in_mb=16,
            metadata_buffer_size=100,
            rgb_encoder=lerobot.RGBEncoderConfig(
                # With B-frames (none fits between two key frames) x264 would still start decoding
                # times a frame early, but not in a video of one frame: the episode after it
                # could not be appended.
                vcodec="h264",
                g=2,
                extra_options={"bf": 0},
                **colour,
            ),
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
            raise UserError(
                f"The recording has cameras {sorted(recording.images)}, not "
                f"{sorted(self.spec.cameras)}."
            )
        if set(recording.depth) != set(self.depth):
            raise UserError(
                f"The recording has depth of the cameras {sorted(recording.depth)}, not "
                f"{sorted(self.depth)}: episodes with and without it make no one data set."
            )
        if recording.privileged is None and self.spec.privileged_dim:
            raise UserError(
                f"The recording lacks the simulator's state, which {self.spec.name} gives: record "
                "it again."
            )
        # A row per control step; what holds for the episode is repeated in every row.
        last = len(recording) - 1
        with _writing(self.path):
            for t in range(len(recording)):
                frame: dict[str, Any] = {
                    IMAGE_PREFIX + name: frames[t] for name, frames in recording.images.items()
                }
                frame |= {
                    f"{IMAGE_PREFIX}{name}_depth": maps[t][..., None]
                    for name, maps in recording.depth.items()
                }
                frame |= {
                    "observation.state": recording.proprio[t].astype(np.float32),
                    "action": recording.actions[t].astype(np.float32),
                    "next.reward": np.asarray([recording.reward[t]], dtype=np.float32),
                    "next.done": np.asarray([t == last]),
                    "next.success": np.asarray([bool(recording.solved[t])]),
                    "success": np.asarray([recording.success]),
                    "init": np.asarray([recording.init], dtype=np.int64),
                    "noise": np.asarray([recording.noise], dtype=np.float32),
                    "task": recording.instruction,
                }
                if recording.privileged is not None:
                    frame["privileged"] = recording.privileged[t].astype(np.float32)
                if recording.human is not None:
                    back = recording.recovery is not None and bool(recording.recovery[t])
                    frame["intervention"] = np.asarray([bool(recording.human[t])])
                    frame["recovery"] = np.asarray([back])
                self._dataset.add_frame(frame)
            # Parallel encoding would fork this process, which may hold the simulator's threads.
            self._dataset.save_episode(parallel_encoding=False)
        self.count += 1

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        # An empty or failed data set is thrown away.
        failed = self.count == 0 or kind is not None
        try:
            with _writing(self.path):
                self._dataset.finalize()
        except Exception:
            shutil.rmtree(self.partial, ignore_errors=True)
            if not failed:
                raise
        if failed:
            shutil.rmtree(self.partial, ignore_errors=True)
            return
        # Note where the data come from, and give the finished folder its name.
        origin = {
            "env": self.spec.name,
            "split": self.split,
            "control_mode": self.spec.control_mode,
            "control_hz": self.spec.control_hz,
            "tasks": list(self.spec.tasks),
            "spec": spec_to_json(self.spec),
            "config": self.config,
        }
        write_json(self.partial / "meta" / "embodyrl.json", origin, indent=2)
        shutil.rmtree(self.partial / "images", ignore_errors=True)
        rename_folder(self.partial, self.path)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """LeRobot writes in this block; what it only logs, or says without a path, is raised in words.

    Raises:
        FileAccessError: the disk is full, or may not be written.
    """
    lost: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lost.append  # type: ignore[method-assign]
    log = logging.getLogger("lerobot.datasets.image_writer")
    before = log.propagate
    log.addHandler(handler)
    log.propagate = False
    try:
        with _quiet():
            yield
    except Exception as error:
        if not lost and isinstance(error, OSError) and explain_os_error(error, path):
            raise no_access(error, path) from error
        if not lost:
            raise
    finally:
        log.removeHandler(handler)
        log.propagate = before
    if lost:  # it goes on without a picture that it could not write
        reason = next((a for a in lost[0].args or () if isinstance(a, OSError)), None)
        if reason is not None:
            raise no_access(reason, path)
        raise UserError(f"{path} could not be written: {lost[0].getMessage()[:300]}.")


def require_free(path: str | Path) -> None:
    """Raises a ``UserError`` if something is at ``path`` already, or it could not be written."""
    if Path(path).exists():
        raise UserError(f"{path} exists already. Choose another folder.")
    require_writable(path, "--out FOLDER")


def require_recordable(path: str | Path, spec: EnvSpec) -> None:
    """Refuses what a ``DatasetWriter`` would refuse; cheap, to be asked before anything is recorded.

    Raises:
        UserError: ``path`` exists, or a camera's pictures are too small for a video.
        MissingDependencyError: LeRobot is not installed.
    """
    require_free(path)
    if spec.cameras and (least := min(min(size) for size in spec.cameras.values())) < LEAST:
        raise UserError(
            f"A camera of {spec.name} has {least} pixels along an edge; a video needs at least "
            f"{LEAST}. Choose larger pictures."
        )
    if importlib.util.find_spec("lerobot") is None:
        raise MissingDependencyError(NO_LEROBOT)


def write_dataset(
    path: str | Path, recordings: Iterable[Recording], spec: EnvSpec, *, split: str = "train"
) -> Path:
    """Writes all ``recordings`` (see ``DatasetWriter``) and returns the folder."""
    with DatasetWriter(path, spec, split=split) as writer:
        for recording in recordings:
            writer.add(recording)
    return Path(path)


def _features(spec: EnvSpec, depth: Sequence[str]) -> dict[str, dict[str, Any]]:
    names = ["height", "width", "channels"]
    features: dict[str, dict[str, Any]] = {
        IMAGE_PREFIX + camera: {"dtype": "video", "shape": (*size, 3), "names": names}
        for camera, size in spec.cameras.items()
    }
    features |= {
        f"{IMAGE_PREFIX}{camera}_depth": {
            "dtype": "video",
            "shape": (*spec.cameras[camera], 1),
            "names": names,
            "info": {"is_depth_map": True},
        }
        for camera in depth
    }
    features["observation.state"] = {
        "dtype": "float32",
        "shape": (spec.proprio_dim,),
        "names": None,
    }
    features["action"] = {"dtype": "float32", "shape": (spec.action_dim,), "names": None}
    # Its name does not begin with "observation.": LeRobot's policies would use it as an input.
    if spec.privileged_dim:
        features["privileged"] = {
            "dtype": "float32",
            "shape": (spec.privileged_dim,),
            "names": None,
        }
    single = {
        "next.reward": "float32",
        "next.done": "bool",
        "next.success": "bool",
        "success": "bool",
        "init": "int64",
        "noise": "float32",
    }
    return features | {
        name: {"dtype": dtype, "shape": (1,), "names": None} for name, dtype in single.items()
    }


@dataclass
class _LeRobot:
    LeRobotDataset: Any
    RGBEncoderConfig: Any


def _import_lerobot() -> _LeRobot:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # creating a local data set never asks the hub
    try:
        import datasets
        from lerobot.configs import RGBEncoderConfig
        from lerobot.datasets.lerobot_dataset import LeRobotDataset
    except ImportError as error:
        raise MissingDependencyError(f"{NO_LEROBOT} It says: {error}.") from error
    datasets.disable_progress_bars()
    return _LeRobot(LeRobotDataset, RGBEncoderConfig)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences FFmpeg, which prints some lines for every episode; errors are raised anyway."""
    import av.logging

    # LeRobot restores FFmpeg's own logging after each video; this level also holds for that.
    av.logging.set_libav_level(av.logging.PANIC)
    try:
        yield
    finally:
        av.logging.set_libav_level(av.logging.ERROR)
