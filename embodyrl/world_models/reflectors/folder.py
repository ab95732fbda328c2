"""Reflectors as folders: ``reflector.json`` says of which kind, beside weights and ``calibration.json``.

A ``trained`` or ``goal`` reflector is written by ``save_reflector``. Of the other kinds there is
nothing to save: their ``reflector.json`` is written by hand, e.g.
``{"kind": "server", "url": "http://127.0.0.1:8000/v1", "model": "..."}``.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from embodyrl.errors import UserError, did_you_mean
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
    try:
        told = json.loads((folder / FILE).read_text())
        kind = told.pop("kind")
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} holds no reflector (there is no {FILE}). `embodyrl world reflect train` "
            "makes one."
        ) from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(
            f"{folder / FILE} must be a JSON object with a 'kind', one of: {', '.join(KINDS)}."
        ) from error
    if kind not in KINDS:
        raise UserError(
            f"{folder / FILE}: there is no kind of reflector {kind!r}. "
            f"{did_you_mean(str(kind), KINDS)}"
        )
    try:
        reflector = _load(kind, folder, told, device)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise UserError(
            f"The reflector in {folder} cannot be read ({error}). Train it again, or copy it again."
        ) from error
    if (
        kind != "executable" or (folder / CALIBRATION).exists()
    ):  # without its own it goes by that of what it asks
        reflector.calibration = Calibration.load(folder)
    return reflector


def _load(kind: str, folder: Path, told: dict[str, Any], device: str) -> Any:
    if kind == "trained":
        from embodyrl.world_models.reflectors.trained import TrainedReflector

        trained: Any = TrainedReflector.from_pretrained(folder, local_files_only=True)
        return trained.to(device).eval()
    if kind == "goal":
        from embodyrl.world_models.reflectors.goal import GoalReflector

        return GoalReflector.load(folder, device)
    if kind == "vlm":
        from embodyrl.world_models.reflectors.vlm import VLMConfig, VLMReflector

        return VLMReflector(_settings(VLMConfig, told, folder), device)
    if kind == "executable":
        from embodyrl.world_models.reflectors.inverse_check import (
            ExecutableConfig,
            ExecutableReflector,
        )

        config = _settings(ExecutableConfig, told, folder)
        return ExecutableReflector(config, load_reflector(config.reflector, device), device)
    from embodyrl.world_models.reflectors.server import ServerConfig, ServerReflector

    return ServerReflector(_settings(ServerConfig, told, folder))


def _settings(config: Any, told: dict[str, Any], folder: Path) -> Any:
    known = {f.name: f for f in fields(config)}
    if wrong := [name for name in told if name not in known]:
        raise UserError(
            f"{folder / FILE}: unknown setting {wrong[0]!r}. {did_you_mean(wrong[0], known)}"
        )
    needed = [n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in needed if name not in told]:
        raise UserError(f"{folder / FILE} lacks {missing[0]!r}; it needs {', '.join(needed)}.")
    return config(**told)


def save_reflector(reflector: Any, path: str | Path) -> Path:
    """Writes a trained or a goal reflector with its calibration into a new folder, or over one of its kind.

    Raises:
        UserError: the folder holds something else, or cannot be written.
    """
    from embodyrl.world_models.reflectors.goal import GoalReflector

    folder = Path(path)
    if folder.exists() and any(folder.iterdir()) and not (folder / FILE).exists():
        raise UserError(
            f"{folder} holds something that is no reflector. Choose another folder with --out."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_goal = isinstance(reflector, GoalReflector)
        reflector.save(folder) if is_goal else reflector.save_pretrained(folder)
        (folder / FILE).write_text(json.dumps({"kind": "goal" if is_goal else "trained"}) + "\n")
        reflector.calibration.save(folder)
    except OSError as error:
        raise UserError(f"The reflector could not be written to {folder} ({error}).") from error
    return folder
