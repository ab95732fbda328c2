"""LeRobot's teleoperators as a person's device: ``--teleop lerobot:TYPE``.

An arm of LeRobot's is moved by a leader with the same motors. Two kinds fit an arm with seven
joints: those that tell steps of the hand (``delta_x``, ``delta_y``, ``delta_z``, ``gripper``), such
as LeRobot's gamepad, and leader arms with seven joints in degrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from embodyrl.errors import UserError
from embodyrl.real_robot.control.joint_space import JointSpace
from embodyrl.real_robot.control.messages import Array
from embodyrl.real_robot.lerobot_arm.known import device_config
from embodyrl.real_robot.operator.devices import Reading
from embodyrl.real_robot.operator.leader import SECTIONS
from embodyrl.real_robot.robot_file import read_sections

STEPS = ("delta_x", "delta_y", "delta_z")
GRIPPER = {0: "close", 2: "open"}
"""Number that LeRobot gives to a wish for the gripper -> its meaning; 1 leaves it as it is."""
ANGLE = ".pos"


def connect_teleoperator(kind: str, robot_file: str) -> Any:
    """Connects a ``lerobot.teleoperators.Teleoperator``, one of LeRobot's or of a plug-in.

    Args:
        kind: its registered type.
        robot_file: a robot's file, whose section ``teleoperator`` holds its settings; empty for
            none.

    Raises:
        MissingDependencyError: LeRobot is not installed.
        UserError: no such type, settings that it does not have, or it cannot be connected.
    """
    # 1. Its settings.
    section: Any = {}
    if robot_file:
        purpose = "Its section teleoperator holds the settings."
        section = read_sections(robot_file, SECTIONS, purpose).get("teleoperator") or {}
    where = "section teleoperator of --robot-file"
    config = device_config("teleoperator", kind, section, where)
    # 2. Connect it. Calibrating asks at the terminal, which is LeRobot's own command's business.
    from lerobot import teleoperators

    try:
        device = teleoperators.make_teleoperator_from_config(config)
        device.connect(calibrate=False)
    except Exception as error:  # of the device's own kinds
        raise UserError(
            f"LeRobot's teleoperator {kind} cannot be used: {error}. Its settings stand in the "
            f"{where}."
        ) from error
    if not device.is_calibrated:
        device.disconnect()
        raise UserError(
            f"LeRobot's teleoperator {kind} is not calibrated. Do that first: lerobot-calibrate "
            f"--teleop.type={kind} ..."
        )
    return device


def names_of(device: Any) -> list[str]:
    """What a teleoperator tells, in order."""
    features = device.action_features
    return list(features.get("names", features))


def tells_steps(device: Any) -> bool:
    """Whether a teleoperator tells steps of the hand; otherwise it tells seven joints.

    Raises:
        UserError: it tells neither.
    """
    names = names_of(device)
    if set(STEPS) <= set(names):
        return True
    if len(_joints(names)) == 7:
        return False
    raise UserError(
        f"This teleoperator tells {', '.join(names)}. An arm with seven joints is moved by steps "
        f"of its hand ({', '.join(STEPS)}) or by seven joints (NAME{ANGLE}, in degrees)."
    )


def _joints(names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(ANGLE) and name != f"gripper{ANGLE}"]


class LeRobotSteps:
    """A ``Device``: a teleoperator that tells steps of the hand, each in [-1, 1].

    Args:
        device: connected.
    """

    def __init__(self, device: Any) -> None:
        self._device = device

    def read(self) -> Reading:
        """See ``Device``."""
        told = _ask(self._device)
        motion = np.zeros(6, np.float32)
        motion[:3] = [float(told[name]) for name in STEPS]
        wish = GRIPPER.get(int(told.get("gripper", 1)))
        return Reading(motion.clip(-1.0, 1.0), frozenset(filter(None, [wish])))

    def close(self) -> None:
        """See ``Device``."""
        self._device.disconnect()


class LeRobotAngles:
    """An ``AngleSource``: a leader arm with seven joints, in degrees.

    Args:
        device: connected.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._names = _joints(names_of(device))

    def read(self) -> Array:
        """See ``AngleSource``."""
        told = _ask(self._device)
        angles = np.radians([float(told[name]) for name in self._names])
        trigger = told.get(f"gripper{ANGLE}")
        return angles if trigger is None else np.append(angles, float(trigger))

    def close(self) -> None:
        """See ``AngleSource``."""
        self._device.disconnect()


class LeRobotMotors:
    """An ``AngleSource``: a leader with the motors of the arm, as the safety filter counts.

    Args:
        device: connected.
        space: of the arm.

    Raises:
        UserError: a motor of the arm is none of the leader's.
    """

    def __init__(self, device: Any, space: JointSpace) -> None:
        self._device = device
        self._space = space
        self._names = [f"{motor.name}{ANGLE}" for motor in space.motors]
        told = names_of(device)
        if missing := [name for name in self._names if name not in told]:
            raise UserError(
                f"This teleoperator does not tell {missing[0]}, which the arm needs. It tells "
                f"{', '.join(told)}."
            )

    def read(self) -> Array:
        """See ``AngleSource``."""
        told = _ask(self._device, self._names)
        return np.array([float(told[name]) for name in self._names]) * self._space.unit

    def close(self) -> None:
        """See ``AngleSource``."""
        self._device.disconnect()


def _ask(device: Any, names: Sequence[str] = ()) -> dict[str, Any]:
    """What a teleoperator tells now.

    Args:
        device: connected.
        names: that must be among it.

    Raises:
        OSError: it is gone, or tells what is no number.
    """
    try:
        told = device.get_action()
        finite = all(np.isfinite(float(value)) for value in told.values())
        missing = [name for name in names if name not in told]
    except Exception as error:  # of the device's own kinds
        raise OSError(f"LeRobot's teleoperator is gone ({error})") from error
    if missing:
        raise OSError(f"LeRobot's teleoperator does not tell {missing[0]}")
    if not finite:
        raise OSError(f"LeRobot's teleoperator tells {told}, and not all of it is a number")
    return told
