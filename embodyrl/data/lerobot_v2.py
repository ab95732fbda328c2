"""The older versions v2.0 and v2.1 of LeRobot's data sets, described as v3 is.

They hold one parquet file and one video per episode and camera, and their tables of episodes and
tasks are lines of JSON:

    data/chunk-000/episode_000000.parquet
    videos/chunk-000/observation.images.front/episode_000000.mp4
    meta/info.json  meta/episodes.jsonl  meta/tasks.jsonl  meta/episodes_stats.jsonl (v2.1)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from embodyrl.errors import UserError
from embodyrl.storage.paths import require_readable
from embodyrl.storage.plain_data import ANYTHING, COUNT, TEXT, check, first_line

EPISODE = {"episode_index": COUNT, "length": COUNT, "tasks?": [TEXT], ...: ANYTHING}
TASK = {"task_index": COUNT, "task": TEXT, ...: ANYTHING}
REMEDY = "Fetch or record the data set again."
CHUNK = 1000
"""Episodes of a folder, where ``meta/info.json`` does not say."""
RENAMED = {"{episode_chunk": "{chunk_index", "{episode_index": "{file_index"}
"""Fields of the templates of paths, and how v3 calls them."""


def is_old(folder: Path) -> bool:
    """Whether a data set's tables are those of v2."""
    return (folder / "meta" / "episodes.jsonl").is_file()


def new_info(info: dict[str, Any]) -> dict[str, Any]:
    """``meta/info.json`` with the templates of v3."""
    new = dict(info)
    for key in ("data_path", "video_path"):
        text = info.get(key)
        if isinstance(text, str):
            for old, name in RENAMED.items():
                text = text.replace(old, name)
            new[key] = text
    return new


def episodes(folder: Path, info: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of ``meta/episodes.jsonl``, with the columns of v3."""
    rows = sorted(_lines(folder / "meta" / "episodes.jsonl", EPISODE), key=_number)
    size = info.get("chunks_size") or CHUNK
    fps = float(info.get("fps") or 0)
    videos = [key for key, f in info["features"].items() if f["dtype"] == "video"]
    # v3 says where each episode stands: in which files, and at which of their frames.
    first = 0
    found = []
    for row in rows:
        number, length = row["episode_index"], row["length"]
        place = {"chunk_index": number // size, "file_index": number}
        new = {**row, "dataset_from_index": first, "dataset_to_index": first + length}
        new |= {f"data/{name}": value for name, value in place.items()}
        # A video holds one episode, so it begins at 0 s.
        for key in videos:
            times = {"from_timestamp": 0.0, "to_timestamp": length / fps if fps > 0 else 0.0}
            new |= {f"videos/{key}/{name}": value for name, value in (place | times).items()}
        found.append(new)
        first += length
    return found


def tasks(folder: Path) -> list[tuple[int, str]]:
    """The rows of ``meta/tasks.jsonl``."""
    return [
        (row["task_index"], row["task"]) for row in _lines(folder / "meta" / "tasks.jsonl", TASK)
    ]


def _number(row: dict[str, Any]) -> int:
    return row["episode_index"]


def _lines(path: Path, structure: dict[Any, Any]) -> list[Any]:
    """The objects of a file with one a line.

    Raises:
        UserError: it is missing, or damaged.
    """
    require_readable(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}). {REMEDY}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"Line {number} of {path}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is damaged ({first_line(error)}). {REMEDY}") from error
        check(row, structure, where, REMEDY)
        found.append(row)
    return found
