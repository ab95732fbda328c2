"""Which change makes recorded pictures those of the env."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embodyrl.data.picture_check import picture_findings, write_comparison
from embodyrl.functional.pictures import FLIPS, turn

RNG = np.random.default_rng(0)


def scenes(count: int = 4, symmetric: bool = False) -> np.ndarray:
    """Blue sky, a brown table, and a red thing, which is in the middle of a symmetric scene."""
    images = np.zeros((count, 32, 32, 3), np.uint8)
    images[:, :12] = (40, 60, 200)
    images[:, 12:] = (140, 110, 70)
    for image in images:
        row = int(RNG.integers(16, 26))
        column = 14 if symmetric else int(RNG.integers(2, 10))
        image[row : row + 4, column : column + 4] = (220, 30, 30)
    return images


def noisy(images: np.ndarray) -> np.ndarray:
    """As a video codec leaves them."""
    return (images + RNG.normal(0, 2, size=images.shape)).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("orientation", FLIPS)
def test_each_orientation_and_order_of_colours_is_found(orientation: str, channels: bool) -> None:
    seen = scenes()
    recorded = noisy(turn(seen, *FLIPS[orientation], channels))
    found = list(picture_findings({"front": recorded}, {"front": seen}, paired=True))
    fix = {key: value for one in found for key, value in one.fix.items()}
    wanted = {} if orientation == "upright" else {"orientation": orientation}
    assert fix == (wanted | {"channels": "bgr"} if channels else wanted)
    assert all(one.certain for one in found)


def test_what_was_known_already_is_counted_in() -> None:
    seen = scenes()
    recorded = turn(seen, False, True, False)  # after a translation that turned them by 180 degrees
    (found,) = picture_findings(
        {"front": recorded}, {"front": seen}, paired=True, orientation="turned_180"
    )
    assert found.fix == {"orientation": "upside_down"}


def test_a_symmetric_scene_gives_no_false_certainty() -> None:
    seen = scenes(symmetric=True)
    recorded = noisy(seen[:, ::-1])
    (found,) = picture_findings({"front": recorded}, {"front": seen}, paired=False)
    assert found.fix == {} and "turned by 180 degrees or upside down" in found.text
    assert "too symmetric" in found.text and not found.certain
    # A camera that is not symmetric decides it.
    other = scenes()
    (found,) = picture_findings(
        {"front": recorded, "wrist": noisy(other[:, ::-1])},
        {"front": seen, "wrist": other},
        paired=False,
    )
    assert found.fix == {"orientation": "upside_down"}


def test_cameras_that_differ_from_one_another_are_named() -> None:
    front, wrist = scenes(), scenes()
    (found,) = picture_findings(
        {"front": front[:, ::-1], "wrist": wrist[:, ::-1, ::-1]},
        {"front": front, "wrist": wrist},
        paired=True,
    )
    assert "The cameras differ in this" in found.text and found.fix == {}


def test_exchanged_cameras_are_named() -> None:
    front = scenes()
    wrist = 255 - scenes()
    (found,) = picture_findings(
        {"front": wrist, "wrist": front}, {"front": front, "wrist": wrist}, paired=True
    )
    assert found.field == "cameras" and "data.cameras={wrist: front, front: wrist}" in found.text


def test_another_scene_is_named_and_an_equal_one_is_not() -> None:
    seen = scenes()
    other = RNG.integers(0, 255, size=seen.shape, dtype=np.uint8)
    (found,) = picture_findings({"front": other}, {"front": seen}, paired=True)
    assert found.field == "pictures" and "do not look like" in found.text
    assert not list(picture_findings({"front": noisy(seen)}, {"front": seen}, paired=True))


def test_the_comparison_is_a_picture(tmp_path: Path) -> None:
    from PIL import Image

    seen = scenes()
    path = write_comparison(tmp_path / "x.png", {"front": seen}, {"front": seen}, paired=True)
    assert Image.open(path).size == (4 * 128, 2 * (128 + 16) + 16)
