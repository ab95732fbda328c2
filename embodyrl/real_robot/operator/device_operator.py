"""A person with a device in the hand, with or without the operator's page."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.real_robot.control.clocks import Clock
from embodyrl.real_robot.control.operator import Operator
from embodyrl.real_robot.operator.arm_link import ArmLink
from embodyrl.real_robot.operator.devices import DEADZONE, Device, open_device
from embodyrl.real_robot.operator.page import OperatorPage

PERIOD = 0.005
"""s between two readings of the device."""
ALIVE = 0.3
"""s without a reading after which the device no longer moves the arm."""
PUSH = 0.3
"""Deflection, as a share of the full one, that takes over."""


class DeviceOperator(Operator):
    """A person with a device, and with the page if there is one.

    Whoever pushes the device takes over.

    Args:
        device: read by a thread of its own until ``close``.
        page: for the same person.
    """

    def __init__(self, device: Device, page: Operator | None = None) -> None:
        self._device = device
        self._page = page
        self._wishes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._motion = np.zeros(6, np.float32)
        self._open = True  # whether the fingers shall be open
        self._read_at = 0.0
        self._has_arm = False  # whether the person moves the arm now
        self._closing = False
        self._gone = ""  # why the device cannot be read any more
        self._page_fingers = 1.0  # what the page last said about the fingers
        self._thread = threading.Thread(target=self._work, name="device", daemon=True)
        self._thread.start()

    def wishes(self) -> list[str]:
        """See ``Operator``."""
        found = self._page.wishes() if self._page is not None else []
        while not self._wishes.empty():
            found.append(self._wishes.get())
        return found

    def alive(self, now: float) -> bool:
        """See ``Operator``. The device's age is by this machine's clock; it has no other."""
        here = time.monotonic() - self._read_at <= ALIVE and not self._gone
        return here or (self._page is not None and self._page.alive(now))

    def action(self, dims: int, share: float = 0.4) -> NDArray[np.float32]:
        """See ``Operator``: the device's motion, added to the page's keys.

        Args:
            dims: A.
            share: of the largest action, for the full deflection.
        """
        action = np.zeros(dims, np.float32)
        if self._page is not None:
            action = self._page.action(dims)
            # Page and device share the fingers: the last change on the page counts.
            if action[-1] != self._page_fingers:
                self._page_fingers = float(action[-1])
                self._open = bool(action[-1] > 0)
        motion = np.where(np.abs(self._motion) < DEADZONE, 0.0, self._motion)
        action[: dims - 1] += share * motion[: dims - 1].astype(np.float32)
        action[-1] = 1.0 if self._open else -1.0
        return action.clip(-1.0, 1.0)

    def show(self, status: dict[str, Any], images: dict[str, NDArray[np.uint8]]) -> None:
        """See ``Operator``."""
        self._has_arm = status.get("mode") == "human"
        # The fingers stay as they are when the person takes over.
        if not self._has_arm:
            self._open = bool(status.get("open", True))
        if self._page is not None:
            self._page.show(status | ({"reason": self._gone} if self._gone else {}), images)

    def problem(self) -> str:
        """What is wrong with the device; empty while all is well."""
        return self._gone

    def close(self) -> None:
        """Stops reading and closes the device."""
        self._closing = True
        self._thread.join(timeout=1.0)
        self._device.close()

    def _work(self) -> None:
        """Reads the device until ``close``."""
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
            self._read_at = time.monotonic()
            # A push takes over once; the device must come back to the dead zone before the next.
            strongest = float(np.abs(reading.motion).max())
            if strongest > PUSH and not pushed and not self._has_arm:
                self._wishes.put("takeover")
            pushed = strongest > (DEADZONE if pushed else PUSH)
            # Buttons that were not pressed before.
            for name in reading.pressed - before:
                self._press(name)
            before = reading.pressed
            time.sleep(PERIOD)

    def _press(self, name: str) -> None:
        """Does what a button means; "on" lets go of the arm, or lets the policy go on."""
        if name == "fingers":
            self._open = not self._open
        elif name in ("open", "close"):
            self._open = name == "open"
        elif name == "on":
            self._wishes.put("release" if self._has_arm else "run")
        else:
            self._wishes.put(name)


def open_operator(
    opened: ExitStack, clock: Clock, place: int | str | None, hand: str, token: str = ""
) -> tuple[Operator | None, OperatorPage | ArmLink | None]:
    """Opens what a person uses: a page, a device, or both.

    Args:
        opened: closes them in the end.
        clock: of the control loop.
        place: port of a page for this arm (0: a free one), or ``ws://HOST:PORT/NAME`` of a page of
            several arms; None for no page.
        hand: the device, see ``devices.open_device``; empty for none.
        token: of the page of several arms.

    Returns:
        The person, and the page; each None where there is none.

    Raises:
        UserError: no such device, the port is in use, or no such page.
    """
    # The page of several arms, or one of this arm's own.
    page = None
    if isinstance(place, str):
        page = ArmLink(clock, place, token)
        print(f"This arm is on the page at {page.address}", flush=True)
    elif place is not None:
        page = OperatorPage(clock, place)
        print(f"The operator's page: {page.address}", flush=True)
    if page is not None:
        opened.callback(page.close)
    # A device in the hand works with a page and without.
    person: Operator | None = page
    if hand:
        person = DeviceOperator(open_device(hand), page)
        opened.callback(person.close)
    return person, page
