"""A lock on a folder: only one process at a time writes into it."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embodyrl.errors import UserError
from embodyrl.storage.paths import no_access

NAME = ".held"
"""The file that carries the lock."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a folder, which is made if it is not there.

    The operating system releases the lock when the process ends, even if it is killed.

    Raises:
        UserError: another process holds the lock, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / NAME).open("a")
    except OSError as error:
        raise no_access(error, folder) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"Another process is writing into {folder}, and two would spoil each other's work. "
                f"Wait until it is done, end it (`fuser {folder / NAME}` prints its process id), "
                "or choose another folder."
            ) from error
        yield
