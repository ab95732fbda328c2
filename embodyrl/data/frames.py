"""Decodes the frames of a data set's camera once, into memory or a memory-mapped file."""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import platformdirs

from embodyrl.data.lerobot_read import DatasetFiles, file_of, load_pictures, picture_array
from embodyrl.errors import UserError
from embodyrl.functional.pictures import fit, turn
from embodyrl.storage.atomic_files import replacing
from embodyrl.storage.paths import require_readable
from embodyrl.storage.translation import Translation

MEMORY_LIMIT = 4 * 2**30
"""Bytes per camera above which frames are kept in a memory-mapped file."""


def decode_camera(
    data: DatasetFiles,
    key: str,
    rows: np.ndarray,
    size: tuple[int, int] | None = None,
    *,
    change: Translation | None = None,
    memory_limit: int = MEMORY_LIMIT,
) -> np.ndarray:
    """The frames of a camera, decoded in order.

    Args:
        data: the opened data set.
        key: of a ``video`` or ``image`` feature.
        rows: frame numbers, ascending; one may occur several times.
        size: (height, width) to change the pictures to; None keeps the stored one.
        change: how the pictures are turned and fitted.
        memory_limit: bytes above which the result is a memory-mapped file in the data set's folder,
            or among the user's caches if that may not be written; it is made once and used again.

    Returns:
        (len(rows), h, w, 3) uint8.

    Raises:
        UserError: a video is missing, or has no frame at the time the tables name.
    """
    height, width = size or data.cameras[key]
    shape = (len(rows), height, width, 3)
    change = change or Translation()
    if int(np.prod(shape)) <= memory_limit:
        out = np.empty(shape, dtype=np.uint8)
        _fill(out, data, key, rows, change)
        return out
    # Too large for memory: use the file that an earlier call made, or make it.
    cache = _cache_folder(data.path) / f"{_fingerprint(data, key, rows, shape, change)}.npy"
    if not cache.exists():
        with replacing(cache) as unfinished:
            out = np.lib.format.open_memmap(unfinished, mode="w+", dtype=np.uint8, shape=shape)
            _fill(out, data, key, rows, change)
            out.flush()
    return np.load(cache, mmap_mode="r", allow_pickle=False)


def _cache_folder(path: Path) -> Path:
    """In the data set's own folder; where that may not be written, among the user's caches."""
    if os.access(path, os.W_OK):
        return path / ".cache"
    return Path(platformdirs.user_cache_dir("embodyrl")) / "frames"


def _fingerprint(
    data: DatasetFiles, key: str, rows: np.ndarray, shape: tuple[int, ...], change: Translation
) -> str:
    files = sorted(p for p in data.path.rglob("*") if p.suffix in (".mp4", ".parquet"))
    stamp = [[str(p.relative_to(data.path)), p.stat().st_size, p.stat().st_mtime_ns] for p in files]
    how = [change.rows, change.columns, change.channels, change.fit]
    digest = hashlib.sha256(json.dumps([key, shape, stamp, how]).encode())
    digest.update(np.ascontiguousarray(rows, dtype=np.int64).tobytes())
    return digest.hexdigest()[:24]


def _fill(
    out: np.ndarray, data: DatasetFiles, key: str, rows: np.ndarray, change: Translation
) -> None:
    size = (out.shape[1], out.shape[2])

    def changed(picture: np.ndarray) -> np.ndarray:
        turned = turn(picture, change.rows, change.columns, change.channels)
        return fit(turned, size, change.fit)

    if data.features[key]["dtype"] == "image":
        # Each picture is decoded once, however often it is wanted.
        unique, times = np.unique(rows, return_counts=True)
        starts = np.concatenate([[0], times.cumsum()])
        for k, encoded in load_pictures(data, key, unique):
            out[starts[k] : starts[k + 1]] = changed(picture_array(encoded))
        return
    for path, targets, times in videos_by_file(data, key, rows):

        def take(k: int, picture: np.ndarray, targets: np.ndarray = targets) -> None:
            out[targets[k]] = changed(picture)

        decode_video(path, times, take, tolerance=0.5 / float(data.info["fps"]))


