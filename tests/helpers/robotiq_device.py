"""A Robotiq 2F on a pseudo-terminal: it speaks Modbus RTU, moves, grasps, and can fail.

The bytes are made and read here by code of their own, not by that which is tested.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from cable_end import CableEnd

ADDRESS = 9
OPEN, CLOSED = 3, 228
"""Positions at which the fingers come to their ends."""
SLOWEST, FASTEST = 60.0, 400.0
"""Counts per second at rSP 0 and 255."""
ACTIVATION = 0.5
"""s."""


def crc(data: bytes) -> bytes:
    """By a division of polynomials with the bits in the order in which they travel."""
    bits = [byte >> k & 1 for byte in data for k in range(8)] + [0] * 16
    for k in range(16):  # the initial value FFFF
        bits[k] ^= 1
    for k in range(len(bits) - 16):
        if bits[k]:
            for power in (0, 1, 14, 16):  # x^16 + x^15 + x^2 + 1, highest first
                bits[k + power] ^= 1
    rest = bits[-16:]
    low, high = (sum(bit << k for k, bit in enumerate(part)) for part in (rest[:8], rest[8:]))
    return bytes([low, high])


class RobotiqDevice(CableEnd):
    """The gripper at the end of a cable whose other end is the file ``path``.

    Attributes:
        position: gPO, where the fingers are.
        thing: position at which something between the fingers stops them; None for nothing.
        fault: gFLT.
        noise: what goes wrong with answers: ``""``, ``"crc"``, ``"short"``, ``"late"``,
            ``"refuses"``, ``"other"`` (another device) or ``"silent"``.
        written: what was written to the command registers, in order.
    """

    def __init__(self, path: Path, active: bool = True) -> None:
        self.position = float(OPEN)
        self.thing: int | None = None
        self.fault = 0
        self.noise = ""
        self.every = 1
        """The noise spoils every such answer."""
        self.written: list[bytes] = []
        self.answered = 0
        self.object = 3
        self._registers = bytes([0x09 if active else 0, 0, 0, int(OPEN), 255, 0])
        self._active_at = 0.0 if active else float("inf")
        self._moved_at = time.monotonic()
        super().__init__(path)

    def switch_off_and_on(self) -> None:
        self._registers = bytes(6)
        self._active_at = float("inf")

    @property
    def active(self) -> bool:
        return time.monotonic() >= self._active_at

    def _move(self) -> None:
        """The fingers move on by the time that has passed."""
        now = time.monotonic()
        passed, self._moved_at = now - self._moved_at, now
        if not self.active or not self._registers[0] & 0x08:
            return
        goal = float(min(max(self._registers[3], OPEN), CLOSED))
        speed = SLOWEST + self._registers[4] / 255 * (FASTEST - SLOWEST)
        way = goal - self.position
        step = min(abs(way), speed * passed)
        there = self.position + (step if way > 0 else -step)
        self.object = 3 if abs(goal - there) < 1e-9 else 0
        # What lies between the fingers stops them while they close.
        if way > 0 and self.thing is not None and self.position <= self.thing <= there:
            there = float(self.thing)
            self.object = 2 if there < goal else 3
        self.position = there

    def _serve(self, cable: int) -> None:
        os.set_blocking(cable, False)
        data = b""
        while self.plugged:
            with contextlib.suppress(OSError):  # nothing there, or nobody at the other end
                data += os.read(cable, 1024)
            self._move()
            size = 8 if data[1:2] in (b"\x03", b"\x04") else 9 + data[6] if len(data) > 6 else 99
            if len(data) >= size:
                self._send(cable, self._answer(data[:size]))
                data = data[size:]
            time.sleep(0.001)

    def _send(self, cable: int, answer: bytes) -> None:
        self.answered += 1
        noise = self.noise if self.answered % self.every == 0 else ""
        if noise == "silent":
            return
        if noise == "late":
            time.sleep(0.15)
        if noise == "crc":
            answer = answer[:-3] + bytes([answer[-3] ^ 0x10]) + answer[-2:]
        elif noise == "short":
            answer = answer[:-2]
        elif noise == "refuses":
            answer = bytes([ADDRESS, answer[1] | 0x80, 2])
            answer += crc(answer)
        elif noise == "other":
            answer = bytes([ADDRESS + 1]) + answer[1:-2]
            answer += crc(answer)
        # In two parts, as a cable may give them.
        os.write(cable, answer[:3])
        time.sleep(0.001)
        os.write(cable, answer[3:])

    def _answer(self, asked: bytes) -> bytes:
        assert asked[0] == ADDRESS and crc(asked[:-2]) == asked[-2:], asked.hex()
        if asked[1] == 0x10:
            assert asked[2:7] == b"\x03\xe8\x00\x03\x06", asked.hex()
            self._write(asked[7:13])
            head = asked[:6]
            return head + crc(head)
        assert asked[2:6] == b"\x07\xd0\x00\x03", asked.hex()
        head = bytes([ADDRESS, asked[1], 6]) + self._status()
        return head + crc(head)

    def _write(self, registers: bytes) -> None:
        self.written.append(registers)
        activates = registers[0] & 1 and not self._registers[0] & 1
        if activates:
            self._active_at = time.monotonic() + ACTIVATION
        if not registers[0] & 1:
            self._active_at = float("inf")
        self._registers = registers

    def _status(self) -> bytes:
        action = self._registers[0]
        state = 3 if self.active else 1 if action & 1 else 0
        status = action & 0x09 | state << 4 | self.object << 6
        return bytes([status, 0, self.fault, self._registers[3], round(self.position), 0])
