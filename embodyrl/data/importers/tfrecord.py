"""Reads TFRecord files of ``tf.train.Example`` without TensorFlow.

A file is a row of records: the length (8 bytes), its checksum (4), the data, their checksum (4). The
data are a message of protocol buffers: a map from names to lists of bytes, floats or whole numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from embodyrl.errors import UserError
from embodyrl.storage.paths import require_readable

Feature = list[bytes] | np.ndarray
"""A list of bytes, float32 or int64 (n,)."""
MAX_RECORD = 1 << 31
"""Bytes of the largest record that is read."""
REMEDY = "Fetch the file again."
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, reflected


class _DamagedError(Exception):
    pass


def read_examples(file: Path) -> Iterator[dict[str, Feature]]:
    """The examples of a TFRecord file, each as name -> values.

    The checksum of each length is compared. That of the data is not: in Python it would take longer
    than all the rest, and damaged pictures and messages cannot be decoded anyway.

    Raises:
        UserError: the file is damaged or cut.
    """
    require_readable(file)
    with file.open("rb") as stream:
        number = 0
        while header := stream.read(12):
            where = f"Record {number} of {file}"
            if len(header) < 12:
                raise UserError(f"{where} is cut. {REMEDY}")
            length, checksum = struct.unpack("<QI", header)
            # A wrong length would lead to a wrong place.
            if _masked_crc(header[:8]) != checksum or length > MAX_RECORD:
                raise UserError(f"{where} does not begin as one of a TFRecord file does. {REMEDY}")
            data = stream.read(length + 4)
            if len(data) < length + 4:
                raise UserError(f"{where} is cut. {REMEDY}")
            try:
                example = _example(memoryview(data)[:length])
            except (_DamagedError, ValueError, IndexError) as error:
                raise UserError(f"{where} is no tf.train.Example. {REMEDY}") from error
            yield example
            number += 1


def _masked_crc(data: bytes) -> int:
    """TFRecord's masked CRC-32C of a few bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _example(data: memoryview) -> dict[str, Feature]:
    """Example {1: Features {1: map of {1: name, 2: Feature}}}."""
    found: dict[str, Feature] = {}
    for _, features in _messages(data, 1):
        for _, entry in _messages(features, 1):
            parts = dict(_messages(entry))
            found[bytes(parts[1]).decode("utf-8")] = _feature(parts.get(2, memoryview(b"")))
    return found


def _feature(data: memoryview) -> Feature:
    """Feature {1: BytesList, 2: FloatList, 3: Int64List}, each with its values in field 1."""
    for number, values in _messages(data):
        # One of the three kinds is there.
        if number == 1:
            return [bytes(value) for _, value in _messages(values, 1)]
        if number == 2:
            raw = b"".join(bytes(value) for n, _, value in _fields(values) if n == 1)
            return np.frombuffer(raw, "<f4")
        if number == 3:
            return np.array(list(_integers(values)), np.int64)
    return np.zeros(0, np.float32)


def _integers(data: memoryview) -> Iterator[int]:
    """The whole numbers of an Int64List, packed or one by one."""
    for number, kind, value in _fields(data):
        if number != 1:
            continue
        # One by one, or packed.
        if kind == 0:
            yield _signed(int.from_bytes(value, "little"))
            continue
        place = 0
        while place < len(value):
            found, place = _varint(value, place)
            yield _signed(found)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _messages(data: memoryview, only: int = 0) -> Iterator[tuple[int, memoryview]]:
    """The fields of a message that have a length, as (number, content)."""
    for number, kind, value in _fields(data):
        if kind == 2 and only in (0, number):
            yield number, value


def _fields(data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """The fields of a message: number, wire type, and content (of a varint its value, in 8 bytes)."""
    place = 0
    while place < len(data):
        # The tag holds the field's number and how its value is written.
        tag, place = _varint(data, place)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, place = _varint(data, place)
            yield number, kind, memoryview(value.to_bytes(8, "little"))
            continue
        # Content with a length, or of 8 or 4 bytes. Groups (3, 4) are no longer written by anybody.
        if kind == 2:
            length, place = _varint(data, place)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise _DamagedError
        if place + length > len(data):
            raise _DamagedError
        yield number, kind, data[place : place + length]
        place += length


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    """A number in groups of seven bits, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, place
    raise _DamagedError
