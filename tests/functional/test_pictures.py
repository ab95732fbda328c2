"""Pictures: fit to the size that the policy sees, and turned."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from embodyrl.functional import pictures


def test_a_picture_is_cut_to_shape_and_scaled() -> None:
    image = np.zeros((48, 64, 3), np.uint8)
    image[:, 8:56] = 200  # the middle square
    np.testing.assert_array_equal(
        pictures.fit(image, (12, 12)), np.full((12, 12, 3), 200, np.uint8)
    )
    assert pictures.fit(image, (48, 64)) is image
    assert pictures.fit(image, (96, 128)).shape == (96, 128, 3)


def test_a_picture_is_squeezed_or_padded_where_that_is_the_convention() -> None:
    image = np.zeros((48, 64, 3), np.uint8)
    image[:, 32:] = 200  # its right half
    small = pictures.fit(image, (16, 16), "squeeze")
    assert (small[:, :8] == 0).all() and (small[:, 8:] == 200).all()
    padded = pictures.fit(np.full((48, 64, 3), 200, np.uint8), (16, 16), "pad")
    assert (padded[2:14] == 200).all() and not padded[:2].any() and not padded[14:].any()


@pytest.mark.parametrize(("one", "other"), list(itertools.product(pictures.FLIPS, repeat=2)))
def test_a_picture_turned_from_one_orientation_to_another_is_as_drawn_in_it(one, other) -> None:
    seen = np.random.default_rng(0).integers(256, size=(5, 7, 3), dtype=np.uint8)
    drawn = {name: pictures.turn(seen, *flips, False) for name, flips in pictures.FLIPS.items()}
    rows, columns = pictures.flips_between(one, other)
    np.testing.assert_array_equal(pictures.turn(drawn[one], rows, columns, False), drawn[other])
    assert pictures.orientation_after(one, rows, columns) == other


def test_channels_are_swapped_and_nothing_else() -> None:
    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    np.testing.assert_array_equal(pictures.turn(image, False, False, True), image[..., ::-1])
