"""Which camera of a data set is which one of an env, and what is advised where none is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embodyrl.data.camera_names import dataset_cameras
from embodyrl.data.lerobot_read import IMAGE_PREFIX, DatasetFiles
from embodyrl.errors import UserError
from embodyrl.types import EnvSpec


def data(*names: str) -> DatasetFiles:
    features = {key: {"dtype": "video", "shape": [8, 8, 3]} for key in names}
    return DatasetFiles(
        Path("d"), {"features": features}, {}, {}, [], {}, [], [], np.zeros(0, np.int64)
    )


def spec(*names: str) -> EnvSpec:
    return EnvSpec("test/arm", 1, 2, 3, "delta", 10.0, 9, dict.fromkeys(names, (8, 8)))


PUBLIC = data(f"{IMAGE_PREFIX}image", f"{IMAGE_PREFIX}image2")


def test_equal_names_single_cameras_profiles_and_what_is_given() -> None:
    own = data(f"{IMAGE_PREFIX}front", "wrist")
    assert dataset_cameras(own, spec("wrist", "front")) == {
        "wrist": "wrist",
        "front": f"{IMAGE_PREFIX}front",
    }
    assert dataset_cameras(data("top"), spec("front")) == {"front": "top"}
    profile = {"front": ("main", "image"), "wrist": ("image2",)}
    found = dataset_cameras(PUBLIC, spec("front", "wrist"), None, profile)
    assert list(found.values()) == [f"{IMAGE_PREFIX}image", f"{IMAGE_PREFIX}image2"]
    # What the user says comes first; the profile fills in the rest.
    found = dataset_cameras(PUBLIC, spec("front", "wrist"), {"front": "image2"}, profile)
    assert list(found.values()) == [f"{IMAGE_PREFIX}image2"] * 2
    assert dataset_cameras(own, None) == {"front": f"{IMAGE_PREFIX}front", "wrist": "wrist"}


@pytest.mark.parametrize(
    ("cameras", "keys", "advice"),
    [
        (("front", "wrist"), ("image", "image2"), "{front: image, wrist: image2}"),
        (("agentview", "wrist"), ("hand_rgb", "scene"), "{agentview: scene, wrist: hand_rgb}"),
        (("front", "wrist"), ("front", "eye"), "{front: front, wrist: eye}"),
        (("left", "right"), ("a", "b", "c"), "{left: a, right: b}"),
    ],
)
def test_the_advice_is_complete_and_is_taken(
    cameras: tuple[str, ...], keys: tuple[str, ...], advice: str
) -> None:
    files = data(*keys)
    with pytest.raises(UserError, match="Say which one to use") as refused:
        dataset_cameras(files, spec(*cameras))
    assert f'"data.cameras={advice}"' in str(refused.value)
    pairs = dict(pair.split(": ") for pair in advice.strip("{}").split(", "))
    assert dataset_cameras(files, spec(*cameras), pairs) == pairs


def test_fewer_cameras_than_the_env_has() -> None:
    with pytest.raises(UserError, match=r"fewer cameras than the env.*env\.cameras=\[front\]"):
        dataset_cameras(data("front"), spec("front", "wrist"))
    with pytest.raises(UserError, match="only has none"):
        dataset_cameras(data(), spec("front"))
