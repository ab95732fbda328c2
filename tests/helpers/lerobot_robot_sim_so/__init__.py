"""A plug-in for LeRobot that is not of this project: a small simulated arm and its leader.

Five joints in degrees and a gripper from 0 to 100, named as those of an SO-101, in MuJoCo. The arm
lives in real time: each call steps the physics to the present. What a test wants of the devices
stands in a JSON file.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from lerobot.robots import Robot, RobotConfig
from lerobot.teleoperators import Teleoperator, TeleoperatorConfig

MOTORS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
ARM = Path(__file__).with_name("arm.xml").read_text()
PIXELS = 64


def told(file: str) -> dict[str, Any]:
    """What the test says of a device."""
    return json.loads(Path(file).read_text()) if file else {}


@RobotConfig.register_subclass("sim_so")
@dataclass(kw_only=True)
class SimSoConfig(RobotConfig):
    """Settings: where the arm begins, and the file of faults."""

    faults: str = ""
    start: dict[str, float] = field(default_factory=dict)


class SimSo(Robot):
    """The arm."""

    config_class = SimSoConfig
    name = "sim_so"
    cameras = ("front",)

    def __init__(self, config: SimSoConfig) -> None:
        super().__init__(config)
        self.config = config
        self.model = mujoco.MjModel.from_xml_string(ARM)
        self.data = mujoco.MjData(self.model)
        self._connected = False
        self._fell: float | None = None
        for name, value in config.start.items():
            k = MOTORS.index(name)
            self.data.qpos[k] = self.data.ctrl[k] = self._to_model(k, value)

    @staticmethod
    def _to_model(k: int, value: float) -> float:
        return value / 100 if MOTORS[k] == "gripper" else math.radians(value)

    @staticmethod
    def _from_model(k: int, value: float) -> float:
        return value * 100 if MOTORS[k] == "gripper" else math.degrees(value)

    @property
    def action_features(self) -> dict[str, type]:
        return {f"{name}.pos": float for name in MOTORS}

    @property
    def observation_features(self) -> dict[str, Any]:
        return {**self.action_features, "front": (PIXELS, PIXELS, 3)}

    @property
    def is_connected(self) -> bool:
        return self._connected

    @property
    def is_calibrated(self) -> bool:
        return told(self.config.faults).get("calibrated", True)

    def connect(self, calibrate: bool = True) -> None:
        if told(self.config.faults).get("no_port"):
            raise ConnectionError("Could not connect on port '/dev/ttyACM7'")
        mujoco.mj_forward(self.model, self.data)
        self._began = time.monotonic()
        self._connected = True

    def calibrate(self) -> None: ...

    def configure(self) -> None: ...

    def _step(self) -> None:
        """Steps the physics to the present, or by half a second at most."""
        now = time.monotonic()
        lag = min(now - self._began - self.data.time, 0.5)
        for _ in range(int(lag / self.model.opt.timestep)):
            mujoco.mj_step(self.model, self.data)
        self._began = now - self.data.time

    def get_observation(self) -> dict[str, Any]:
        fault = told(self.config.faults)
        if fault.get("unplugged"):
            raise ConnectionError("There is no status packet!")
        if seconds := fault.get("hangs"):
            time.sleep(seconds)
        # While the power was off the arm fell to there.
        for name, value in fault.get("fallen", {}).items():
            if self._fell != value:
                k = MOTORS.index(name)
                self.data.qpos[k] = self.data.ctrl[k] = self._to_model(k, value)
                self._fell = value
        self._step()
        seen: dict[str, Any] = {
            f"{name}.pos": self._from_model(k, float(self.data.qpos[k]))
            for k, name in enumerate(MOTORS)
        }
        if "nan" in fault:
            seen[f"{fault['nan']}.pos"] = math.nan
        return seen | {"front": self._picture()}

    def _picture(self) -> np.ndarray:
        """The arm from above and from the side, as dots; the background has noise as a camera's."""
        image = np.random.default_rng().integers(20, 24, (PIXELS, PIXELS, 3)).astype(np.uint8)
        for k, at in enumerate(self.data.xpos[1:]):
            for axis, colour in ((1, 0), (2, 1)):
                column = int(np.clip(PIXELS * (at[0] + 0.1) / 0.6, 1, PIXELS - 2))
                row = int(np.clip(PIXELS * (0.4 - at[axis]) / 0.8, 1, PIXELS - 2))
                image[row - 1 : row + 2, column - 1 : column + 2, colour] = 120 + 20 * k
        return image

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        if told(self.config.faults).get("unplugged"):
            raise ConnectionError("There is no status packet!")
        for k, name in enumerate(MOTORS):
            self.data.ctrl[k] = self._to_model(k, float(action[f"{name}.pos"]))
        self._step()
        return action

    def disconnect(self) -> None:
        self._connected = False


@TeleoperatorConfig.register_subclass("sim_so_leader")
@dataclass(kw_only=True)
class SimSoLeaderConfig(TeleoperatorConfig):
    """Settings: the file that says where the leader stands, or how it swings."""

    state: str
    motors: tuple[str, ...] = MOTORS


class SimSoLeader(Teleoperator):
    """A leader that stands where its file says: ``{"pose": {...}}``."""

    config_class = SimSoLeaderConfig
    name = "sim_so_leader"

    def __init__(self, config: SimSoLeaderConfig) -> None:
        super().__init__(config)
        self.config = config
        self._connected = False

    @property
    def action_features(self) -> dict[str, type]:
        return {f"{name}.pos": float for name in self.config.motors}

    @property
    def feedback_features(self) -> dict[str, type]:
        return {}

    @property
    def is_connected(self) -> bool:
        return self._connected

    is_calibrated = True

    def connect(self, calibrate: bool = True) -> None:
        self.get_action()
        self._connected = True

    def calibrate(self) -> None: ...

    def configure(self) -> None: ...

    def send_feedback(self, feedback: dict[str, Any]) -> None: ...

    def get_action(self) -> dict[str, float]:
        pose = told(self.config.state)["pose"]
        return {f"{name}.pos": float(pose.get(name, 0.0)) for name in self.config.motors}

    def disconnect(self) -> None:
        self._connected = False
