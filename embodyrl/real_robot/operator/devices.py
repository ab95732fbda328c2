"""Reads a SpaceMouse or a gamepad.

Both move the robot's hand in the base's frame: forward is x, left is y, up is z. Buttons:

    SpaceMouse    first: fingers open or closed; second: let go, or let the policy go on
    gamepad       A: fingers; start: let go, or go on; B: stop; back: hold; Y: success; X: failure;
                  left stick: x and y; right stick: z and turning
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from embodyrl.errors import MissingDependencyError, UserError

DEADZONE = 0.1
"""Deflection, as a share of the full one, that counts as none."""
JOYSTICK = "/dev/input/js0"
# An event of Linux' joystick API: time (ms), value, type, number of the button or axis.
_EVENT = struct.Struct("IhBB")
_BUTTON = 1
_AXIS = 2
_INITIAL = 0x80  # added to the type of events that tell the state at the start
_PAD_BUTTONS = {0: "fingers", 1: "estop", 2: "failure", 3: "success", 6: "hold", 7: "on"}
"""Number of a button -> its meaning."""
_PAD_AXES = {1: (0, -1), 0: (1, -1), 4: (2, -1), 3: (5, -1)}
"""Number of an axis -> axis of the robot's hand, and the sign."""


@dataclass(frozen=True)
class Reading:
    """The state of a device.

    Attributes:
        motion: (6,) in [-1, 1]: x, y, z, and rotation about x, y, z.
        pressed: meanings of the buttons that are pressed.
    """

    motion: NDArray[np.float32]
    pressed: frozenset[str]


class Device(Protocol):
    """A device that a person holds in the hand."""

    def read(self) -> Reading:
        """The newest state; never waits.

        Raises:
            OSError: the device is gone.
        """
        ...

    def close(self) -> None:
        """Closes the device."""
        ...


class Gamepad:
    """A gamepad, read by Linux' joystick API. Buttons and axes are numbered as for Xbox pads.

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
        while data := self._unread():
            # An event may be cut off at the end; its rest comes with the next data.
            whole = len(data) // _EVENT.size * _EVENT.size
            self._rest = data[whole:]
            for _, value, kind, number in _EVENT.iter_unpack(data[:whole]):
                self._take(value, kind & ~_INITIAL, number)
        return Reading(self._motion.clip(-1.0, 1.0), frozenset(self._pressed))

    def _take(self, value: int, kind: int, number: int) -> None:
        """Takes in one event."""
        if kind == _AXIS and number in _PAD_AXES:
            axis, sign = _PAD_AXES[number]
            self._motion[axis] = sign * value / 32767
        elif kind == _BUTTON and number in _PAD_BUTTONS:
            change = self._pressed.add if value else self._pressed.discard
            change(_PAD_BUTTONS[number])

    def _unread(self) -> bytes:
        """The bytes that were not read yet; empty if there are none."""
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
        # Each call reads one report, and translations and rotations come in different ones: read
        # until nothing new comes.
        state = self._device.read()
        before = None
        while state.t != before:
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
    except Exception as error:  # pyspacemouse and easyhid raise errors of many kinds
        raise UserError(
            f"No SpaceMouse can be used ({error}). Plug it in; a udev rule must let you read its "
            "/dev/hidraw file."
        ) from error


def open_device(name: str) -> Device:
    """Opens a device.

    Args:
        name: ``spacemouse``, ``gamepad``, or a gamepad's file.

    Raises:
        UserError: there is no such device.
    """
    if name == "spacemouse":
        return SpaceMouse()
    if name == "gamepad" or Path(name).is_absolute():
        return Gamepad(JOYSTICK if name == "gamepad" else name)
    raise UserError(
        f"There is no device {name!r}: spacemouse, gamepad, or a gamepad's file such as "
        "/dev/input/js1."
    )
