"""A policy whose pictures or actions mean something else is refused before an arm moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from embodyrl.errors import UserError
from embodyrl.real_robot.control.actions import SPACES, action_space
from embodyrl.real_robot.env.config import RobotConfig, robot_spec
from embodyrl.real_robot.parsing import MessageError
from embodyrl.real_robot.policy_link.metadata import check_metadata, policy_facts
from embodyrl.types import EnvSpec


def facts(**changed: Any) -> dict[str, Any]:
    spec: EnvSpec = robot_spec(RobotConfig(control_mode="ee_delta_pose"), 13)
    meaning = replace(spec.conventions, **changed)
    return policy_facts(replace(spec, conventions=meaning)) | {"horizon": 5, "execute": 5}


def test_what_is_equal_or_not_known_passes() -> None:
    assert facts()["conventions"]["gripper"] == [-1.0, 1.0]
    for known in (facts(), facts(orientation="", scale=()), {**facts(), "conventions": {}}):
        check_metadata(known)
        assert action_space(known) == SPACES["robot", "ee_delta_pose"]
    older = facts()
    del older["conventions"]
    assert action_space(older).dims == 7


@pytest.mark.parametrize(
    "changed",
    [
        {"orientation": "mirrored"},
        {"channels": "bgr"},
        {"gripper": (0.0, 1.0)},
        {"scale": (0.05,) * 6},
        {"actions": "absolute"},
    ],
)
def test_what_differs_is_refused_by_name(changed: dict[str, Any]) -> None:
    (name,) = changed
    with pytest.raises(UserError, match=rf"trained with {name} .*data\.convention="):
        action_space(facts(**changed))


def test_conventions_that_are_no_map_are_refused() -> None:
    with pytest.raises(MessageError, match="conventions must be a map"):
        check_metadata({**facts(), "conventions": ["upright"]})
