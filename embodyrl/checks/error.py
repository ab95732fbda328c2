"""The error of all checks."""

from __future__ import annotations


class CheckError(AssertionError):
    """A promise of a contract is not kept; the message says which, and where to look."""


def require(holds: bool, sentence: str) -> None:
    """Raises a ``CheckError`` with that sentence unless ``holds``."""
    if not holds:
        raise CheckError(sentence)
