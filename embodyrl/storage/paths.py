"""Paths: the home folder, folders that cannot be written, and what a path holds.

A setting that is a path is a text. ``path_setting`` marks it: its value may change when a run goes
on, as long as the content is the same. ``machine_setting`` marks what only says where a run is
computed, such as the number of threads: it may always change.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodyrl.errors import UserError

EDGE = 1 << 16
"""Bytes at the start and at the end of a file that its fingerprint reads."""
OWN_FOLDERS = ("data", "runs")
"""Folders in which presets and docs keep data sets and runs: never an owner on the hub."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_ALLOWED = (errno.EACCES, errno.EPERM)


class FileAccessError(UserError):
    """A file or folder cannot be read or written: no permission, a full or a read-only disk."""


def path_setting(default: Any = "") -> Any:
    """A field of a config that is a path, or a tuple of paths."""
    return dataclasses.field(default=default, metadata={"setting": "path"})


def machine_setting(default: Any) -> Any:
    """A field of a config that says where and by how many a run is computed, not what."""
    return dataclasses.field(default=default, metadata={"setting": "machine"})


def settings_of(config: Any, kind: str) -> set[str]:
    """The fields of a config that are marked as ``"path"`` or ``"machine"``.

    A field keeps the mark of its base class where a class gives it another default.
    """
    bases = [base for base in type(config).__mro__ if dataclasses.is_dataclass(base)]
    marked = (f for base in bases for f in dataclasses.fields(base))
    return {f.name for f in marked if f.metadata.get("setting") == kind}


def is_hub_id(text: str) -> bool:
    """Whether a text that names no folder may be an id on the Hugging Face hub, ``OWNER/NAME``.

    It is none if OWNER is a folder here, or one of ``OWN_FOLDERS``: then a file is missing, and no
    hub is asked for it.
    """
    owner, _, name = text.partition("/")
    legal = re.fullmatch(r"\w[\w.-]*", owner) and re.fullmatch(r"\w[\w.-]*", name)
    return bool(legal) and owner not in OWN_FOLDERS and not Path(owner).is_dir()


def expand_home(value: Any) -> Any:
    """Replaces ``~`` and ``~user`` at the start of a text by the home folder.

    Args:
        value: a text; or lists, tuples and mappings, whose texts are replaced; others stay.

    Raises:
        UserError: there is no such user.
    """
    if isinstance(value, str) and re.match(r"~([a-z_][\w-]*)?(/|$)", value):
        expanded = os.path.expanduser(value)
        if expanded.startswith("~"):
            user = value[1:].partition("/")[0]
            raise UserError(
                f"{value} begins with the home folder of the user {user!r}, and there is no such "
                f"user here. Write the whole path, or ./{value} for a folder of that name."
            )
        return expanded
    if isinstance(value, list | tuple):
        return type(value)(expand_home(inner) for inner in value)
    if isinstance(value, Mapping):
        return {key: expand_home(inner) for key, inner in value.items()}
    return value


def expand_paths(arguments: Any) -> None:
    """``expand_home`` of every argument of a command line, in place (an ``argparse.Namespace``)."""
    for key, value in vars(arguments).items():
        if isinstance(value, str | list | tuple):
            setattr(arguments, key, expand_home(value))


def explain_os_error(
    error: OSError, path: str | Path | None = None, option: str = ""
) -> str | None:
    """What is wrong with a file or its disk, and what to do, in a sentence or two.

    Args:
        error: that was raised.
        path: that was read or written; None takes the one that the error names.
        option: by which a user chooses the folder, such as ``run.out=FOLDER``.

    Returns:
        None for an error of another kind.
    """
    # Where it happened, and which way out there is.
    name = path if path is not None else error.filename
    place = Path(name) if isinstance(name, str | os.PathLike) else None
    other = f"choose another folder ({option})" if option else "choose another folder"
    # The disk is full, or the user's own limit is reached.
    if error.errno in FULL:
        where = f" of {_existing(place)}" if place is not None else ""
        problem = f"The disk{where} is full"
        if error.errno == errno.EFBIG:
            problem = f"{place or 'A file'} reached the largest size that is allowed (ulimit -f)"
        return (
            f"{problem}. What was complete before is intact. Free some space, and the same command "
            f"goes on; or {other}."
        )
    if place is None:
        return None
    # Rights: to read, and to write.
    if error.errno in NOT_ALLOWED and _unreadable(place):
        return (
            f"There is no permission to read {place}. Nothing is wrong with it: let its "
            "owner allow it (chmod), or read a copy."
        )
    if error.errno in NOT_ALLOWED:
        return (
            f"There is no permission to write into {_existing(place)}. Let its owner allow it "
            f"(chmod), or {other}."
        )
    if error.errno == errno.EROFS:
        return f"{_existing(place)} lies on a read-only disk. {other[0].upper() + other[1:]}."
    # A file where a folder is needed, and the other way round.
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        file = next((p for p in (place, *place.parents) if p.is_file()), place)
        return f"{file} is a file, where a folder is needed. {other[0].upper() + other[1:]}."
    if error.errno == errno.EISDIR:
        return f"{place} is a folder, where a file is needed. Give the name of a file."
    return None


