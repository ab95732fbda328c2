"""One process at a time writes into a folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embodyrl.errors import UserError

NAME = ".held"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Makes a folder if need be and keeps other processes from writing into it, until the end or until this one dies.

    Raises:
        UserError: another process is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / NAME).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"Another process is writing into {folder}, and two would spoil each other's work. "
                f"Wait until it is done, end it (`fuser {folder / NAME}` says which it is), or "
                "choose another folder."
            ) from error
        yield
