"""SpaceMouse and gamepad: whoever pushes one takes over, alone or beside the operator's page.

Both move the hand in the base's frame: forward is x, left y, up z. Buttons:

    SpaceMouse    first: fingers open or closed; second: let go, or let the policy go on
    gamepad       A: fingers; start: let go, or go on; B: stop; back: hold; Y: success; X: failure;
                  left stick: x and y; right stick: z and turning
"""

from __future__ import annotations

import os
import queue
import struct
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.real_robot.control.ticker import Operator
from embodyrl.real_robot.control.transports import Clock
from embodyrl.real_robot.operator.page import OperatorPage

PERIOD = 0.005
"""s between two looks at the device."""
ALIVE = 0.3
"""s without a look after which the device no longer moves the arm."""
DEADZONE = 0.1
PUSH = 0.3
"""Of the full deflection: what counts as none, and what takes over."""
JOYSTICK = "/dev/input/js0"
_EVENT = struct.Struct("IhBB")  # Linux' joystick API: ms, value, type, number
_BUTTON = 1
_AXIS = 2
_INITIAL = 0x80
_PAD_BUTTONS = {0: "fingers", 1: "estop", 2: "failure", 3: "success", 6: "hold", 7: "on"}
_PAD_AXES = {
    1: (0, -1),
    0: (1, -1),
    4: (2, -1),
    3: (5, -1),
}  # number -> axis of the hand, and which way


@dataclass(frozen=True)
class Reading:
    """What a device says: ``motion`` (6,) in [-1, 1], x, y, z and turning about them; names of what is pressed."""

    motion: NDArray[np.float32]
    pressed: frozenset[str]


class Device(Protocol):
    """Something to hold in a hand."""

    def read(self) -> Reading:
        """The newest; never waits.

        Raises:
            OSError: it is gone.
        """
        ...

    def close(self) -> None:
        """Lets go of it."""
        ...


class Gamepad:
    """A gamepad as the Linux kernel's joystick API gives it, numbered as its Xbox driver does.

    Args:
        path: ``/dev/input/js0``, ...

    Raises:
        UserError: there is none, or it may not be read.
    """

    def __init__(self, path: str = JOYSTICK) -> None:
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise UserError(
                f"There is no gamepad at {path} ({error.strerror}). Plug it in, or name its file."
            ) from error
        self._motion = np.zeros(6, np.float32)
        self._pressed = set[str]()
        self._rest = b""

    def read(self) -> Reading:
        """See ``Device``."""
        while data := self._newest():
            self._rest = data[len(data) // _EVENT.size * _EVENT.size :]
            for _, value, kind, number in _EVENT.iter_unpack(data[: len(data) - len(self._rest)]):
                if kind & ~_INITIAL == _AXIS and number in _PAD_AXES:
                    axis, way = _PAD_AXES[number]
                    self._motion[axis] = way * value / 32767
                elif kind & ~_INITIAL == _BUTTON and number in _PAD_BUTTONS:
                    (self._pressed.add if value else self._pressed.discard)(_PAD_BUTTONS[number])
        return Reading(self._motion.clip(-1.0, 1.0), frozenset(self._pressed))

    def _newest(self) -> bytes:
        try:
            data = os.read(self._file, 64 * _EVENT.size)
        except BlockingIOError:
            return b""
        if not data:
            raise OSError("the gamepad is gone")
        return self._rest + data

    def close(self) -> None:
        """See ``Device``."""
        os.close(self._file)


class SpaceMouse:
    """A 3Dconnexion SpaceMouse, read by pyspacemouse.

    Args:
        device: an open ``pyspacemouse.SpaceMouseDevice``; by default the first that is found.

    Raises:
        MissingDependencyError: no pyspacemouse, or no libhidapi.
        UserError: no SpaceMouse, or it may not be read.
    """

    def __init__(self, device: Any = None) -> None:
        self._device = _first_spacemouse() if device is None else device

    def read(self) -> Reading:
        """See ``Device``."""
        state = self._device.read()
        before = None
        while state.t != before:  # one report at a time; translations and rotations come apart
            before = state.t
            state = self._device.read()
        motion = np.array(
            [state.x, state.y, state.z, state.roll, state.pitch, state.yaw], np.float32
        ).clip(-1.0, 1.0)
        names = ("fingers", "on")
        pressed = frozenset(n for n, down in zip(names, state.buttons, strict=False) if down)
        return Reading(motion, pressed)

    def close(self) -> None:
        """See ``Device``."""
        self._device.close()


def _first_spacemouse() -> Any:
    try:
        import pyspacemouse  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError) as error:
        raise MissingDependencyError(
            f"A SpaceMouse needs pyspacemouse and libhidapi ({error}). Install them: pip install "
            "'embodyrl[spacemouse]' and apt-get install libhidapi-hidraw0"
        ) from error
    try:
        return pyspacemouse.open(axis_convention=pyspacemouse.AxisConvention.ROS)
    except Exception as error:  # of pyspacemouse or easyhid, by what is wrong
        raise UserError(
            f"No SpaceMouse can be used ({error}). Plug it in; a udev rule must let you read its "
            "/dev/hidraw file."
        ) from error


