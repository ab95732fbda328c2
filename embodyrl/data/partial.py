"""Episodes kept one file each while a collection runs, so that none is lost however it ends."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.data.recording import Recording
from embodyrl.errors import UserError

IMAGE = "image/"


def parts_folder(path: str | Path) -> Path:
    """``PATH.parts``."""
    path = Path(path)
    return path.with_name(path.name + ".parts")


class EpisodeParts:
    """The folder ``PATH.parts`` beside a data set to be: ``settings.json`` and ``000000.npz``, ``000001.npz``, ...

    A file appears whole, by renaming, or not at all; a power cut can leave the newest ones damaged,
    and these are then recorded again.

    Args:
        path: of the data set to be.
        settings: JSON-able; what all its episodes must have in common.

    Raises:
        UserError: the folder holds episodes that were collected with other settings.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]) -> None:
        self.folder = parts_folder(path)
        self.folder.mkdir(parents=True, exist_ok=True)
        mine = json.loads(json.dumps(settings))
        said = self.folder / "settings.json"
        if said.exists():
            theirs = json.loads(said.read_text())
            if wrong := [
                k for k in sorted(mine.keys() | theirs.keys()) if mine.get(k) != theirs.get(k)
            ]:
                listed = "; ".join(
                    f"{k} was {theirs.get(k)!r}, now {mine.get(k)!r}" for k in wrong[:4]
                )
                raise UserError(
                    f"{self.folder} holds episodes that were collected with other settings "
                    f"({listed}). Give the same ones to go on, or another --out; or delete that "
                    "folder to start over."
                )
        else:
            _replace(said, json.dumps(mine, indent=1).encode())
        self._paths: list[Path] = []
        while (file := self._file(len(self._paths))).exists() and _is_whole(file):
            self._paths.append(file)

    def __len__(self) -> int:
        return len(self._paths)

    def __iter__(self) -> Iterator[Recording]:
        return (_load(path) for path in self._paths)

    def add(self, recording: Recording) -> None:
        """Keeps one more episode."""
        arrays = {IMAGE + name: frames for name, frames in recording.images.items()}
        plain = {k: v for k, v in vars(recording).items() if k != "images" and v is not None}
        file = self._file(len(self))
        unfinished = file.with_suffix(".tmp")
        with unfinished.open("wb") as stream:
            np.savez_compressed(stream, allow_pickle=False, **arrays, **plain)
        os.replace(unfinished, file)
        self._paths.append(file)

    def remove(self) -> None:
        """Deletes the folder, once the data set is written."""
        shutil.rmtree(self.folder)

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:06d}.npz"


def _load(path: Path) -> Recording:
    with np.load(path, allow_pickle=False) as file:
        images = {k.removeprefix(IMAGE): file[k] for k in file.files if k.startswith(IMAGE)}
        plain = {k: file[k] for k in file.files if not k.startswith(IMAGE)}
    return Recording(images, **{k: v if v.ndim else v.item() for k, v in plain.items()})


def _is_whole(path: Path) -> bool:
    try:
        return len(_load(path)) > 0
    except Exception:  # of the zip reader or the array reader, by where it is damaged
        return False


def _replace(path: Path, data: bytes) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(data)
    os.replace(unfinished, path)
