"""A leader arm's servos on a pseudo-terminal: they speak Dynamixel Protocol 2.0, and can fail.

The packets are made and read here by code of their own, not by that which is tested.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import time
from pathlib import Path

from cable_end import CableEnd

POLYNOMIAL = 0x18005


def crc(data: bytes) -> bytes:
    """The remainder of the polynomial division, written as a division of one long number."""
    number = int.from_bytes(data, "big") << 16
    for shift in range(number.bit_length() - 17, -1, -1):
        if number >> (shift + 16) & 1:
            number ^= POLYNOMIAL << shift
    return struct.pack("<H", number & 0xFFFF)


def status(servo: int, position: int, error: int = 0) -> bytes:
    body = b"\x55" + bytes([error]) + struct.pack("<i", position)
    body = body.replace(b"\xff\xff\xfd", b"\xff\xff\xfd\xfd")
    head = b"\xff\xff\xfd\x00" + bytes([servo]) + struct.pack("<H", len(body) + 2)
    return head + body + crc(head + body)


class LeaderDevice(CableEnd):
    """The servos 1 to 8 at the end of a cable whose other end is the file ``path``.

    Attributes:
        angles: rad, of each servo.
        fault: what goes wrong: ``""``, ``"crc"``, ``"short"``, ``"alert"``, ``"refuses"`` or
            ``"silent"``.
    """

    def __init__(self, path: Path) -> None:
        self.angles = [0.0] * 8
        self.fault = ""
        self.asked = 0
        super().__init__(path)

    def _serve(self, cable: int) -> None:
        os.set_blocking(cable, False)
        data = b""
        while self.plugged:
            with contextlib.suppress(OSError):  # nothing there, or nobody at the other end
                data += os.read(cable, 1024)
            if len(data) >= 7 and len(data) >= (end := 7 + struct.unpack_from("<H", data, 5)[0]):
                os.write(cable, self._answer(data[:end]))
                data = data[end:]
            time.sleep(0.001)

    def _answer(self, asked: bytes) -> bytes:
        assert asked[:5] == b"\xff\xff\xfd\x00\xfe" and asked[7] == 0x82, asked.hex()
        assert asked[8:12] == b"\x84\x00\x04\x00" and asked[-2:] == crc(asked[:-2]), asked.hex()
        self.asked += 1
        packets = [
            bytearray(status(servo, round(self.angles[servo - 1] / (2 * math.pi) * 4096)))
            for servo in asked[12:-2]
        ]
        if self.fault == "silent":
            return b""
        if self.fault == "crc":
            packets[2][9] ^= 0x10
        elif self.fault == "short":
            packets[-1] = packets[-1][:8]
        elif self.fault in ("alert", "refuses"):
            packets[4] = bytearray(status(5, 0, 0x80 if self.fault == "alert" else 0x02))
        return b"\x00\xff" + b"".join(packets)  # noise before it, as when a bus is switched
