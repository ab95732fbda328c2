"""Rotation vectors and matrices, and actions between absolute targets and changes."""

from __future__ import annotations

import numpy as np


def rotation_matrices(vectors: np.ndarray) -> np.ndarray:
    """Rotation matrices (..., 3, 3) of rotation vectors (..., 3) in radians, by Rodrigues' formula."""
    angle = np.linalg.norm(vectors, axis=-1)[..., None, None]
    x, y, z = np.moveaxis(vectors.astype(np.float64), -1, 0)
    zero = np.zeros_like(x)
    cross = np.stack([zero, -z, y, z, zero, -x, -y, x, zero], axis=-1).reshape(*x.shape, 3, 3)
    cross = cross / np.maximum(angle, 1e-9)
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * (cross @ cross)


def quaternion_matrices(quaternions: np.ndarray) -> np.ndarray:
    """Rotation matrices (..., 3, 3) of unit quaternions (..., 4), the real part first."""
    real, imaginary = quaternions[..., 0].astype(np.float64), quaternions[..., 1:]
    angle = 2 * np.arctan2(np.linalg.norm(imaginary, axis=-1), real)
    length = np.maximum(np.linalg.norm(imaginary, axis=-1), 1e-12)
    return rotation_matrices(imaginary * (angle / length)[..., None])


def rotation_vectors(matrices: np.ndarray) -> np.ndarray:
    """Rotation vectors (..., 3) of rotation matrices (..., 3, 3), of angles from 0 to pi."""
    m = np.asarray(matrices, dtype=np.float64)
    off = np.stack(
        [m[..., 2, 1] - m[..., 1, 2], m[..., 0, 2] - m[..., 2, 0], m[..., 1, 0] - m[..., 0, 1]],
        axis=-1,
    )  # 2 sin(angle) axis
    sine = 0.5 * np.linalg.norm(off, axis=-1)
    cosine = 0.5 * (np.trace(m, axis1=-2, axis2=-1) - 1)
    angle = np.arctan2(sine, cosine)
    # Near no turn the vector is half of `off`, which is 2 sin(angle) axis.
    small = sine < 1e-6
    vectors = off * (0.5 * np.where(small, 1.0, angle) / np.where(small, 1.0, sine))[..., None]
    # Near half a turn the sine says nothing. There (m + 1) / 2 is axis axis^T.
    half = small & (cosine < 0)
    if half.any():
        outer = 0.5 * (m[half] + np.eye(3))
        column = np.diagonal(outer, axis1=-2, axis2=-1).argmax(axis=-1)
        axis = np.take_along_axis(outer, column[:, None, None], axis=-1)[..., 0]
        axis /= np.linalg.norm(axis, axis=-1, keepdims=True)
        vectors[half] = axis * angle[half][:, None]
    return vectors


def change_towards(target: np.ndarray, pose: np.ndarray) -> np.ndarray:
    """The changes (..., D) in metres and radians that lead from poses to targets.

    A rotation is the one in world axes, as robosuite's OSC_POSE applies it: R(change) R(pose) =
    R(target).

    Args:
        target: (..., D), position and, where D is 6, rotation vector.
        pose: (..., D) likewise.
    """
    moved = target[..., :3] - pose[..., :3]
    if target.shape[-1] == 3:
        return moved
    turned = rotation_matrices(target[..., 3:]) @ np.swapaxes(
        rotation_matrices(pose[..., 3:]), -1, -2
    )
    return np.concatenate([moved, rotation_vectors(turned)], axis=-1)
