"""Logs of an earlier run in the same folder: none is written over, or mixed with those of this one."""

from __future__ import annotations

import re
from pathlib import Path

from embodyrl.storage.paths import files_of, no_access

OF_A_RUN = ("result.json", "episode_*.mcap", "resets")
"""What a run of ``embodyrl deploy`` leaves in its folder."""


def next_number(folder: str | Path, kind: str) -> int:
    """The number behind those of the logs in a folder; 0 where there are none.

    Args:
        folder: need not exist.
        kind: what their names begin with: ``"episode"`` or ``"reset"``.
    """
    names = [file.name for file in files_of(Path(folder), f"{kind}_*.mcap")]
    found = [re.match(rf"{kind}_(\d+)", name) for name in names]
    return max((int(match[1]) + 1 for match in found if match), default=0)


def set_aside(folder: str | Path) -> Path | None:
    """Moves what an earlier run left in a folder into one below it.

    Args:
        folder: of the new run; need not exist.

    Returns:
        That folder, ``earlier_0`` or the next one that is free; None where nothing was there.

    Raises:
        FileAccessError: it could not be moved.
    """
    folder = Path(folder)
    found = [file for pattern in OF_A_RUN for file in files_of(folder, pattern)]
    if not found:
        return None
    number = 0
    while (aside := folder / f"earlier_{number}").exists():
        number += 1
    try:
        aside.mkdir()
        for file in found:
            file.rename(aside / file.name)
    except OSError as error:
        raise no_access(error, aside) from error
    return aside
