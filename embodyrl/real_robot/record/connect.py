"""Which robot and which env a recording session is for."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from embodyrl.env import EnvConfig
from embodyrl.errors import UserError
from embodyrl.real_robot.connect_robot import (
    ConnectedRobot,
    lerobot_robot,
    libfranka_robot,
    ros_robot,
    simulated_robot,
)
from embodyrl.real_robot.control.actions import action_space, proprio_dim
from embodyrl.real_robot.control.joint_safety import JointSafetyConfig
from embodyrl.real_robot.env.config import (
    RobotConfig,
    check_settings,
    motors_spec,
    robot_spec,
    task_config,
)
from embodyrl.types import EnvSpec


def connect_robot_for(
    opened: ExitStack, config: EnvConfig, robot: str, address: str, robot_file: str, task: str
) -> tuple[ConnectedRobot, EnvSpec, tuple[float, float, float]]:
    """Connects to the robot of a recording session.

    Args:
        opened: disconnects in the end.
        config: of the env that the data are for.
        robot: one of ``ROBOTS``.
        address: of the rosbridge server, or of the arm.
        robot_file: its topics and its workspace.
        task: the instruction, where no topic gives one.

    Returns:
        The robot, the spec of what is recorded, and (3,) m where the hand goes between episodes.

    Raises:
        UserError: the env does not fit the robot, or it cannot be connected.
    """
    if isinstance(config, RobotConfig):
        config = replace(config, robot=robot)
        check_settings(config)
    if robot == "twin":
        if task:
            raise UserError(
                "--task gives the instruction of a robot that has no topic for it. The twin's "
                "scenes say their own: leave --task out, and choose them with env.task=..."
            )
        connected = opened.enter_context(simulated_robot(scene_of(config)))
        # A robot has no privileged state, and its logs hold none.
        spec = replace(connected.robot.spec, privileged_dim=0)  # type: ignore[attr-defined]
        return connected, spec, RobotConfig().home
    if not isinstance(config, RobotConfig):
        raise UserError(
            f"--robot {robot} records for the env `robot`, not for {config.name}: leave the env "
            "out, and say what the data shall hold, such as env.cameras=[front,wrist] "
            "env.image_size=224."
        )
    if robot == "lerobot":
        cameras = {name: (config.image_size, config.image_size) for name in config.cameras}
        connected = opened.enter_context(lerobot_robot(robot_file, cameras, task or config.prompt))
        assert isinstance(connected.safety, JointSafetyConfig)
        return connected, motors_spec(config, connected.safety.space), config.home
    space = action_space({"env": "robot", "control_mode": config.control_mode})
    spec = robot_spec(config, proprio_dim(space))
    where = (address, robot_file, space, spec.cameras, task or config.prompt)
    if robot == "libfranka":
        scene = None if robot_file else task_config(config)
        return opened.enter_context(libfranka_robot(*where, scene)), spec, config.home
    return opened.enter_context(ros_robot(robot, *where)), spec, config.home


def scene_of(config: EnvConfig) -> Any:
    """The embedded task that the twin plays.

    Raises:
        UserError: the env is none of its.
    """
    scene = task_config(config) if isinstance(config, RobotConfig) else config
    if scene.name != "mujoco":
        raise UserError(
            f"The twin plays the embedded MuJoCo tasks, not {config.name}: give mujoco or one of "
            "its presets, or another --robot."
        )
    return scene
