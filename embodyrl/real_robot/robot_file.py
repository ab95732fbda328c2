"""Reads a robot's file: YAML with sections, of which ``safety`` says where the robot may move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from embodyrl.errors import UserError, did_you_mean
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.storage.plain_data import read_yaml

TWIN_SAFETY: dict[str, Any] = {
    "robot": "panda",
    "box_low": (0.28, -0.30, 0.012),
    "box_high": (0.72, 0.30, 0.40),
    "max_force": None,
}
"""The workspace of the embedded tasks. The simulated arm estimates no force at its hand."""


def read_sections(file: str, sections: Sequence[str], purpose: str) -> dict[str, Any]:
    """The sections of a robot's file.

    Args:
        file: its path.
        sections: the top-level keys that it may have.
        purpose: a sentence for the message when there is no such file.

    Raises:
        UserError: no such file, no YAML, or another key.
    """
    path = Path(file)
    if not path.is_file():
        raise UserError(f"There is no file {file}. {purpose}")
    raw: Any = read_yaml(path)
    if not isinstance(raw, dict) or set(raw) - set(sections):
        wrong = next(iter(set(raw) - set(sections)), "") if isinstance(raw, dict) else ""
        raise UserError(f"{file} has no key {str(wrong)!r}. {did_you_mean(str(wrong), sections)}")
    return {str(key): value for key, value in raw.items()}


def build_safety(file: str, section: dict[str, Any]) -> SafetyConfig:
    """The safety filter's settings from the section ``safety`` of ``file``.

    Raises:
        UserError: an unknown key, a bad value, or no workspace.
    """
    from embodyrl.storage.config_section import build_section

    if not {"box_low", "box_high"} <= set(section):
        raise UserError(
            f"{file} must give the workspace, safety.box_low and safety.box_high: x, y, z in m."
        )
    built = build_section("safety", SafetyConfig, section)
    return replace(built, box_low=tuple(built.box_low), box_high=tuple(built.box_high))
