"""``private_numpy_stream``: for packages that draw from numpy's global generator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def private_numpy_stream(seed: int | list[int]) -> Iterator[None]:
    """Seeds numpy's global generator for a while, and restores it afterwards."""
    before = np.random.get_state()  # noqa: NPY002
    np.random.seed(np.random.SeedSequence(seed).generate_state(4))  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002
