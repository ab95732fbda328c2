"""Limits that are no limits are refused, in words that name the key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from embodyrl.errors import UserError
from embodyrl.real_robot.control.actions import SPACES, DeltaDecoder
from embodyrl.real_robot.control.executor import ExecutorConfig
from embodyrl.real_robot.control.fuzz import BOX
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.real_robot.libfranka.config import Franka
from embodyrl.real_robot.ros.config import Topics

NUMBERS = (
    "tick", "max_tilt", "ee_speed", "ee_turn", "max_lead", "max_error", "max_target_age",
    "max_state_age", "max_gap", "max_force", "max_force_repeat", "follow",
)  # fmt: skip
NO_LIMITS = (float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 1e9, "1", True)


@pytest.mark.parametrize("key", NUMBERS)
def test_a_limit_must_be_a_finite_number_in_its_range(key: str) -> None:
    for value in NO_LIMITS:
        if (key, value) == ("follow", True):
            continue
        with pytest.raises(UserError, match=f"safety.{key} is .*It must be a number from"):
            SafetyConfig(**{**BOX, key: value})  # type: ignore[arg-type]


def test_every_number_of_the_config_is_checked() -> None:
    plain = SafetyConfig(**BOX)  # type: ignore[arg-type]
    numbers = {k for k, v in vars(plain).items() if isinstance(v, float)}
    assert numbers == set(NUMBERS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ee_speed": 1.8, "robot": "panda"}, "1.7: m/s, and the data sheet of the panda"),
        ({"ee_speed": 3.1}, "0.001 to 3: m/s, and the data sheet of the fr3"),
        ({"ee_turn": 2.6}, "2.5: rad/s, and the data sheet"),
        ({"max_gap": 0.005}, "at least a tick"),
        ({"robot": "fr33"}, "Did you mean 'fr3'"),
        ({"recover_reflex": "no"}, "true or false"),
        ({"box_low": (np.nan, 0, 0)}, "not a box"),
        ({"box_high": (0.7, np.inf, 0.6)}, "not a box within 2 m"),
        ({"box_low": (-np.inf, 0, 0)}, "not a box within 2 m"),
    ],
)
def test_a_limit_is_no_wider_than_the_robots(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        SafetyConfig(**{**BOX, **changes})


def test_no_force_stop_must_be_said() -> None:
    assert SafetyConfig(**BOX, max_force=None).max_force is None  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_the_other_settings_of_the_safety_path_are_checked_too(value: float) -> None:
    for make, key in (
        (lambda: Topics(max_image_age=value), "topics.max_image_age"),
        (lambda: Topics(max_clock_jump=value), "topics.max_clock_jump"),
        (lambda: Franka(max_image_age=value), "libfranka.max_image_age"),
        (lambda: Franka(patience=value), "libfranka.patience"),
        (lambda: Franka(gripper_speed=value), "libfranka.gripper_speed"),
        (lambda: Franka(gripper_force=value), "libfranka.gripper_force"),
        (lambda: ExecutorConfig(8, 4, value), "control_hz"),
        (lambda: ExecutorConfig(8, 4, 25.0, patience=value), "patience"),
        (lambda: ExecutorConfig(8, 4, 25.0, ensemble_decay=value), "ensemble_decay"),
        (lambda: DeltaDecoder(SPACES["robot", "ee_delta_pos"], value, **BOX), "control_hz"),
    ):
        with pytest.raises(UserError, match=f"{key} is .*It must be a number"):
            make()
