"""Encodes messages as msgpack with numpy arrays, the way openpi does. Reading runs no code.

An array is a map of ``__ndarray__``, ``data``, ``dtype`` and ``shape``, with bytes as keys
(msgpack-numpy's format, as in openpi_client.msgpack_numpy). Only the dtypes below are read, and
sizes, depths and counts are bounded.
"""

from __future__ import annotations

import math
from typing import Any

import msgpack
import numpy as np

from embodyrl.real_robot.parsing import MAX_BYTES, MessageError, check_depth

MAX_DEPTH = 5
"""Deepest nesting of lists and maps."""
MAX_ITEMS = 256
"""Largest number of items in a list or a map."""
MAX_LISTS = 4096
"""Largest number of lists and maps in a message: an empty one is a byte here, but 64 in memory."""
DTYPES = frozenset(
    np.dtype(name).str
    for name in ("bool", "u1", "i1", "<i2", "<i4", "<i8", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8")
)


def pack(message: Any) -> bytes:
    """Encodes nested dicts and lists of numbers, strings, bytes, None and numpy arrays."""
    data = msgpack.packb(message, default=_encode)
    assert data is not None
    return data


def unpack(data: bytes) -> Any:
    """Decodes what ``pack`` wrote; arrays are read-only views of ``data``.

    Raises:
        MessageError: ``pack`` would not write that.
    """
    if len(data) > MAX_BYTES:
        raise MessageError(f"The message has {len(data)} bytes; at most {MAX_BYTES} are read.")
    lists = 0

    def count(item: Any) -> Any:
        nonlocal lists
        lists += 1
        if lists > MAX_LISTS:
            raise MessageError(f"The message has more than {MAX_LISTS} lists and maps.")
        return item

    # msgpack bounds the sizes; the depth is checked afterwards.
    try:
        message = msgpack.unpackb(
            data,
            object_hook=lambda item: _decode(count(item)),
            list_hook=count,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
        check_depth(message, MAX_DEPTH)
        return message
    except MessageError:
        raise
    except (
        ValueError,
        TypeError,
        KeyError,
        RecursionError,
        OverflowError,
        msgpack.UnpackException,
    ) as error:
        raise MessageError(f"The message is not understood ({type(error).__name__}).") from error


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.str in DTYPES:
        return {
            b"__ndarray__": True,
            b"data": np.ascontiguousarray(value).tobytes(),
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }
    if isinstance(value, np.generic) and value.dtype.str in DTYPES:
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"A message cannot hold a {type(value).__name__} ({value!r:.60}).")


def _decode(item: dict[Any, Any]) -> Any:
    if b"__npgeneric__" in item:
        return np.dtype(_dtype(item)).type(item[b"data"])
    if b"__ndarray__" not in item:
        return item
    dtype = np.dtype(_dtype(item))
    shape = item[b"shape"]
    data = item[b"data"]
    # The product of the shape is only taken once its numbers are known to be small.
    valid = (
        isinstance(data, bytes)
        and len(shape) <= 5
        and all(type(n) is int and 0 <= n <= MAX_BYTES for n in shape)
    )
    if not valid or math.prod(shape) * dtype.itemsize != len(data):
        raise MessageError("The message has an array whose shape does not fit its data.")
    return np.frombuffer(data, dtype).reshape(shape)


def _dtype(item: dict[Any, Any]) -> str:
    name = item[b"dtype"]
    name = name.decode("ascii", "replace") if isinstance(name, bytes) else name
    if not isinstance(name, str) or name not in DTYPES:
        raise MessageError("The message has an array of a dtype that is not allowed.")
    return name
