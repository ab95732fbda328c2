"""Camera images, fit to the size that the policy sees."""

from __future__ import annotations

import numpy as np

from embodyrl.real_robot import images


def test_a_picture_is_cut_to_shape_and_scaled() -> None:
    image = np.zeros((48, 64, 3), np.uint8)
    image[:, 8:56] = 200  # the middle square
    np.testing.assert_array_equal(images.fit(image, (12, 12)), np.full((12, 12, 3), 200, np.uint8))
    assert images.fit(image, (48, 64)) is image
    assert images.fit(image, (96, 128)).shape == (96, 128, 3)
