"""A leader arm: a small copy of the robot, which a person moves and the robot follows (GELLO).

Its joint angles are read from Dynamixel servos (https://arxiv.org/abs/2309.13037). The robot's
forward kinematics turn them into the pose of a hand, and the difference between that pose and the
commanded one is the action. So what is recorded means the same as with any other device, and all of
it goes through the safety filter.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from embodyrl.errors import UserError
from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.actions import DeltaDecoder
from embodyrl.real_robot.control.config_checks import require_number
from embodyrl.real_robot.control.messages import Array, RobotState
from embodyrl.real_robot.control.operator import Operator
from embodyrl.real_robot.operator.dynamixel import ServoError, bits, read_angles
from embodyrl.real_robot.robot_file import read_sections
from embodyrl.real_robot.serial_port import BAUDS, SerialPort

PERIOD = 0.01
"""s between two readings."""
ALIVE = 0.15
"""s without a reading after which the leader no longer moves the arm."""
MIDDLE = np.array([0.0, 0.0, 0.0, -1.6, 0.0, 2.2, 0.0])
"""rad, the middle of each joint's range, roughly: it is less than half a turn wide on either side."""
SECTIONS = ("leader", "teleoperator", "preset", "topics", "libfranka", "lerobot", "safety")
"""Sections that a robot's file may have."""
SLACK = 0.03
"""s that the servos and the adapter may take, besides the time of the bytes on the cable."""
AGAIN = 0.5
"""s between two attempts to open a port that is gone."""


@dataclass(frozen=True)
class Leader:
    """The section ``leader`` of a robot's file.

    Attributes:
        port: serial port, such as ``/dev/serial/by-id/usb-FTDI...``.
        baud: bits per second.
        ids: numbers of the servos of joints 1 to 7.
        signs: 1 or -1 for each joint: whether the servo turns as the robot's joint does.
        offsets: rad for each joint. The robot's angle is sign x (servo's angle - offset).
        gripper_id: number of the trigger's servo; 0 for no trigger.
        gripper_open: rad of the trigger when it is let go; of a leader by LeRobot its own number.
        gripper_closed: the same when it is pulled.
        max_difference: rad by which each joint of the leader may differ from the robot's when
            following begins.

    Raises:
        UserError: a number that cannot be.
    """

    port: str = "/dev/ttyUSB0"
    baud: int = 57600
    ids: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7)
    signs: tuple[int, ...] = (1, 1, 1, 1, 1, 1, 1)
    offsets: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    gripper_id: int = 8
    gripper_open: float = 0.0
    gripper_closed: float = 1.0
    max_difference: float = 0.4

    def __post_init__(self) -> None:
        # One number for each joint.
        for name in ("ids", "signs", "offsets"):
            if len(getattr(self, name)) != 7:
                raise UserError(
                    f"leader.{name} has {len(getattr(self, name))} numbers; an arm has 7 joints."
                )
        numbers = [*self.ids, *([self.gripper_id] if self.gripper_id else [])]
        if len(set(numbers)) < len(numbers) or not all(0 < n < 253 for n in numbers):
            raise UserError("leader.ids and leader.gripper_id must be different, from 1 to 252.")
        if any(abs(sign) != 1 for sign in self.signs):
            raise UserError(f"leader.signs is {list(self.signs)}; each must be 1 or -1.")
        if self.baud not in BAUDS:
            raise UserError(f"leader.baud is {self.baud}; serial ports have {sorted(BAUDS)}.")
        if self.gripper_id and abs(self.gripper_open - self.gripper_closed) < 0.1:
            raise UserError(
                "leader.gripper_open and leader.gripper_closed are the same: give the trigger's "
                "angles (rad) at both ends."
            )
        for joint, offset in enumerate(self.offsets):
            require_number(f"leader.offsets[{joint}]", offset, -100.0, 100.0, "rad")
        require_number("leader.max_difference", self.max_difference, 1e-3, 1.0, "rad")


def load_leader(file: str, otherwise: Leader | None = None) -> Leader:
    """The leader arm of a robot's file.

    Args:
        file: path of the file.
        otherwise: where the file has no section ``leader``; None where it must have one.

    Raises:
        UserError: no file, no section ``leader``, or a bad value.
    """
    from embodyrl.storage.config_section import build_section

    if not file:
        raise UserError(
            "--teleop leader needs --robot-file with a section leader: its port, ids, signs and "
            "offsets. See docs/howto/record.md."
        )
    # The other sections are the robot's: the twin has none of them, but may share its file.
    section = read_sections(
        file, SECTIONS, "It names the leader arm; see docs/howto/record.md."
    ).get("leader")
    if section is None and otherwise is not None:
        return otherwise
    if not isinstance(section, dict):
        raise UserError(
            f"{file} has no section leader, which says at which port the leader arm is."
        )
    built = build_section("leader", Leader, section)
    return replace(
        built, ids=tuple(built.ids), signs=tuple(built.signs), offsets=tuple(built.offsets)
    )


class AngleSource(Protocol):
    """Where a leader's angles come from."""

    def read(self) -> Array:
        """Angles of the seven joints (rad), and of the trigger if there is one (in any unit).

        Raises:
            ServoError: no good answer came.
            OSError: the leader is gone; the next call tries to reach it again.
        """
        ...

    def close(self) -> None:
        """Lets go of the leader."""
        ...


