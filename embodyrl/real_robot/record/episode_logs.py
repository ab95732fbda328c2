"""The logs of a recording session: each is complete or not there, whenever the process ends."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.data.partial import keep_settings
from embodyrl.errors import UserError
from embodyrl.real_robot.logs.mcap_log import RunLog, outcome
from embodyrl.storage.atomic_files import flush_to_disk
from embodyrl.storage.paths import files_of, no_access

RUNNING = "running.unfinished"
"""Name of the log of the episode that is going on. A session that was killed leaves it behind."""
RESERVE = 2**28
"""Bytes of the disk that stay free."""
PICTURE_SHARE = 0.6
"""Size of a stored picture, as a share of its pixels' bytes, where none was recorded yet."""
TICK_BYTES = 800
"""Bytes of a tick: state, command and acceleration."""


def logs_folder(out: str | Path) -> Path:
    """``OUT.logs``."""
    path = Path(out)
    return path.with_name(path.name + ".logs")


@dataclass(frozen=True)
class Kept:
    """A finished episode.

    Attributes:
        path: of its log.
        solved: its label.
        size: bytes.
    """

    path: Path
    solved: bool
    size: int


class EpisodeLogs:
    """The folder ``OUT.logs``: ``settings.json`` and ``episode_0000.mcap`` and so on.

    Args:
        out: of the data set.
        settings: plain data that all its episodes have in common.

    Raises:
        UserError: the folder holds episodes of other settings, or a damaged log.
    """

    def __init__(self, out: str | Path, settings: Mapping[str, Any]) -> None:
        self.folder = logs_folder(out)
        self.kept: list[Kept] = []
        self._log: RunLog | None = None
        with suppress(FileNotFoundError):
            (self.folder / RUNNING).unlink()
        # A file has its name only once it is complete, so a damaged one is a matter for a person.
        for file in files_of(self.folder, "episode_*.mcap"):
            found = outcome(file)
            self.kept.append(Kept(file, bool(found.get("solved")), file.stat().st_size))
        keep_settings(self.folder, settings, begun=bool(self.kept))

    def start(
        self, settings: dict[str, Any], now: float, robot: str, motors: Sequence[str] = ()
    ) -> RunLog:
        """The log of a new episode; see ``RunLog``."""
        try:
            self._log = RunLog(self.folder / RUNNING, settings, now, robot, motors)
        except OSError as error:
            raise no_access(error, self.folder) from error
        return self._log

    def discard(self) -> None:
        """Deletes the log of the episode that is going on."""
        assert self._log is not None
        with suppress(UserError):  # what could not be written is deleted anyway
            self._log.close()
        (self.folder / RUNNING).unlink(missing_ok=True)
        self._log = None

    def finish(self, solved: bool) -> Kept:
        """Keeps the episode that is going on: from here on it is on the disk.

        Raises:
            UserError: the log could not be written.
        """
        assert self._log is not None
        running = self.folder / RUNNING
        try:
            self._log.close()
        except UserError:
            running.unlink(missing_ok=True)
            raise
        self._log = None
        # The next number, also where a file was taken out of the folder.
        number = int(self.kept[-1].path.stem.rpartition("_")[2]) + 1 if self.kept else 0
        path = self.folder / f"episode_{number:04d}.mcap"
        # Its name is what says that it is complete, so the content is on the disk before.
        try:
            flush_to_disk(running)
            running.rename(path)
            flush_to_disk(self.folder)
        except OSError as error:
            raise no_access(error, self.folder) from error
        self.kept.append(Kept(path, solved, path.stat().st_size))
        return self.kept[-1]

    @property
    def failed(self) -> bool:
        """Whether the log of the episode that is going on could not be written."""
        return self._log is not None and self._log.failed

    def free(self) -> int:
        """Bytes that the disk has left for episodes."""
        return max(0, shutil.disk_usage(self.folder).free - RESERVE)


def episode_bytes(
    cameras: Mapping[str, tuple[int, int]],
    frames: float,
    seconds: float,
    tick: float,
    depth: Collection[str] = (),
) -> float:
    """Bytes that an episode may take.

    Args:
        cameras: name -> (height, width).
        frames: number of its frames.
        seconds: its length in the arm's time.
        tick: s between two commands.
        depth: cameras that measure depth, too.
    """
    picture = PICTURE_SHARE * sum(3 * h * w for h, w in cameras.values())
    # Depth is noisy: 16 bits for a pixel.
    picture += sum(2 * h * w for name, (h, w) in cameras.items() if name in depth)
    return frames * picture + seconds / tick * TICK_BYTES


def require_room(free: float, need: float, episodes: int, folder: Path) -> None:
    """Refuses a session for which the disk is too small.

    Args:
        free: bytes.
        need: bytes of one episode.
        episodes: that are still to be recorded.
        folder: of the logs.

    Raises:
        UserError: with the numbers.
    """
    if need * episodes <= free:
        return
    raise UserError(
        f"{episodes} more episodes may take {size_in_words(need * episodes)}, and the disk of {folder} "
        f"has {size_in_words(free)} left beside a reserve. That is enough for "
        f"{int(free // max(need, 1))}. Free some space, choose another disk (--out), fewer "
        "--episodes or fewer --seconds."
    )


def size_in_words(size: float) -> str:
    """Bytes as a person reads them."""
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    number, unit = next((u for u in units if size >= u[0]), units[-1])
    return f"{size / number:.1f} {unit}"