def no_access(error: OSError, path: str | Path) -> FileAccessError:
    """The error to raise where a file could not be read or written.

    Args:
        error: of the operating system.
        path: of the file.
    """
    reason = explain_os_error(error, path) or f"{path} cannot be used ({error.strerror or error})."
    return FileAccessError(reason)


def require_readable(path: str | Path) -> None:
    """Refuses a file or folder that is there and may not be read; libraries call it missing.

    Raises:
        FileAccessError: no permission.
    """
    path = Path(path)
    place = _existing(path)
    if (place != path and not place.is_dir()) or not _unreadable(path):
        return
    raise no_access(PermissionError(errno.EACCES, "not readable", str(path)), path)


def files_of(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder that fit a pattern, sorted; none if there is no such folder.

    ``Path.glob`` finds nothing in a folder that may not be read; here that is an error.

    Args:
        folder: to look in.
        pattern: as of ``Path.glob``.

    Raises:
        FileAccessError: a folder on the way may not be read.
    """
    require_readable(folder)
    if "/" in pattern:
        for inner in folder.glob(pattern.rpartition("/")[0]):
            require_readable(inner)
    return sorted(folder.glob(pattern))


def require_writable(path: str | Path, option: str = "") -> None:
    """Refuses a file or folder that could not be written, before any work is done for it.

    Args:
        path: it need not exist; then it is the nearest folder above it that counts.
        option: by which a user chooses it, such as ``run.out=FOLDER``.

    Raises:
        FileAccessError: no permission, a file where a folder is needed, a read-only or a full disk.
    """
    path = Path(path)
    try:
        place = _existing(path)
        folder = place if place.is_dir() else place.parent
        if place.is_file() and place != path:
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(place))
        # Rights do not tell all: a disk may be full, or read-only.
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"0" * 4096)
        if place.is_file() and not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, "not writable", str(place))
    except OSError as error:
        # Of other kinds are folders that the system makes up, such as /proc.
        other = (
            f"No file can be made in {_existing(path)} ({error.strerror or error}). Choose another "
            f"folder{f' ({option})' if option else ''}."
        )
        raise FileAccessError(explain_os_error(error, path, option) or other) from error


def fingerprint(path: str | Path) -> str | None:
    """A short text that is the same for the same content, wherever it lies.

    It depends on the names and sizes of the files and on the first and last ``EDGE`` bytes of each,
    so that it takes milliseconds also for a large data set. Hidden files do not count.

    Args:
        path: a file or a folder.

    Returns:
        32 hexadecimal digits; None if there is nothing, such as for an id on a hub.
    """
    path = Path(path)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        require_readable(path)
        inside = (p for p in path.rglob("*") if not _hidden(p.relative_to(path)))
        files = sorted(p for p in inside if p.is_file())
    else:
        return None
    # Of each file its name, its size, its beginning and its end.
    digest = hashlib.sha256()
    for file in files:
        name = file.relative_to(path).as_posix() if file != path else ""
        size = file.stat().st_size
        digest.update(f"{name}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(EDGE))
            stream.seek(max(EDGE, size - EDGE))
            digest.update(stream.read(EDGE))
    return digest.hexdigest()[:32]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _existing(path: Path) -> Path:
    """The path itself, or the nearest one above it that is there, as far as can be seen."""
    for place in (path, *path.absolute().parents):
        if os.path.exists(place):
            return place
    return Path("/")


def _unreadable(path: Path) -> bool:
    """Whether the path is there but may not be read, or lies in a folder that may not be entered."""
    place = _existing(path)
    return not os.access(place, os.R_OK if place.is_file() else os.X_OK) or (
        place == path and not os.access(place, os.R_OK)
    )
