"""Connects to a robot: the twin here, an arm behind ROS, by libfranka, or one of LeRobot's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from embodyrl.errors import UserError, did_you_mean
from embodyrl.real_robot.control.actions import ActionSpace
from embodyrl.real_robot.control.any_safety import Safety
from embodyrl.real_robot.control.clocks import Clock, RealClock
from embodyrl.real_robot.control.operator import Operator
from embodyrl.real_robot.control.robot import Robot

ROBOTS = ("twin", "ros2", "rosbridge", "ros1", "libfranka", "lerobot")
"""What ``--robot`` and ``env.robot`` may be."""
READ_BY: dict[str, tuple[str, ...]] = {
    "address": ("rosbridge", "libfranka"),
    "robot_file": ROBOTS[1:],
    "prompt": ROBOTS[1:],
}
"""Setting of a robot -> the robots that read it."""


def check_robot(robot: str, **settings: str) -> None:
    """Refuses what cannot be, before anything is opened: a policy may take minutes to load.

    Args:
        robot: one of ``ROBOTS``.
        settings: those of ``READ_BY``; empty ones are not given.

    Raises:
        UserError: no such robot, a setting that it does not read, or something wrong in its file.
    """
    if robot not in ROBOTS:
        raise UserError(f"There is no robot {robot!r}. {did_you_mean(robot, ROBOTS)}")
    for name, value in settings.items():
        if value and robot not in READ_BY[name]:
            raise UserError(
                f"--{name.replace('_', '-')} {value} has no effect on the robot {robot}, so it is "
                f"meant for another one: give --robot {' or '.join(READ_BY[name])}, or leave it out."
            )
    read_robot_file(robot, settings.get("robot_file", ""))


def read_robot_file(robot: str, file: str) -> None:
    """Reads a robot's file for what is wrong in it.

    Raises:
        UserError: see ``load_robot``, ``load_arm`` and ``load_lerobot``.
    """
    if robot == "libfranka":
        from embodyrl.real_robot.libfranka.config import load_arm

        load_arm(file)
    elif robot == "lerobot":
        from embodyrl.real_robot.lerobot_arm.config import load_lerobot

        load_lerobot(file)
    elif robot != "twin":
        from embodyrl.real_robot.ros.config import load_robot

        load_robot(file)


@dataclass
class ConnectedRobot:
    """A robot that is connected, with what is needed to drive it.

    Attributes:
        robot: at rest.
        clock: of its stamps.
        safety: its limits and, of a Franka, its workspace.
        begin: starts an episode at an initial state; the arm must be at rest.
        simulated: whether its time stands still while nobody sleeps by ``clock``.
        arranges: whether ``begin`` arranges the scene; otherwise a person has to.
        person: who may stop an arm that goes home by itself; a command with a page says who.
    """

    robot: Robot
    clock: Clock
    safety: Safety
    begin: Callable[[int], None]
    simulated: bool
    arranges: bool
    person: Operator | None = None


@contextmanager
def simulated_robot(config: Any) -> Iterator[ConnectedRobot]:
    """The simulated arm in this process; ``config`` is that of the embedded task."""
    # Robots are imported when they are used: each brings packages that the others do not need.
    from embodyrl.real_robot.ros.config import load_robot
    from embodyrl.real_robot.twin.mujoco_twin import MujocoTwin

    twin = MujocoTwin(config)
    try:
        safety = load_robot("")[1]
        yield ConnectedRobot(twin, twin, safety, twin.begin, simulated=True, arranges=True)
    finally:
        twin.close()


@contextmanager
def ros_robot(
    kind: str,
    address: str,
    robot_file: str,
    space: ActionSpace,
    cameras: Mapping[str, tuple[int, int]],
    prompt: str,
) -> Iterator[ConnectedRobot]:
    """An arm behind ROS.

    Args:
        kind: transport, one of ``ros.connect_bus.KINDS``.
        address: of the rosbridge server.
        robot_file: see ``ros.config.load_robot``.
        space: of the policy's actions.
        cameras: of the policy, name -> (height, width).
        prompt: instruction for the policy where no topic gives one.
    """
    from embodyrl.real_robot.ros.config import load_robot
    from embodyrl.real_robot.ros.connect_bus import connect
    from embodyrl.real_robot.ros.robot import RosRobot

    topics, safety = load_robot(robot_file)
    bus = connect(kind, address)
    clock = RealClock()
    try:
        robot = RosRobot(bus, topics, safety.robot, clock, space, cameras, prompt, safety.tick)
        arranges = bool(topics.reset)
        yield ConnectedRobot(robot, clock, safety, robot.begin, simulated=False, arranges=arranges)
    finally:
        bus.close()


@contextmanager
def libfranka_robot(
    address: str,
    robot_file: str,
    space: ActionSpace,
    cameras: Mapping[str, tuple[int, int]],
    prompt: str,
    scene: Any,
) -> Iterator[ConnectedRobot]:
    """An arm by libfranka; without a robot's file the arm of franka-sim in an embedded task.

    Args:
        address: of the arm, where the file does not give it.
        robot_file: see ``libfranka.config.load_arm``.
        space: of the policy's actions.
        cameras: of the policy, name -> (height, width).
        prompt: instruction for the policy.
        scene: config of the embedded task.
    """
    from embodyrl.real_robot.libfranka.config import load_arm
    from embodyrl.real_robot.libfranka.robot import LibfrankaRobot

    arm, safety = load_arm(robot_file)
    arm = dataclasses.replace(arm, address=address or arm.address)
    if robot_file:
        robot = LibfrankaRobot(arm, safety, space, cameras, prompt)
    else:
        from embodyrl.real_robot.twin.franka_sim import FrankaSimInScene
        from embodyrl.real_robot.twin.mujoco_twin import MujocoTwin

        robot = FrankaSimInScene(arm, safety, space, MujocoTwin(scene))
    try:
        # The time of libfranka's robot is its own, so it is its own clock.
        yield ConnectedRobot(
            robot, robot, safety, robot.begin, simulated=False, arranges=not robot_file
        )
    finally:
        robot.close()


@contextmanager
def lerobot_robot(
    robot_file: str, cameras: Mapping[str, tuple[int, int]], prompt: str
) -> Iterator[ConnectedRobot]:
    """An arm that LeRobot, or a plug-in of its, knows; a person arranges the scene.

    Args:
        robot_file: see ``lerobot_arm.config.load_lerobot``.
        cameras: of the policy, name -> (height, width).
        prompt: instruction for the policy.
    """
    from embodyrl.real_robot.lerobot_arm.config import load_lerobot
    from embodyrl.real_robot.lerobot_arm.home import WayHome
    from embodyrl.real_robot.lerobot_arm.robot import LeRobotArm

    settings, safety = load_lerobot(robot_file)
    clock = RealClock()
    robot = LeRobotArm(settings, safety, clock, cameras, prompt)
    try:
        home = WayHome(robot, clock, safety, lambda: connected.person)
        connected = ConnectedRobot(robot, clock, safety, home, simulated=False, arranges=False)
        yield connected
    finally:
        robot.close()


def ask_at_terminal(sentence: str) -> None:
    """Says what a person must do, and waits for Enter.

    Raises:
        UserError: there is no terminal.
    """
    try:
        input(f"\n{sentence} [Enter] ")
    except EOFError as error:
        raise UserError(f"A person is needed, but there is no terminal: {sentence}") from error
