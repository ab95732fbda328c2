"""``EpisodeParts``: one file per episode while a collection runs, so that none is lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.data.recording import Recording
from embodyrl.errors import UserError
from embodyrl.storage.atomic_files import replacing, write_json
from embodyrl.storage.plain_data import ANYTHING, read_json

PREFIXES = {"images": "image/", "depth": "depth/"}
"""Attribute of a recording that has an array for each camera -> what their names begin with."""


def parts_folder(path: str | Path) -> Path:
    """``PATH.parts``."""
    path = Path(path)
    return path.with_name(path.name + ".parts")


class EpisodeParts:
    """The folder ``PATH.parts`` of a collection: ``settings.json``, and ``000000.npz`` and so on.

    A file appears complete or not at all.

    Args:
        path: of the data set that is being collected.
        settings: plain data that all its episodes have in common.

    Raises:
        UserError: the folder holds episodes that were collected with other settings.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]) -> None:
        self.folder = parts_folder(path)
        self.folder.mkdir(parents=True, exist_ok=True)
        # The episodes that are there, up to the first missing or damaged one.
        self._paths: list[Path] = []
        while (file := self._file(len(self._paths))).exists() and _is_whole(file):
            self._paths.append(file)
        keep_settings(self.folder, settings, begun=bool(self._paths))

    def __len__(self) -> int:
        return len(self._paths)

    def __iter__(self) -> Iterator[Recording]:
        return (_load(path) for path in self._paths)

    def add(self, recording: Recording) -> None:
        """Keeps one more episode."""
        arrays = {
            prefix + name: frames
            for what, prefix in PREFIXES.items()
            for name, frames in getattr(recording, what).items()
        }
        values = vars(recording).items()
        plain = {k: v for k, v in values if k not in PREFIXES and v is not None}
        file = self._file(len(self))
        with replacing(file) as unfinished, unfinished.open("wb") as stream:
            np.savez_compressed(stream, allow_pickle=False, **arrays, **plain)
        self._paths.append(file)

    def remove(self) -> None:
        """Deletes the folder, once the data set is written."""
        shutil.rmtree(self.folder)

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:06d}.npz"


def keep_settings(folder: Path, settings: Mapping[str, Any], *, begun: bool) -> None:
    """Compares the settings with those in ``settings.json`` of a folder, or writes them there.

    Args:
        folder: of the episodes so far.
        settings: plain data that all its episodes have in common.
        begun: whether there are episodes, which were made with the settings in the file.

    Raises:
        UserError: they were made with other settings.
    """
    new = json.loads(json.dumps(settings))
    path = folder / "settings.json"
    if not path.exists() or not begun:
        write_json(path, new)
        return
    old = read_json(path, {...: ANYTHING}, "Bring back a copy of it, or give another --out.")
    changed = [k for k in sorted(new.keys() | old.keys()) if new.get(k) != old.get(k)]
    if changed:
        listed = "; ".join(f"{k} was {old.get(k)!r}, now {new.get(k)!r}" for k in changed[:4])
        raise UserError(
            f"{folder} holds episodes that were collected with other settings ({listed}). Give the "
            "same settings to continue, or another --out."
        )


def _load(path: Path) -> Recording:
    with np.load(path, allow_pickle=False) as file:
        of_cameras = {
            what: {k.removeprefix(start): file[k] for k in file.files if k.startswith(start)}
            for what, start in PREFIXES.items()
        }
        plain = {k: file[k] for k in file.files if not k.startswith(tuple(PREFIXES.values()))}
    return Recording(**of_cameras, **{k: v if v.ndim else v.item() for k, v in plain.items()})


def _is_whole(path: Path) -> bool:
    try:
        return len(_load(path)) > 0
    except Exception:  # the zip reader or the array reader raises, depending on the damage
        return False
