"""Reads the angles of Dynamixel servos: Protocol 2.0, as ROBOTIS specifies it.

A packet is FF FF FD 00, the servo's number, the length of what follows (two bytes, low first), an
instruction, parameters, and a CRC of all before it (https://emanual.robotis.com/docs/en/dxl/protocol2/).
Sync Read asks several servos for the same registers; each answers with a Status packet of its own.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Sequence

from embodyrl.real_robot.serial_port import SerialPort

HEADER = b"\xff\xff\xfd\x00"
BROADCAST = 0xFE
SYNC_READ = 0x82
STATUS = 0x55
PRESENT_POSITION = (132, 4)
"""Address and bytes of the register, in the X series."""
TICK = 2.0 * math.pi / 4096
"""rad of a count of the position."""
ALERT = 0x80
"""Bit of the error byte: the servo's Hardware Error Status is set."""
ERRORS = {
    1: "it could not do that (result fail)",
    2: "it does not know the instruction",
    3: "it received a broken packet (CRC)",
    4: "a value was out of range",
    5: "data were too short or too long",
    6: "a value was beyond its limit",
    7: "that register may not be read now",
}
"""Number in the error byte -> what it says."""


class ServoError(Exception):
    """What a servo answered is of no use; the sentence says why."""


def crc16(data: bytes) -> int:
    """CRC-16 with the polynomial 8005 (hex), from 0, most significant bit first."""
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x8005 if crc & 0x8000 else crc << 1) & 0xFFFF
    return crc


def packet(servo: int, instruction: int, parameters: bytes) -> bytes:
    """A whole packet."""
    # FF FF FD inside a packet is followed by another FD, so that it is no header.
    body = bytes([instruction]) + parameters
    body = body.replace(HEADER[:3], HEADER[:3] + b"\xfd")
    head = HEADER + bytes([servo]) + struct.pack("<H", len(body) + 2)
    return head + body + struct.pack("<H", crc16(head + body))


def sync_read(servos: Sequence[int], register: tuple[int, int] = PRESENT_POSITION) -> bytes:
    """The packet that asks ``servos`` for a register (address, bytes)."""
    return packet(BROADCAST, SYNC_READ, struct.pack("<HH", *register) + bytes(servos))


def take_packet(data: bytes) -> tuple[bytes | None, bytes]:
    """The first whole packet of what was received, and what comes after it; None if none is whole."""
    start = data.find(HEADER)
    if start < 0:
        return None, data[-3:]  # a header may have begun
    data = data[start:]
    if len(data) < 7:
        return None, data
    # The length counts what comes after it: instruction, parameters and CRC.
    end = 7 + struct.unpack_from("<H", data, 5)[0]
    return (None, data) if len(data) < end else (data[:end], data[end:])


def answer(status: bytes) -> tuple[int, bytes]:
    """The servo and the parameters of a Status packet.

    Raises:
        ServoError: the CRC is wrong, it is no answer, or it tells of an error.
    """
    servo = status[4]
    # 1. It came through the cable as it was sent.
    if len(status) < 11 or crc16(status[:-2]) != struct.unpack("<H", status[-2:])[0]:
        raise ServoError(
            f"what servo {servo} answered was damaged on the way (its CRC is wrong): look at the "
            "cable"
        )
    # 2. It is an answer.
    body = status[7:-2].replace(HEADER[:3] + b"\xfd", HEADER[:3])
    if body[0] != STATUS:
        raise ServoError(f"servo {servo} did not answer (instruction {body[0]:02X}, not 55)")
    # 3. The servo is well.
    error = body[1]
    if error & ALERT:
        raise ServoError(
            f"servo {servo} reports a hardware error (overload, heat or voltage): switch the "
            "leader off and on, and look at that joint"
        )
    if error:
        raise ServoError(f"servo {servo} answers with error {error}: {ERRORS.get(error, '?')}")
    return servo, body[2:]


def bits(servos: int) -> int:
    """Bits on the cable, with start and stop bits, that asking so many servos takes."""
    return 10 * (len(sync_read(range(servos))) + servos * (11 + PRESENT_POSITION[1]))


def read_angles(port: SerialPort, servos: Sequence[int], seconds: float) -> list[float]:
    """The angles (rad) of servos, asked in one packet.

    Args:
        port: open.
        servos: their numbers.
        seconds: in which all must answer.

    Raises:
        ServoError: one does not answer in time, or with something else than its angle.
        OSError: the port is gone.
    """
    # One question for all.
    port.write(sync_read(servos))
    until = time.monotonic() + seconds
    angles: dict[int, float] = {}
    data = b""
    while len(angles) < len(servos):
        received = port.read(until)
        if not received:
            silent = ", ".join(str(servo) for servo in servos if servo not in angles)
            part = f" ({len(data)} bytes of an answer came)" if data else ""
            raise ServoError(
                f"servo {silent} did not answer within {seconds * 1e3:.0f} ms{part}: is the leader "
                "switched on, and are leader.ids and leader.baud right?"
            )
        # Answers come one after the other, and may be cut anywhere.
        data += received
        while True:
            status, data = take_packet(data)
            if status is None:
                break
            servo, parameters = answer(status)
            if servo not in servos or len(parameters) != PRESENT_POSITION[1]:
                raise ServoError(
                    f"servo {servo} answered with {len(parameters)} bytes, not the "
                    f"{PRESENT_POSITION[1]} of its position"
                )
            angles[servo] = struct.unpack("<i", parameters)[0] * TICK
    return [angles[servo] for servo in servos]
