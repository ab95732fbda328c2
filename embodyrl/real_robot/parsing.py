"""Reads data from elsewhere: JSON bounded in size and depth, and checked numbers and texts.

Every error is a ``MessageError``, whose message says in words what is wrong.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.errors import UserError

MAX_BYTES = 32 * 2**20
"""Largest message."""
MAX_DEPTH = 16
"""Deepest nesting of JSON; a ROS message with its stamps has 6."""
MAX_PARTS = 2**17
"""Largest number of lists, maps, keys and items of a JSON message. Images are one text each."""
MAX_TEXT = 512
"""Letters of an instruction or a name."""


class MessageError(UserError, ValueError):
    """A message from elsewhere is not what it should be."""


def parse_json(data: str | bytes, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The object that a JSON text holds.

    Args:
        data: the text, or its UTF-8 bytes.
        max_bytes: of a text that is read.

    Raises:
        MessageError: it is not a JSON object, too large or too deep.
    """
    if len(data) > max_bytes:
        raise MessageError(f"the message has {len(data)} bytes; at most {max_bytes} are read")
    try:
        text = data.decode() if isinstance(data, bytes) else data
        # Counted before parsing: a few bytes of text can become a hundred bytes of objects.
        if sum(map(text.count, "[{,:")) > MAX_PARTS:
            raise MessageError(f"the message has more than {MAX_PARTS} parts")
        message = json.loads(text)
    except MessageError:
        raise
    except (ValueError, RecursionError) as error:
        raise MessageError(f"the message is no JSON ({type(error).__name__})") from error
    if not isinstance(message, dict):
        raise MessageError(f"the message is no map but a {type(message).__name__}")
    check_depth(message, MAX_DEPTH)
    return message


def check_depth(value: Any, depth: int) -> None:
    """Checks how deeply lists and maps are nested.

    Raises:
        MessageError: deeper than ``depth``.
    """
    level = [value]
    for _ in range(depth + 1):
        inner = [list(v.values()) if isinstance(v, dict) else v for v in level]
        level = [x for v in inner if isinstance(v, list) for x in v]
        if not level:
            return
    raise MessageError(f"the message is nested deeper than {depth}")


def numbers(values: Any, count: int, what: str, *, finite: bool = True) -> NDArray[np.float64]:
    """Checks a row of numbers.

    Args:
        values: a list or array.
        count: how many there must be.
        what: they are, for the message.
        finite: whether infinities and NaN are refused.

    Returns:
        (count,) array.

    Raises:
        MessageError: another number of values, or no numbers.
    """
    try:
        fits = len(values) == count and all(isinstance(x, int | float) for x in values)
        row = np.array(values if fits else [], float)
    except (TypeError, ValueError, OverflowError):
        fits = False
        row = np.zeros(0)
    if not fits:
        raise MessageError(f"{what} must be {count} numbers")
    if finite and not np.isfinite(row).all():
        raise MessageError(f"{what} must be finite")
    return row


def number(value: Any, low: float, high: float, what: str) -> float:
    """Checks a number.

    Raises:
        MessageError: it is none, or lies outside [low, high].
    """
    # Written so that NaN is refused too. Large integers are compared before they are converted.
    if not isinstance(value, int | float) or not low <= value <= high:
        raise MessageError(
            f"{what} is {shown(value)}; it must be a number from {low:g} to {high:g}"
        )
    return float(value)


def whole(value: Any, low: int, high: int, what: str) -> int:
    """Checks a whole number.

    Raises:
        MessageError: it is none, or lies outside [low, high].
    """
    if type(value) is not int or not low <= value <= high:
        raise MessageError(f"{what} is {shown(value)}; it must be a whole number {low} to {high}")
    return value


def text(value: Any, what: str, most: int = MAX_TEXT) -> str:
    """Checks a text.

    Raises:
        MessageError: it is none, or longer than ``most`` letters.
    """
    if not isinstance(value, str) or len(value) > most:
        raise MessageError(f"{what} must be a text of at most {most} letters")
    return value


def shown(value: Any) -> str:
    """A value from elsewhere for a message or a log: short, on one line and in ASCII."""
    if isinstance(value, int) and abs(value) > 10**18:
        return "a huge number"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str | bytes):
        return f"{value[:60]!a}"
    if isinstance(value, int | float | bool) or value is None:
        return repr(value)
    return f"a {type(value).__name__}"