class ServoChain:
    """Dynamixel servos at a serial port, which is opened again when it was gone.

    Args:
        config: of the leader.
    """

    def __init__(self, config: Leader) -> None:
        self._config = config
        self._servos = [*config.ids, *([config.gripper_id] if config.gripper_id else [])]
        self._patience = SLACK + bits(len(self._servos)) / config.baud
        self._port: SerialPort | None = None

    def read(self) -> Array:
        """See ``AngleSource``."""
        try:
            if self._port is None:
                self._port = SerialPort(self._config.port, self._config.baud)
            return np.array(read_angles(self._port, self._servos, self._patience))
        except OSError as error:
            self.close()
            reason = error.strerror or str(error)
            raise OSError(f"its port {self._config.port} is gone ({reason})") from error

    def close(self) -> None:
        """See ``AngleSource``."""
        if self._port is not None:
            self._port.close()
            self._port = None


class LeaderOperator(Operator):
    """A person with a leader arm, and the page for everything else.

    Args:
        config: of the leader.
        page: stop, start and labels.
        source: of its angles, read by a thread of its own until ``close``; by default its servos.

    Raises:
        UserError: the leader does not answer.
    """

    def __init__(self, config: Leader, page: Operator, source: AngleSource | None = None) -> None:
        self._config = config
        self._page = page
        self._source = ServoChain(config) if source is None else source
        self._decoder: DeltaDecoder | None = None
        self._closing = False
        self._problem = ""
        try:
            # The newest angles, and when they were read.
            self._angles = self._source.read()
            self._read_at = time.monotonic()
        except (OSError, ServoError) as error:
            self._source.close()
            raise UserError(f"The leader arm: {error}.") from error
        self._thread = threading.Thread(target=self._work, name="leader", daemon=True)
        self._thread.start()

    @property
    def q(self) -> Array:
        """(7,) rad, what the robot's joints would be in the leader's posture."""
        turned = self._angles[:7] - np.array(self._config.offsets)
        # A servo counts turns on, the robot's joints do not: within half a turn of their middle.
        q = np.array(self._config.signs) * turned
        return (q - MIDDLE + math.pi) % (2.0 * math.pi) - math.pi + MIDDLE

    def begin(self, decoder: DeltaDecoder) -> None:
        """Begins an episode.

        Args:
            decoder: adds up its actions, so it knows where the hand is told to be.
        """
        self._decoder = decoder

    def ready(self, state: RobotState) -> str:
        """Why following may not begin; empty where the leader stands as the robot does."""
        if self.problem():
            return self.problem()
        away = self.q - state.q
        worst = int(np.abs(away).argmax())
        if abs(float(away[worst])) <= self._config.max_difference:
            return ""
        # If this is the robot's own posture, then the offsets are wrong: here are the right ones.
        right = self._angles[:7] - np.array(self._config.signs) * state.q
        offsets = ", ".join(f"{angle:.3f}" for angle in right)
        return (
            f"joint {worst + 1} of the leader is {away[worst]:+.2f} rad from the robot's "
            f"({self.q[worst]:.2f}, not {state.q[worst]:.2f}; at most "
            f"{self._config.max_difference:g} apart): bring it there, then start. If it stands as "
            f"the robot does, its offsets are [{offsets}]"
        )

    def problem(self) -> str:
        """What is wrong with the leader; empty while it is read."""
        return f"the leader arm: {self._problem}" if self._problem else ""

    def wishes(self) -> list[str]:
        """See ``Operator``."""
        return self._page.wishes()

    def alive(self, now: float) -> bool:
        """See ``Operator``. The reading's age is by this machine's clock; it has no other."""
        return time.monotonic() - self._read_at <= ALIVE

    def action(self, dims: int) -> NDArray[np.float32]:
        """See ``Operator``: from where the hand is told to be to where the leader's hand is."""
        assert self._decoder is not None
        decoder = self._decoder
        space = decoder.space
        position, rotation, _ = kinematics.forward(self.q)
        # In units of the largest step, and no more than that: a fast leader is caught up with later.
        action = np.zeros(dims, np.float32)
        action[:3] = (position - decoder.position) / space.metres
        if dims == 7:
            turn = kinematics.rotation_vector(rotation @ decoder.rotation.T)
            action[3:6] = turn / space.radians
        action[-1] = 1.0 if self._wants_open() else -1.0
        return action.clip(-1.0, 1.0)

    def show(self, status: dict[str, Any], images: dict[str, NDArray[np.uint8]]) -> None:
        """See ``Operator``."""
        self._page.show(status, images)

    def close(self) -> None:
        """Stops reading and closes the port."""
        self._closing = True
        self._thread.join(timeout=2.0)
        self._source.close()

    def _wants_open(self) -> bool:
        """Whether the trigger is nearer to its open end; without one the fingers stay open."""
        config = self._config
        if len(self._angles) < 8:
            return True
        angle = float(self._angles[7])
        return abs(angle - config.gripper_open) < abs(angle - config.gripper_closed)

    def _work(self) -> None:
        """Reads until ``close``."""
        while not self._closing:
            try:
                self._angles = self._source.read()
                self._read_at = time.monotonic()
                self._problem = ""
                time.sleep(PERIOD)
            except ServoError as error:
                # One answer that is damaged is not worth a word; the arm holds if more are.
                if not self.alive(0.0):
                    self._problem = str(error)
            except OSError as error:
                self._problem = str(error)
                time.sleep(AGAIN)
