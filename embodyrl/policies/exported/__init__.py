"""Policies that run without PyTorch: what writes them, and ``runner``, which runs them."""

from __future__ import annotations

from pathlib import Path

from embodyrl.errors import UserError
from embodyrl.policies.exported.runner import SUFFIXES, PolicyFile, PolicyFileError


def is_policy_file(path: str | Path) -> bool:
    """Whether a path names an exported policy, and no checkpoint."""
    return Path(path).suffix in SUFFIXES


def open_policy_file(path: str | Path, seed: int = 0) -> PolicyFile:
    """An exported policy.

    Raises:
        UserError: it cannot be run here.
    """
    try:
        return PolicyFile(path, seed)
    except PolicyFileError as error:
        raise UserError(str(error)) from error
