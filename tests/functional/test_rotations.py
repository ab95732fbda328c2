"""Rotation vectors and matrices, beside SciPy's, also near no turn and half a turn."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from embodyrl.functional.rotations import (
    quaternion_matrices,
    rotation_matrices,
    rotation_vectors,
)

AXES = np.random.default_rng(0).normal(size=(40, 3))
AXES = np.concatenate([AXES, np.eye(3), -np.eye(3)])
AXES /= np.linalg.norm(AXES, axis=1, keepdims=True)


@pytest.mark.parametrize("angle", [0.0, 1e-9, 1e-4, 0.3, 2.0, np.pi - 1e-4, np.pi - 1e-8, np.pi])
def test_both_ways_are_scipys(angle: float) -> None:
    vectors = angle * AXES
    matrices = rotation_matrices(vectors)
    np.testing.assert_allclose(matrices, Rotation.from_rotvec(vectors).as_matrix(), atol=1e-8)
    back = rotation_vectors(matrices)
    assert np.linalg.norm(back, axis=1) == pytest.approx(angle, abs=1e-7)
    np.testing.assert_allclose(rotation_matrices(back), matrices, atol=1e-7)


def test_batches_of_any_shape() -> None:
    vectors = 0.5 * AXES[:24].reshape(2, 3, 4, 3)
    np.testing.assert_allclose(rotation_vectors(rotation_matrices(vectors)), vectors, atol=1e-9)


def test_quaternions_are_scipys() -> None:
    drawn = np.random.default_rng(1).normal(size=(3, 20, 4))
    drawn /= np.linalg.norm(drawn, axis=-1, keepdims=True)
    drawn[0, :4] = [[1, 0, 0, 0], [-1, 0, 0, 0], [0, 0, 1, 0], [0, -1, 0, 0]]
    wanted = Rotation.from_quat(drawn.reshape(-1, 4), scalar_first=True).as_matrix()
    found = quaternion_matrices(drawn)
    assert found.shape == (3, 20, 3, 3)
    np.testing.assert_allclose(found.reshape(-1, 3, 3), wanted, atol=1e-9)
