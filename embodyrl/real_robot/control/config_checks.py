"""Checks the numbers of a config: a limit that is no number would switch its guard off."""

from __future__ import annotations

from numbers import Real
from typing import Any

from embodyrl.errors import UserError


def require_number(key: str, value: Any, low: float, high: float, why: str) -> None:
    """Checks that a config's value is a finite number in a range.

    Args:
        key: the full name of the value, for the message.
        value: given by the user.
        low: smallest value.
        high: largest value.
        why: what the range comes from, the end of a sentence.

    Raises:
        UserError: it is not.
    """
    # Written so that NaN fails.
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not (number and low <= float(value) <= high):
        raise UserError(f"{key} is {value!r}. It must be a number from {low:g} to {high:g}: {why}.")
