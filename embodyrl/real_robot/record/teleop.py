"""``--teleop``: what a person moves the arm with while they record."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from embodyrl.errors import UserError, did_you_mean
from embodyrl.real_robot.connect_robot import ConnectedRobot
from embodyrl.real_robot.control.clocks import PacedClock
from embodyrl.real_robot.control.joint_safety import JointSafetyConfig
from embodyrl.real_robot.control.messages import RobotState
from embodyrl.real_robot.control.operator import LABELS, WISHES, Operator
from embodyrl.real_robot.operator.device_operator import DeviceOperator
from embodyrl.real_robot.operator.devices import Device, open_device
from embodyrl.real_robot.operator.keyboard import HELP, TerminalKeyboard
from embodyrl.real_robot.operator.leader import Leader, LeaderOperator, load_leader
from embodyrl.real_robot.operator.lerobot_teleop import (
    LeRobotAngles,
    LeRobotMotors,
    LeRobotSteps,
    connect_teleoperator,
    tells_steps,
)
from embodyrl.real_robot.operator.motor_leader import MotorLeader
from embodyrl.real_robot.operator.page import OperatorPage

TELEOPS = ("page", "keyboard", "gamepad", "spacemouse", "leader", "scripted")

LEROBOT = "lerobot:"
"""What the name of a teleoperator of LeRobot begins with."""


@dataclass
class Teleop:
    """A person's device, connected.

    Attributes:
        operator: whose actions move the arm.
        person: whether there is one, who is waited for.
        begin: called at the beginning of an episode, with what adds up its actions.
        ready: says why following may not begin in this state of the robot; empty if it may.
        problem: says what is wrong with the device; empty while all is well.
    """

    operator: Operator
    person: bool = True
    begin: Callable[[Any], None] = lambda decoder: None
    ready: Callable[[RobotState], str] = lambda state: ""
    problem: Callable[[], str] = lambda: ""


def open_teleop(
    opened: ExitStack, kind: str, connected: ConnectedRobot, port: int, robot_file: str
) -> Teleop:
    """Opens a device, and the page beside it.

    Args:
        opened: closes them in the end.
        kind: one of ``TELEOPS``, a gamepad's file, or ``lerobot:TYPE``.
        connected: the robot; a simulated one is paced to real time for a person.
        port: of the page (0: a free one).
        robot_file: has the section of the leader arm.

    Raises:
        UserError: there is no such device, or it does not fit the robot.
    """
    if kind not in TELEOPS and not kind.startswith(("/", LEROBOT)):
        raise UserError(f"There is no teleoperation by {kind!r}. {did_you_mean(kind, TELEOPS)}")
    safety = connected.safety
    if isinstance(safety, JointSafetyConfig) and not kind.startswith(LEROBOT):
        raise UserError(
            f"--teleop {kind} moves the hand of an arm whose shape is known. An arm of LeRobot's "
            "is moved by a leader with the same motors: --teleop lerobot:TYPE, such as "
            "lerobot:so101_leader."
        )
    if kind == "scripted":
        return _scripted(connected)
    # For a person the twin's time runs as the wall clock's.
    if connected.simulated:
        connected.clock = PacedClock(connected.clock)
    page = OperatorPage(connected.clock, port, wishes=tuple(dict.fromkeys((*WISHES, *LABELS))))
    opened.callback(page.close)
    print(f"The page with the cameras and all buttons: {page.address}", flush=True)
    # The device: the page itself, or one beside it.
    if kind == "keyboard":
        print(f"  {HELP}", flush=True)
    if kind == "page":
        return Teleop(page)
    if kind == "leader":
        return _leader(opened, LeaderOperator(load_leader(robot_file), page))
    if kind.startswith(LEROBOT):
        device = connect_teleoperator(kind.removeprefix(LEROBOT), robot_file)
        if isinstance(safety, JointSafetyConfig):
            source = LeRobotMotors(device, safety.space)
            config = load_leader(robot_file, Leader())
            leader = MotorLeader(config, page, source, safety.space)
            return _leader(opened, leader)
        if tells_steps(device):
            return _device(opened, LeRobotSteps(device), page)
        config = load_leader(robot_file)
        return _leader(opened, LeaderOperator(config, page, LeRobotAngles(device)))
    device = TerminalKeyboard() if kind == "keyboard" else open_device(kind)
    return _device(opened, device, page)


def _device(opened: ExitStack, device: Device, page: OperatorPage) -> Teleop:
    operator = DeviceOperator(device, page)
    opened.callback(operator.close)
    return Teleop(operator, problem=operator.problem)


def _leader(opened: ExitStack, leader: LeaderOperator) -> Teleop:
    opened.callback(leader.close)
    return Teleop(leader, begin=leader.begin, ready=leader.ready, problem=leader.problem)


def _scripted(connected: ConnectedRobot) -> Teleop:
    """The task's scripted expert in place of a person."""
    if not connected.simulated:
        raise UserError(
            "--teleop scripted reads the simulator's state, so it works with --robot twin alone."
        )
    from embodyrl.real_robot.env.scripted_operator import ScriptedTeleoperator

    operator = ScriptedTeleoperator(connected.robot)
    return Teleop(operator, person=False, begin=operator.begin)
