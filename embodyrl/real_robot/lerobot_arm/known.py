"""Which devices LeRobot and its plug-ins know, and how their settings are read."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from embodyrl.errors import MissingDependencyError, UserError, did_you_mean


def device_config(what: str, kind: str, settings: Mapping[str, Any], where: str) -> Any:
    """The config object of a device.

    Args:
        what: ``"robot"`` or ``"teleoperator"``.
        kind: its registered type.
        settings: its other settings, as LeRobot's commands take them.
        where: they stand, for messages.

    Raises:
        MissingDependencyError: LeRobot is not installed.
        UserError: no such type, or settings that it does not have.
    """
    try:
        import draccus
        from lerobot.utils.import_utils import register_third_party_plugins

        package = importlib.import_module(f"lerobot.{what}s")
        importlib.import_module("lerobot.cameras.opencv")  # registers the commonest camera
    except ImportError as error:
        raise MissingDependencyError(
            f"LeRobot's {what} {kind} needs LeRobot, which is not installed here ({error}). "
            "Install it: pip install 'embodyrl[data]'."
        ) from error
    register_third_party_plugins()
    base = getattr(package, f"{what.capitalize()}Config")
    choices = base.get_known_choices()
    if kind not in choices:
        # LeRobot's own are registered when they are imported, and each wants packages of its own.
        for module in pkgutil.iter_modules(package.__path__):
            if module.ispkg:
                with contextlib.suppress(Exception):
                    importlib.import_module(f"{package.__name__}.{module.name}")
    if kind not in choices:
        raise UserError(f"LeRobot has no {what} {kind!r}. {did_you_mean(kind, choices)}")
    try:
        return draccus.decode(base, {"type": kind, **settings})
    except Exception as error:  # draccus raises several kinds, and a config its own
        raise UserError(
            f"The settings of LeRobot's {what} {kind} are wrong ({where}): {_line(error)}."
        ) from error


def _line(error: Exception) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split()).rstrip(".")[:300]
