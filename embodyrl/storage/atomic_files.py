"""Writes files and folders that are complete or not there, whenever the process ends.

Everything is written under a hidden name in the same folder, flushed to disk, and then renamed. A
reader sees the old content or the new one. Every file of a run, of a data set and of a world model
is written here; only ``metrics.jsonl`` and the logs of a robot grow line by line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from embodyrl.storage.paths import FileAccessError, explain_os_error


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Replaces a file by one that the block writes.

    The file gets the rights of any new file: those that the umask leaves.

    Args:
        path: of the file; its folder is made if it is not there.

    Yields:
        An empty file in the same folder, to be written. If the block fails it is deleted, and
        ``path`` stays as it was.

    Raises:
        FileAccessError: no permission, or a full or read-only disk.
    """
    path = Path(path)
    unfinished = _hidden(path, "tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        rights = _create(unfinished)
        yield unfinished
        os.chmod(unfinished, rights)  # some libraries make files that only the owner can read
        flush_to_disk(unfinished)
        os.replace(unfinished, path)
        flush_to_disk(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        _explain(error, path)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Writes a text file (UTF-8) completely or not at all."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_json(path: str | Path, data: Any, indent: int | None = 1) -> None:
    """Writes plain data as a JSON file, completely or not at all."""
    write_text(path, json.dumps(data, indent=indent) + "\n")


@contextlib.contextmanager
def replacing_folder(path: str | Path) -> Iterator[Path]:
    """Replaces a folder by one that the block writes.

    A folder cannot be renamed over another, so the old one is put aside first, as
    ``.NAME.old-XXXXXXXX``, and deleted at the end.

    Args:
        path: of the folder.

    Yields:
        A new folder beside it. If the block fails it is deleted, and ``path`` stays as it was.
    """
    path = Path(path)
    scratch = _hidden(path, "tmp")
    try:
        scratch.mkdir(parents=True)
        yield scratch
        rename_folder(scratch, path)
    except BaseException as error:
        shutil.rmtree(scratch, ignore_errors=True)
        _explain(error, path)
        raise
    remove_unfinished(path.parent, path.name)


def rename_folder(scratch: Path, path: Path) -> None:
    """Gives a complete folder its name, after everything in it is on the disk.

    Args:
        scratch: a folder beside ``path``.
        path: if it exists it is put aside first.
    """
    probe = scratch / ".rights"
    rights = _create(probe)
    probe.unlink()
    for file in scratch.rglob("*"):
        if file.is_file():
            os.chmod(file, rights)  # some libraries make files that only the owner can read
        flush_to_disk(file)
    flush_to_disk(scratch)
    if path.exists():
        path.rename(_hidden(path, "old"))
    scratch.rename(path)
    flush_to_disk(path.parent)


def remove_unfinished(folder: Path, name: str = "") -> None:
    """Deletes what interrupted writes left behind in a folder.

    Nobody else may be writing there.

    Args:
        folder: in which the files or folders are.
        name: only the leftovers of this file or folder; empty for all.
    """
    hidden = rf"\.{re.escape(name) if name else '.+'}\.(tmp|old)-[0-9a-f]{{8}}"
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if not re.fullmatch(hidden, path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Waits until a file, or the list of files of a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _explain(error: BaseException, path: Path) -> None:
    """Raises a ``FileAccessError`` where writing ``path`` failed because of the disk."""
    if not isinstance(error, OSError):
        return
    if isinstance(error.filename, str):
        other = Path(error.filename)
        if not (other.is_relative_to(path.parent) or path.is_relative_to(other)):
            return  # something else was read or written meanwhile
    if text := explain_os_error(error, path):
        raise FileAccessError(f"{path} could not be written. {text}") from error


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}-{secrets.token_hex(4)}")


def _create(path: Path) -> int:
    """Makes an empty file and returns its rights, which follow from the umask."""
    path.touch(mode=0o666, exist_ok=False)
    return path.stat().st_mode & 0o777
