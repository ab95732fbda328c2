"""Reads the file of an arm of LeRobot's: LeRobot's own settings, and how its motors may move."""

from __future__ import annotations

from typing import Any

from embodyrl.errors import UserError
from embodyrl.real_robot.control.joint_safety import JointSafetyConfig
from embodyrl.real_robot.robot_file import read_sections

SECTIONS = ("lerobot", "safety", "leader", "teleoperator")
"""Sections that the file may have."""
PURPOSE = "It names LeRobot's robot and the ranges of its motors; see docs/howto/lerobot_robots.md."


def load_lerobot(file: str) -> tuple[dict[str, Any], JointSafetyConfig]:
    """The settings of an arm and of its safety filter.

    Args:
        file: path of a YAML file with the keys ``lerobot`` (LeRobot's ``--robot.KEY``, with
            ``type``) and ``safety`` (``JointSafetyConfig``).

    Raises:
        UserError: no such file, an unknown key, or no type or ranges.
    """
    from embodyrl.storage.config_section import build_section

    if not file:
        raise UserError(f"--robot lerobot needs --robot-file. {PURPOSE}")
    raw = read_sections(file, SECTIONS, PURPOSE)
    # What LeRobot must know.
    settings = raw.get("lerobot")
    if not isinstance(settings, dict) or not isinstance(settings.get("type"), str):
        raise UserError(
            f"{file} must say in its section lerobot which robot it is, such as "
            "{type: so101_follower, port: /dev/ttyACM0, id: mine}."
        )
    # What the safety filter must know.
    section = raw.get("safety")
    if not isinstance(section, dict) or not isinstance(section.get("joints"), dict):
        raise UserError(
            f"{file} must give the range of each motor, in LeRobot's units, as safety.joints: "
            "{shoulder_pan: [-100, 100], ..., gripper: [0, 100]}."
        )
    safety = build_section("safety", JointSafetyConfig, section)
    return settings, safety
