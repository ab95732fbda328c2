"""Reflectors as folders: ``reflector.json`` says the kind, beside weights and calibration.

``save_reflector`` writes a ``trained`` or ``goal`` reflector. The other kinds have no weights:
their ``reflector.json`` is written by hand, for example
``{"kind": "server", "url": "http://127.0.0.1:8000/v1", "model": "..."}``.
"""

from __future__ import annotations

import shutil
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from embodyrl.errors import UserError, did_you_mean
from embodyrl.storage.atomic_files import replacing_folder, write_json
from embodyrl.storage.config_section import build_section
from embodyrl.storage.paths import require_readable, require_writable
from embodyrl.storage.plain_data import ANYTHING, TEXT, first_line, read_json
from embodyrl.world_models.reflectors.base import Reflector
from embodyrl.world_models.reflectors.calibration import FILE as CALIBRATION
from embodyrl.world_models.reflectors.calibration import Calibration

FILE = "reflector.json"
KINDS = ("trained", "goal", "vlm", "server", "executable")


def load_reflector(path: str | Path, device: str = "cpu") -> Reflector:
    """The reflector in a folder, with its calibration.

    Args:
        path: the folder.
        device: where its network runs.

    Raises:
        UserError: no reflector there, an unknown kind or setting, or damaged files.
    """
    folder = Path(path)
    kind, settings = _read_settings(folder)
    for file in folder.glob("*"):
        require_readable(file)
    try:
        reflector = _load(kind, folder, settings, device)
    except UserError:
        raise
    except (
        ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, SafetensorError,
        TypeError, ValueError,
    ) as error:  # fmt: skip
        raise UserError(
            f"The reflector in {folder} cannot be read ({first_line(error)}). Train it again, or "
            "copy it again."
        ) from error
    # An executable reflector without a calibration of its own uses that of the one it wraps.
    if kind != "executable" or (folder / CALIBRATION).exists():
        reflector.calibration = Calibration.load(folder)
    return reflector


def _read_settings(folder: Path) -> tuple[str, dict[str, Any]]:
    """The kind and the settings in a reflector's folder.

    Raises:
        UserError: no reflector there, or an unknown kind.
    """
    if not (folder / FILE).exists():
        raise UserError(
            f"{folder} holds no reflector (there is no {FILE}). `embodyrl world reflect train` "
            "makes one."
        )
    needed = f"It must be a JSON object with a 'kind', one of: {', '.join(KINDS)}."
    settings = read_json(folder / FILE, {"kind": TEXT, ...: ANYTHING}, needed)
    kind = settings.pop("kind")
    if kind not in KINDS:
        raise UserError(
            f"{folder / FILE}: there is no kind of reflector {kind!r}. {did_you_mean(kind, KINDS)}"
        )
    return kind, settings


def _load(kind: str, folder: Path, settings: dict[str, Any], device: str) -> Any:
    if kind == "trained":
        from embodyrl.world_models.nets.saved_network import load_part

        classes = {"TrainedReflector": "embodyrl.world_models.reflectors.trained"}
        return load_part(folder, classes).to(device).eval()
    if kind == "goal":
        from embodyrl.world_models.reflectors.goal import GoalReflector

        return GoalReflector.load(folder, device)
    if kind == "vlm":
        from embodyrl.world_models.reflectors.vlm import VLMConfig, VLMReflector

        return VLMReflector(_settings(VLMConfig, settings, folder), device)
    if kind == "executable":
        from embodyrl.world_models.reflectors.inverse_check import (
            ExecutableConfig,
            ExecutableReflector,
        )

        config = _settings(ExecutableConfig, settings, folder)
        if _read_settings(Path(config.reflector))[0] == kind:
            raise UserError(
                f"{folder / FILE} wraps {config.reflector}, which is executable itself. Name a "
                "reflector of another kind."
            )
        return ExecutableReflector(config, load_reflector(config.reflector, device), device)
    from embodyrl.world_models.reflectors.server import ServerConfig, ServerReflector

    return ServerReflector(_settings(ServerConfig, settings, folder))


def _settings(config: Any, settings: dict[str, Any], folder: Path) -> Any:
    """The config object; refuses settings that are unknown or missing."""
    known = {f.name: f for f in fields(config)}
    if wrong := [name for name in settings if name not in known]:
        raise UserError(
            f"{folder / FILE}: unknown setting {wrong[0]!r}. {did_you_mean(wrong[0], known)}"
        )
    needed = [n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in needed if name not in settings]:
        raise UserError(f"{folder / FILE} lacks {missing[0]!r}; it needs {', '.join(needed)}.")
    return build_section(str(folder / FILE), config, settings)


def require_place(path: str | Path) -> None:
    """Refuses a folder into which no reflector can be written, before the long part.

    Raises:
        UserError: the folder holds something else, or cannot be written.
    """
    folder = Path(path)
    require_writable(folder, "--out FOLDER")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / FILE).exists():
        raise UserError(
            f"{folder} holds something other than a reflector. Choose another folder with --out."
        )


def save_reflector(reflector: Any, path: str | Path) -> Path:
    """Writes a trained or a goal reflector with its calibration.

    The folder may be new, empty, or hold a reflector already.

    Raises:
        UserError: the folder holds something else, or cannot be written.
    """
    from embodyrl.world_models.reflectors.goal import GoalReflector

    folder = Path(path)
    require_place(folder)
    is_goal = isinstance(reflector, GoalReflector)
    try:
        with replacing_folder(folder) as scratch:
            reflector.save(scratch) if is_goal else reflector.save_pretrained(scratch)
            write_json(scratch / FILE, {"kind": "goal" if is_goal else "trained"})
            reflector.calibration.save(scratch)
            # What else lies in the folder stays there.
            for file in folder.iterdir() if folder.is_dir() else []:
                if file.is_file() and not (scratch / file.name).exists():
                    shutil.copy(file, scratch / file.name)
    except OSError as error:
        raise UserError(f"The reflector could not be written to {folder} ({error}).") from error
    return folder