def open_device(name: str) -> Device:
    """``spacemouse``, ``gamepad``, or a gamepad's file.

    Raises:
        UserError: there is none.
    """
    if name == "spacemouse":
        return SpaceMouse()
    if name == "gamepad" or Path(name).is_absolute():
        return Gamepad(JOYSTICK if name == "gamepad" else name)
    raise UserError(
        f"There is no device {name!r}: spacemouse, gamepad, or a gamepad's file such as "
        "/dev/input/js1."
    )


class DeviceOperator(Operator):
    """A person with a device, and with the page if there is one.

    Args:
        device: read by a thread of its own until ``close``.
        page: shows and hears the same person.
    """

    def __init__(self, device: Device, page: Operator | None = None) -> None:
        self._device = device
        self._page = page
        self._wishes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._motion = np.zeros(6, np.float32)
        self._open = True
        self._looked = 0.0
        self._moves = False
        self._closing = False
        self._gone = ""
        self._page_fingers = 1.0
        self._thread = threading.Thread(target=self._work, name="device", daemon=True)
        self._thread.start()

    def wishes(self) -> list[str]:
        """See ``Operator``."""
        found = self._page.wishes() if self._page is not None else []
        while not self._wishes.empty():
            found.append(self._wishes.get())
        return found

    def alive(self, now: float) -> bool:
        """See ``Operator``; by this machine's clock, as a device has no other."""
        here = time.monotonic() - self._looked <= ALIVE and not self._gone
        return here or (self._page is not None and self._page.alive(now))

    def action(self, dims: int, share: float = 0.4) -> NDArray[np.float32]:
        """See ``Operator``: what is pushed, added to the page's keys."""
        action = np.zeros(dims, np.float32)
        if self._page is not None:
            action = self._page.action(dims)
            if action[-1] != self._page_fingers:  # moved there last
                self._page_fingers = float(action[-1])
                self._open = bool(action[-1] > 0)
        turned = np.where(np.abs(self._motion) < DEADZONE, 0.0, self._motion)
        action[: dims - 1] += share * turned[: dims - 1].astype(np.float32)
        action[-1] = 1.0 if self._open else -1.0
        return action.clip(-1.0, 1.0)

    def show(self, status: dict[str, Any], images: dict[str, NDArray[np.uint8]]) -> None:
        """See ``Operator``."""
        mine = status.get("mode") == "human"
        if not mine:
            self._open = bool(
                status.get("open", True)
            )  # fingers stay as they are when a person takes over
        self._moves = mine
        if self._page is not None:
            self._page.show(status | ({"reason": self._gone} if self._gone else {}), images)

    def close(self) -> None:
        """Lets go of the device."""
        self._closing = True
        self._thread.join(timeout=1.0)
        self._device.close()

    def _work(self) -> None:
        before = frozenset()
        pushed = False
        while not self._closing:
            try:
                reading = self._device.read()
            except Exception as error:  # OSError, or the device library's own
                self._motion = np.zeros(6, np.float32)
                self._gone = f"the device in the hand is gone ({error})"
                return
            self._motion = reading.motion
            self._looked = time.monotonic()
            strongest = float(np.abs(reading.motion).max())
            if strongest > PUSH and not pushed and not self._moves:
                self._wishes.put("takeover")
            pushed = strongest > (DEADZONE if pushed else PUSH)
            for name in reading.pressed - before:
                self._press(name)
            before = reading.pressed
            time.sleep(PERIOD)

    def _press(self, name: str) -> None:
        if name == "fingers":
            self._open = not self._open
        else:
            self._wishes.put({"on": "release" if self._moves else "run"}.get(name, name))


def operator_of(
    opened: ExitStack, clock: Clock, port: int | None, hand: str
) -> tuple[Operator | None, OperatorPage | None]:
    """A person with a page (at ``port``), a device (``hand``), or both; and that page. ``opened`` closes them.

    Raises:
        UserError: no such device, or the port is in use.
    """
    page = None
    person = None
    if port is not None:
        person = page = OperatorPage(clock, port)
        opened.callback(page.close)
        print(f"The operator's page: {page.address}", flush=True)
    if hand:
        person = DeviceOperator(open_device(hand), page)
        opened.callback(person.close)
    return person, page