def videos_by_file(
    data: DatasetFiles, key: str, rows: np.ndarray
) -> Iterator[tuple[Path, np.ndarray, np.ndarray]]:
    """The frames of ``rows``, by video file.

    Yields:
        The file, which rows of the result it fills, and the times of their frames in seconds,
        ascending.
    """
    # An episode's frames begin at some time of the video file that its row names.
    episode = data.columns["episode_index"][rows]
    stamp = data.columns["timestamp"][rows].astype(np.float64)
    position = {row["episode_index"]: row for row in data.episodes}
    files: dict[Path, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    for number in np.unique(episode):
        meta = position[int(number)]
        path = file_of(
            data,
            "video_path",
            video_key=key,
            chunk_index=meta[f"videos/{key}/chunk_index"],
            file_index=meta[f"videos/{key}/file_index"],
        )
        here = np.flatnonzero(episode == number)
        files[path].append((here, stamp[here] + meta[f"videos/{key}/from_timestamp"]))
    # Sort each file's frames by time, so that it is decoded once, in order.
    for path, parts in files.items():
        targets, times = (np.concatenate(p) for p in zip(*parts, strict=True))
        order = np.argsort(times, kind="stable")
        yield path, targets[order], times[order]


def decode_video(
    path: Path, times: np.ndarray, take: Callable[[int, np.ndarray], None], *, tolerance: float
) -> int:
    """Decodes a video in order, and passes on the frames at ``times``.

    Args:
        path: of the file.
        times: (M,) seconds, ascending.
        take: called with (k, (h, w, 3) uint8), the frame shown at ``times[k]``, in the order of k.
        tolerance: how far a frame may be from its time, in seconds.

    Returns:
        How many frames the video has.

    Raises:
        UserError: the file is missing, cannot be decoded, or has no frame at one of the times.
    """
    import av
    from av.error import FFmpegError

    if not path.is_file():
        raise UserError(
            f"The data set's video {path} is missing; fetch or record the data set again."
        )
    require_readable(path)
    shown: list[float] = []
    wanted = 0
    try:
        # The times of all frames.
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            base = float(stream.time_base or 0)
            shown = [
                float(packet.pts) * base
                for packet in container.demux(stream)
                if packet.pts is not None
            ]
        if len(shown) == 0:
            raise UserError(
                f"The data set's video {path} holds no frame; fetch or record the data set again."
            )
        # The frame nearest to each time. Packets come in decoding order, so their times are sorted.
        nearest, error = _nearest(np.sort(shown), times)
        if error.max() > tolerance:
            raise UserError(
                f"{path} has no frame at {times[error.argmax()]:.3f} s (the nearest is "
                f"{error.max():.3f} s away): the video and the tables of this data set do not "
                "belong together, or the video is incomplete."
            )
        # Decode up to the last of these frames.
        with av.open(str(path)) as container:
            for number, frame in enumerate(container.decode(video=0)):
                if wanted == len(nearest):
                    break
                if nearest[wanted] != number:
                    continue
                picture = frame.to_ndarray(format="rgb24")
                while wanted < len(nearest) and nearest[wanted] == number:
                    take(wanted, picture)
                    wanted += 1
    except (FFmpegError, IndexError) as error:  # IndexError: it holds no video stream
        raise UserError(
            f"{path} cannot be decoded ({error}); fetch or record the data set again."
        ) from error
    if wanted < len(nearest):
        raise UserError(
            f"{path} ends after {wanted} of {len(nearest)} frames; fetch the data set again."
        )
    return len(shown)


def _nearest(shown: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each time the number of the nearest frame, and its distance in seconds."""
    right = np.minimum(np.searchsorted(shown, times), len(shown) - 1)
    left = np.maximum(right - 1, 0)
    nearest = np.where(np.abs(shown[left] - times) <= np.abs(shown[right] - times), left, right)
    return nearest, np.abs(shown[nearest] - times)
