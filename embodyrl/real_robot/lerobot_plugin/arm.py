"""A Franka of ours, real or simulated, as a ``lerobot.robots.Robot`` behind the safety filter."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from lerobot.robots import Robot, RobotConfig

from embodyrl.config import env_config
from embodyrl.errors import UserError
from embodyrl.real_robot.connect_robot import ConnectedRobot
from embodyrl.real_robot.control.actions import SPACES, DeltaDecoder, proprio_dim
from embodyrl.real_robot.control.any_safety import decoder_for
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.step_driver import StepDriver
from embodyrl.real_robot.env.config import RobotConfig as EnvRobotConfig
from embodyrl.real_robot.env.config import robot_spec
from embodyrl.real_robot.policy_link.metadata import policy_facts
from embodyrl.real_robot.record.connect import connect_robot_for

MOVES = ("delta_x", "delta_y", "delta_z", "delta_rx", "delta_ry", "delta_rz")
"""Names of the action dims before the gripper's, each in [-1, 1]: shares of the largest step."""
GRIPPER = "gripper.pos"
"""Above 0 opens it. LeRobot's gamepad counts a ``gripper`` from 0 to 2, so the name is another."""
_connected: dict[str, EmbodyrlArm] = {}
"""The arm that is connected in this process, for ``EmbodyrlPerson``; at most one."""


@RobotConfig.register_subclass("embodyrl")
@dataclass(kw_only=True)
class EmbodyrlArmConfig(RobotConfig):
    """What ``--robot.KEY=`` takes.

    Attributes:
        arm: ``twin`` (simulated, here), ``ros2``, ``rosbridge``, ``ros1`` or ``libfranka``.
        address: of the rosbridge server, or of the arm.
        robot_file: the robot's topics and workspace.
        prompt: the instruction, where no topic gives one.
        overrides: of the env `robot`, each ``env.key=value``: task, cameras, control mode and rate.
        init: number of the initial state in which a simulated scene begins.
    """

    arm: str = "twin"
    address: str = ""
    robot_file: str = ""
    prompt: str = ""
    overrides: list[str] = field(default_factory=list)
    init: int = 0


class EmbodyrlArm(Robot):
    """See LeRobot's ``Robot``. An action takes 1 / (``env.control_hz`` x ``env.speed``) s.

    The simulated arm's time passes with the actions alone. A real arm's ticks come from a thread,
    which holds it where LeRobot sends no action.

    Args:
        config: settings.

    Raises:
        UserError: settings that cannot be.
    """

    config_class = EmbodyrlArmConfig
    name = "embodyrl"

    def __init__(self, config: EmbodyrlArmConfig) -> None:
        super().__init__(config)
        self.config = config
        # What is seen and done is that of the env ``robot``, so that data and policies fit.
        env = env_config("robot", config.overrides)
        assert isinstance(env, EnvRobotConfig)
        if config.arm == "lerobot":
            raise UserError(
                "--robot.arm=lerobot would be LeRobot's own robot: give its type as --robot.type."
            )
        self._env = replace(env, robot=config.arm)
        self._space = SPACES["robot", env.control_mode]
        self.spec = robot_spec(self._env, proprio_dim(self._space))
        self.cameras = dict.fromkeys(self.spec.cameras)  # LeRobot counts them
        self._opened = ExitStack()
        self._ends = -math.inf  # when the last action is over
        self.driver: StepDriver | None = None
        self.connected: ConnectedRobot | None = None

    @property
    def observation_features(self) -> dict[str, Any]:
        """The policy's proprio, number by number, and its pictures."""
        pictures = {name: (*size, 3) for name, size in self.spec.cameras.items()}
        return {**dict.fromkeys(self._numbers, float), **pictures}

    @property
    def action_features(self) -> dict[str, type]:
        """The policy's action, number by number."""
        return dict.fromkeys((*MOVES[: self.spec.action_dim - 1], GRIPPER), float)

    @property
    def _numbers(self) -> list[str]:
        """Names of the proprio's numbers, as ``actions.proprio`` has them."""
        axes = [f"{who}.{axis}" for who in ("hand", "told") for axis in "xyz"]
        turns = [f"{who}.r{axis}" for who in ("hand", "told") for axis in "xyz"]
        return [*axes, *(turns if self.spec.action_dim == 7 else []), "gripper.width"]

    @property
    def is_connected(self) -> bool:
        """Whether there is an arm."""
        return self.driver is not None

    @property
    def is_calibrated(self) -> bool:
        """A Franka needs no calibration."""
        return True

    def connect(self, calibrate: bool = True) -> None:
        """Connects, and starts at rest where the arm is; a simulated scene begins anew.

        Raises:
            UserError: it cannot be connected, or may not start from where it is.
        """
        config = self.config
        if _connected:
            raise UserError("An arm of embodyrl's is connected in this process already.")
        try:
            # The twin's scenes say their own instruction.
            self.connected, spec, _ = connect_robot_for(
                self._opened, self._env, config.arm, config.address, config.robot_file,
                config.prompt,
            )  # fmt: skip
            # Everything as in a session of ours, but the next action ends a hold by itself.
            connected = self.connected
            connected.begin(config.init)
            rate = spec.control_hz * self._env.speed
            decoder = decoder_for(policy_facts(spec), rate, connected.safety)
            assert isinstance(decoder, DeltaDecoder)
            guard = SafetyFilter(replace(connected.safety, resume="fresh_target"))
            driver = StepDriver(
                connected.robot, connected.clock, guard, decoder, not connected.simulated
            )
            driver.start()
        except BaseException:
            self._opened.close()
            raise
        self.driver = driver
        self._ends = -math.inf
        _connected["arm"] = self

    def calibrate(self) -> None:
        """Nothing to do."""

    def configure(self) -> None:
        """Nothing to do."""

    def _moving(self) -> StepDriver:
        """The driver, once the last action is over.

        Raises:
            UserError: not connected, or the safety filter stopped the arm.
        """
        driver = self.driver
        if driver is None:
            raise UserError("The arm is not connected.")
        # LeRobot's loop keeps its own time; ours is that of the arm.
        if self._ends > driver.clock.now():
            driver.wait_until(self._ends)
        if driver.broken:
            raise UserError(f"The arm stopped: {driver.broken}. Look at it, and mend the cause.")
        return driver

    def get_observation(self) -> dict[str, Any]:
        """See LeRobot's ``Robot``."""
        driver = self._moving()
        seen = driver.robot.observe(driver.decoder)
        numbers = zip(self._numbers, seen["proprio"].tolist(), strict=True)
        return {**dict(numbers), **seen["images"]}

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        """See LeRobot's ``Robot``; returns the action as far as it lies in [-1, 1]."""
        driver = self._moving()
        names = list(self.action_features)
        values = np.array([float(action[name]) for name in names], np.float32).clip(-1.0, 1.0)
        self._ends = driver.act(values)
        return dict(zip(names, values.tolist(), strict=True))

    def disconnect(self) -> None:
        """Brings the arm to rest and disconnects."""
        # Whatever fails then, there is no arm any more.
        driver, self.driver = self.driver, None
        _connected.pop("arm", None)
        if driver is not None:
            driver.stop()
        self._opened.close()


def connected_arm() -> EmbodyrlArm:
    """The arm of this process.

    Raises:
        UserError: there is none.
    """
    if not _connected:
        raise UserError(
            "--teleop.type=embodyrl moves an arm of --robot.type=embodyrl, and none is connected."
        )
    return _connected["arm"]
