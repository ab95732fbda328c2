"""Robotiq's grippers 2F-85 and 2F-140 by Modbus RTU, as their manual gives the registers.

https://assets.robotiq.com/website-assets/support_documents/document/2F-85_2F-140_Instruction_Manual_e-Series_PDF_20190206.pdf
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import Annotated

from embodyrl.errors import UserError
from embodyrl.ranges import Choice, Range
from embodyrl.real_robot.control.limits import MAX_WIDTH
from embodyrl.real_robot.grippers.modbus import ModbusError, read_registers, write_registers
from embodyrl.real_robot.serial_port import BAUDS, SerialPort

COMMAND = 0x03E8
"""First register of the command: action and reserved byte, reserved and position, speed and force."""
STATUS = 0x07D0
"""First register of the status: status and reserved, fault and requested position, position and current."""
ACTIVATE = 0x01  # bit rACT of the action
GO = 0x08  # bit rGTO
ACTIVE = 3  # value of gSTA
FAULTS = {
    0x05: "it must finish its activation first",
    0x07: "it must be activated first",
    0x08: "it is too hot: let it cool down",
    0x09: "it heard nothing for a second",
    0x0A: "its voltage is below 22 V",
    0x0B: "it is releasing by itself",
    0x0C: "an internal fault: see Robotiq's support",
    0x0D: "its activation failed: is something between the fingers?",
    0x0E: "its current was too high",
    0x0F: "it released by itself, and must be activated again",
}
"""gFLT -> what it says. The first four go away by themselves."""
PASSING = (0x05, 0x07, 0x08, 0x09)
PERIOD = 0.02
"""s between two readings."""
ANSWER_IN = 0.1
"""s that an answer may take; USB adapters keep bytes for up to 16 ms."""
QUIET = 0.2
"""s of silence after a bad answer: one that comes late must not be taken for the next one."""
GONE = 0.8
"""s without a good answer after which the gripper counts as lost."""
HUNG = 3.0
"""s without an attempt after which it counts as lost, too: less may be a stall of this computer."""
AGAIN = 0.25
"""s between two attempts to open a port that is gone."""
ACTIVATED_IN = 10.0
"""s that an activation may take."""


@dataclass(frozen=True)
class Model:
    """What a model can do.

    Attributes:
        speed: m/s, slowest and fastest.
        force: N, weakest and strongest.
    """

    speed: tuple[float, float]
    force: tuple[float, float]


MODELS = {
    "2f_85": Model(speed=(0.02, 0.15), force=(20.0, 235.0)),
    "2f_140": Model(speed=(0.03, 0.25), force=(10.0, 125.0)),
}


@dataclass(frozen=True)
class RobotiqGripper:
    """``kind: robotiq``: a 2F-85 or 2F-140 at a serial port.

    Attributes:
        port: such as ``/dev/serial/by-id/usb-FTDI...``.
        model: ``"2f_85"`` or ``"2f_140"``.
        baud: bits per second.
        address: its number on the bus.
        activate: whether a gripper that was switched on anew is activated when it is connected,
            for which its fingers open and close once.
        counts: position that it reports when it is open, and when it is closed on nothing.
    """

    port: str = "/dev/ttyUSB0"
    model: Annotated[str, Choice(*MODELS)] = "2f_85"
    baud: Annotated[int, Range(9600, 4_000_000)] = 115200
    address: Annotated[int, Range(1, 247)] = 9
    activate: bool = False
    counts: tuple[Annotated[int, Range(0, 255)], Annotated[int, Range(0, 255)]] = (3, 228)

    def __post_init__(self) -> None:
        if self.baud not in BAUDS:
            raise UserError(f"gripper.baud is {self.baud}; serial ports have {sorted(BAUDS)}.")
        if self.counts[1] - self.counts[0] < 100:
            raise UserError(
                f"gripper.counts is {list(self.counts)}: the position when open comes first, and "
                "that when closed is larger by 100 or more."
            )


@dataclass(frozen=True)
class Status:
    """What a gripper reports.

    Attributes:
        state: gSTA, 3 when it is active.
        object: gOBJ: 0 moving, 1 stopped by something while opening, 2 while closing, 3 there.
        fault: gFLT, 0 for none.
        position: gPO, 0 (open) to 255.
    """

    state: int
    object: int
    fault: int
    position: int


def read_status(port: SerialPort, address: int) -> Status:
    """Asks a gripper for its status.

    Raises:
        ModbusError: no answer of use.
        OSError: the port is gone.
    """
    data = read_registers(port, address, STATUS, 3, ANSWER_IN)
    return Status(data[0] >> 4 & 3, data[0] >> 6, data[2] & 0x0F, data[4])


class Robotiq:
    """See ``Gripper``. A thread of its own asks and commands.

    Args:
        config: of the gripper.
        speed: m/s.
        force: N.

    Raises:
        UserError: it does not answer, has a fault, or is not active and may not be activated.
    """

    hz = 10.0

    def __init__(self, config: RobotiqGripper, speed: float, force: float) -> None:
        self.name = f"the Robotiq {config.model} at {config.port}"
        self._config = config
        model = MODELS[config.model]
        self._speed = _share(speed, model.speed)
        self._force = _share(force, model.force)
        self._port: SerialPort | None = None
        self._fault = ""
        self._said = ""  # why the last attempt failed
        self._wanted: float | None = None  # width that is not commanded yet
        self._closing = False
        try:
            self._port = SerialPort(config.port, config.baud)
            self._measured = time.monotonic(), self._width(self._require_active(self._port))
        except (OSError, ModbusError) as error:
            self._drop_port()
            raise UserError(f"{self.name[0].upper()}{self.name[1:]}: {_reason(error)}.") from error
        except BaseException:
            self._drop_port()
            raise
        self._thread = threading.Thread(target=self._work, name="gripper", daemon=True)
        self._thread.start()

    def measured(self) -> tuple[float, float]:
        """See ``Gripper``."""
        return self._measured

    def trouble(self) -> str:
        """See ``Gripper``."""
        silent = time.monotonic() - self._measured[0]
        if silent > (GONE if self._said else HUNG):
            why = self._said or "it was not asked: this computer is too busy"
            return f"{self.name} did not answer for {silent:.1f} s ({why})"
        return f"{self.name}: {self._fault}" if self._fault else ""

    def move(self, width: float) -> None:
        """See ``Gripper``.

        Raises:
            UserError: the width is not finite.
        """
        if not math.isfinite(width):
            raise UserError("The gripper was sent a width that is not finite.")
        self._wanted = width

    def close(self) -> None:
        """See ``Gripper``."""
        self._closing = True
        self._thread.join(timeout=2.0)
        self._drop_port()

    def _work(self) -> None:
        """Commands and reads until ``close``."""
        while not self._closing:
            try:
                if self._port is None:
                    self._port = SerialPort(self._config.port, self._config.baud)
                self._command(self._port)
                status = read_status(self._port, self._config.address)
                self._measured = time.monotonic(), self._width(status)
                self._fault = _fault_of(status)
                self._said = ""
                time.sleep(PERIOD)
            except ModbusError as error:
                # One answer that is damaged is not worth a word: ``trouble`` tells of more.
                self._said = str(error)
                time.sleep(QUIET)
            except OSError as error:
                self._said = _reason(error)
                self._drop_port()
                time.sleep(AGAIN)

    def _command(self, port: SerialPort) -> None:
        """Sends the wanted width, if there is one; it stays wanted until that is confirmed."""
        wanted = self._wanted
        if wanted is None:
            return
        opened, closed = self._config.counts
        share = min(max(wanted / MAX_WIDTH, 0.0), 1.0)
        # At the ends as far as it goes, so that it grasps whatever is there.
        position = round(closed + share * (opened - closed))
        position = 255 if share == 0.0 else 0 if share == 1.0 else position
        values = [(ACTIVATE | GO) << 8, position, self._speed << 8 | self._force]
        write_registers(port, self._config.address, COMMAND, values, ANSWER_IN)
        if self._wanted == wanted:
            self._wanted = None

    def _require_active(self, port: SerialPort) -> Status:
        """Its status once it is active.

        Raises:
            UserError: it is not, and may not be activated; or it has a fault.
        """
        address = self._config.address
        status = read_status(port, address)
        if status.state != ACTIVE and not self._config.activate:
            raise UserError(
                f"{self.name[0].upper()}{self.name[1:]} was switched on anew and must be activated: its fingers "
                "then open and close once. Keep hands away, and set libfranka.gripper.activate: "
                "true."
            )
        if status.state != ACTIVE:
            # The bit must go from 0 to 1.
            write_registers(port, address, COMMAND, [0, 0, 0], ANSWER_IN)
            write_registers(port, address, COMMAND, [ACTIVATE << 8, 0, 0], ANSWER_IN)
        end = time.monotonic() + ACTIVATED_IN
        while (status := read_status(port, address)).state != ACTIVE:
            if time.monotonic() > end:
                why = FAULTS.get(status.fault, "is something between the fingers?")
                raise UserError(f"{self.name} was not active after {ACTIVATED_IN:.0f} s: {why}.")
            time.sleep(PERIOD)
        if fault := _fault_of(status):
            raise UserError(f"{self.name}: {fault}.")
        return status

    def _width(self, status: Status) -> float:
        """The opening, in the scale of ``Gripper``."""
        opened, closed = self._config.counts
        share = (closed - status.position) / (closed - opened)
        return MAX_WIDTH * min(max(share, 0.0), 1.0)

    def _drop_port(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None


def _fault_of(status: Status) -> str:
    """Why a gripper may not be used any more; empty if it may."""
    if status.fault and status.fault not in PASSING:
        return f"fault {status.fault:02X}: {FAULTS.get(status.fault, 'unknown')}"
    if status.state != ACTIVE:
        return "it was switched off and on, and must be activated: start again"
    return ""


def _share(value: float, ends: tuple[float, float]) -> int:
    """The byte for a speed or a force between those that 0 and 255 stand for."""
    return round(255 * (value - ends[0]) / (ends[1] - ends[0]))


def _reason(error: Exception) -> str:
    """Why a gripper cannot be spoken to."""
    if isinstance(error, OSError):
        return f"its port cannot be used ({error.strerror or error})"
    return str(error)
