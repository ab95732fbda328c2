"""From one convention to another: what is translated, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf

from embodyrl.data.conventions import convention_override
from embodyrl.errors import UserError
from embodyrl.functional.rotations import rotation_matrices, rotation_vectors
from embodyrl.storage.env_spec import conventions_from_json
from embodyrl.storage.preset_files import apply_overrides
from embodyrl.storage.profiles import PROFILES, profile_named
from embodyrl.storage.translation import translate
from embodyrl.types import Conventions, EnvSpec

OURS = Conventions(
    orientation="upright",
    channels="rgb",
    actions="delta",
    scale=(0.05, 0.05, 0.5),
    gripper=(-1.0, 1.0),
    state=("hand_position:3",),
)
SPEC = EnvSpec("test/arm", 1, 4, 3, "delta", 20.0, 50, {"front": (8, 8)}, conventions=OURS)

STATES = np.zeros((6, 3), np.float32)


def actions(rows: int = 6) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, size=(rows, 4)).astype(np.float32)


def test_nothing_is_done_where_nothing_is_known_or_all_is_equal() -> None:
    for theirs in (Conventions(), OURS):
        change = translate(theirs, SPEC, "d")
        assert change.said() == "" and not change.factor
        np.testing.assert_array_equal(change.of_actions(actions(), np.zeros(6), STATES), actions())


def test_scale_sign_and_gripper_are_mapped() -> None:
    theirs = Conventions(scale=(0.1, -0.05, 0.5), gripper=(1.0, 0.0))
    raw = np.array([[0.2, 0.3, -0.4, 1.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
    found = translate(theirs, SPEC, "d").of_actions(raw, np.zeros(2), STATES[:2])
    np.testing.assert_allclose(found, [[0.4, -0.3, -0.4, -1.0], [0, 0, 0, 1.0]], atol=1e-6)


@pytest.mark.parametrize("lag", [1, -1])
def test_lag_moves_actions_within_an_episode(lag: int) -> None:
    episode = np.array([0, 0, 0, 1, 1, 1])
    right = actions()
    shifted = right.copy()
    for rows in (slice(0, 3), slice(3, 6)):
        shifted[rows] = np.roll(right[rows], lag, axis=0)
    found = translate(Conventions(lag=lag), SPEC, "d").of_actions(shifted, episode, STATES)
    known = [0, 1, 3, 4] if lag == 1 else [1, 2, 4, 5]
    np.testing.assert_array_equal(found[known], right[known])


@pytest.mark.parametrize(
    "theirs", [Conventions(actions="velocity"), Conventions(state=("hand_position:2",))]
)
def test_what_has_no_translation_is_refused_in_words(theirs: Conventions) -> None:
    with pytest.raises(UserError, match=r"differ from those of test/arm .* no translation"):
        translate(theirs, SPEC, "d")


def pose_spec(*state: str) -> EnvSpec:
    conventions = replace(OURS, scale=(0.05,) * 3 + (0.5,) * 3, state=state)
    return EnvSpec("test/arm", 1, 7, 8, "delta", 20.0, 50, {}, conventions=conventions)


def test_absolute_poses_become_the_changes_that_lead_to_them() -> None:
    rng = np.random.default_rng(0)
    changes = rng.uniform(-1, 1, size=(50, 7))
    states = rng.normal(size=(50, 8))
    # As robosuite's OSC_POSE: the goal is where the hand is, turned in world axes and moved.
    goal = rotation_matrices(0.5 * changes[:, 3:6]) @ rotation_matrices(states[:, 3:6])
    position = states[:, :3] + 0.05 * changes[:, :3]
    targets = np.column_stack([position, rotation_vectors(goal), changes[:, 6:]])
    spec = pose_spec("hand_position:3", "hand_axis_angle:3", "fingers:2")
    found = translate(Conventions(actions="absolute"), spec, "d")
    np.testing.assert_allclose(found.of_actions(targets, np.zeros(50), states), changes, atol=1e-5)
    assert found.said() == "absolute targets become changes"


def test_absolute_poses_without_a_pose_in_the_state_are_refused() -> None:
    for state in ((), ("hand_position:3", "hand_quat_xyzw:4")):
        with pytest.raises(UserError, match="no translation"):
            translate(Conventions(actions="absolute"), pose_spec(*state), "d")


def test_a_scale_of_other_dims_is_refused() -> None:
    with pytest.raises(UserError, match="There are 2 scales"):
        translate(replace(OURS, scale=(1.0, 1.0)), SPEC, "d")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"orientation": "sideways"}, "one of upright, upside_down"),
        ({"orientatoin": "upright"}, "Did you mean 'orientation'"),
        ({"gripper": [1, 1]}, "close and open"),
        ({"gripper": [1]}, "close and open"),
        ({"scale": [0.0]}, "scale holds a 0"),
        ({"scale": "big"}, "scale must be a list"),
        ({"lag": 3}, "-1, 0 or 1"),
        ({"lag": True}, "-1, 0 or 1"),
    ],
)
def test_a_wrong_field_or_value_is_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        conventions_from_json(given, "data.convention")


@pytest.mark.parametrize(
    "fix",
    [
        {"orientation": "turned_180"},
        {"gripper": (1.0, 0.0), "lag": 1},
        {"scale": (-0.035, 0.035, 0.035)},
        {"state": ("hand_position:3", "fingers:2")},
    ],
)
def test_what_is_advised_is_read_as_it_was_meant(fix: dict[str, object]) -> None:
    section = cast(DictConfig, apply_overrides({}, [convention_override(fix)]).data.convention)
    given = cast(dict[str, object], OmegaConf.to_container(section))
    assert conventions_from_json(given) == Conventions(**fix)  # type: ignore[arg-type]


def test_profiles_say_what_can_be_said() -> None:
    for name, profile in PROFILES.items():
        known = {k: v for k, v in vars(profile.conventions).items() if v}
        assert conventions_from_json(known) == profile.conventions, name
        assert profile.about and profile.source and profile.rate > 0
    with pytest.raises(UserError, match=r"no profile 'libero_lerobt'.*'libero_lerobot'"):
        profile_named("libero_lerobt")
