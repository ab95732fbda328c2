"""Modbus RTU's master: reads and writes registers of one device at a serial port.

A request is the device's number, a function, data, and a CRC with its low byte first
(https://modbus.org/docs/Modbus_over_serial_line_V1_02.pdf). The answer has the same number and
function; with the highest bit of the function set it is a refusal.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence

from embodyrl.real_robot.serial_port import SerialPort

READ = 0x03
WRITE = 0x10
REFUSED = 0x80
REFUSALS = {
    1: "it does not know the function",
    2: "it has no such register",
    3: "a value is not allowed",
    4: "it failed",
}
"""Exception code -> what it says."""


class ModbusError(Exception):
    """What a device answered is of no use; the sentence says why."""


def modbus_crc(data: bytes) -> int:
    """CRC-16 with the polynomial 8005 (hex), from FFFF, least significant bit first."""
    crc = 0xFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0xA001 if crc & 1 else crc >> 1
    return crc


def with_crc(data: bytes) -> bytes:
    """A message with its CRC."""
    return data + struct.pack("<H", modbus_crc(data))


def read_request(device: int, first: int, count: int) -> bytes:
    """Asks for ``count`` registers from the register ``first`` on."""
    return with_crc(struct.pack(">BBHH", device, READ, first, count))


def write_request(device: int, first: int, values: Sequence[int]) -> bytes:
    """Writes registers (16 bits each) from the register ``first`` on."""
    head = struct.pack(">BBHHB", device, WRITE, first, len(values), 2 * len(values))
    return with_crc(head + struct.pack(f">{len(values)}H", *values))


def read_registers(port: SerialPort, device: int, first: int, count: int, seconds: float) -> bytes:
    """The bytes (2 per register) of registers.

    Args:
        port: open.
        device: its number.
        first: the first register.
        count: how many.
        seconds: in which the answer must come.

    Raises:
        ModbusError: no answer in time, or none of use.
        OSError: the port is gone.
    """
    answer = _ask(port, read_request(device, first, count), 5 + 2 * count, seconds)
    if answer[2] != 2 * count:
        raise ModbusError(f"it sent {answer[2]} bytes, not the {2 * count} that were asked for")
    return answer[3:-2]


def write_registers(
    port: SerialPort, device: int, first: int, values: Sequence[int], seconds: float
) -> None:
    """Writes registers (16 bits each) from the register ``first`` on.

    Raises:
        ModbusError: it was not confirmed in time.
        OSError: the port is gone.
    """
    answer = _ask(port, write_request(device, first, values), 8, seconds)
    if struct.unpack(">HH", answer[2:6]) != (first, len(values)):
        raise ModbusError("it confirmed to have written other registers")


def _ask(port: SerialPort, request: bytes, size: int, seconds: float) -> bytes:
    """Sends a request, and returns an answer of ``size`` bytes whose CRC is right."""
    port.write(request)
    until = time.monotonic() + seconds
    answer = b""
    # A refusal is 5 bytes long, the second of which says that it is one.
    while len(answer) < (5 if len(answer) > 1 and answer[1] & REFUSED else size):
        received = port.read(until)
        if not received:
            part = f" ({len(answer)} of {size} bytes came)" if answer else ""
            raise ModbusError(f"it did not answer within {seconds * 1e3:.0f} ms{part}")
        answer += received
    if answer[1] & REFUSED:
        answer = answer[:5]
    if len(answer) > size or modbus_crc(answer[:-2]) != struct.unpack("<H", answer[-2:])[0]:
        raise ModbusError("its answer was damaged on the way (the CRC is wrong): look at the cable")
    if answer[0] != request[0] or answer[1] & ~REFUSED != request[1]:
        raise ModbusError(
            f"device {answer[0]} answered to function {answer[1]:02X}, not device {request[0]} to "
            f"{request[1]:02X}"
        )
    if answer[1] & REFUSED:
        raise ModbusError(f"it refused (code {answer[2]}): {REFUSALS.get(answer[2], '?')}")
    return answer
