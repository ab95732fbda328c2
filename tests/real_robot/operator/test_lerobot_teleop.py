"""LeRobot's teleoperators as devices: a plug-in package with simulated ones, found by LeRobot itself."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodyrl.errors import UserError
from embodyrl.real_robot.connect_robot import ConnectedRobot, simulated_robot
from embodyrl.real_robot.operator.lerobot_teleop import connect_teleoperator, tells_steps
from embodyrl.real_robot.record.teleop import Teleop, open_teleop
from embodyrl.sims.mujoco.env import MujocoConfig

pytest.importorskip("lerobot")
PLUGIN = '''
"""Three devices whose state is a JSON file."""
import json
from dataclasses import dataclass

from lerobot.teleoperators import Teleoperator, TeleoperatorConfig


@TeleoperatorConfig.register_subclass("sim_leader")
@dataclass(kw_only=True)
class SimLeaderConfig(TeleoperatorConfig):
    state: str
    joints: int = 7
    calibrated: bool = True


class SimLeader(Teleoperator):
    config_class, name = SimLeaderConfig, "sim_leader"

    def __init__(self, config):
        super().__init__(config)
        self.config, self.connected = config, False

    @property
    def action_features(self):
        return {f"joint_{k + 1}.pos": float for k in range(self.config.joints)} | {"gripper.pos": float}

    feedback_features = property(lambda self: {})
    is_connected = property(lambda self: self.connected)
    is_calibrated = property(lambda self: self.config.calibrated)

    def connect(self, calibrate=True):
        self.get_action()
        self.connected = True

    def calibrate(self): ...
    def configure(self): ...
    def send_feedback(self, feedback): ...

    def get_action(self):
        with open(self.config.state) as file:
            return dict(zip(self.action_features, json.load(file)))

    def disconnect(self):
        self.connected = False


@TeleoperatorConfig.register_subclass("sim_steps")
@dataclass(kw_only=True)
class SimStepsConfig(SimLeaderConfig): ...


class SimSteps(SimLeader):
    config_class, name = SimStepsConfig, "sim_steps"

    @property
    def action_features(self):
        return {"delta_x": float, "delta_y": float, "delta_z": float, "gripper": float}
'''


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The plug-in is installed as pip would, and its devices read this file."""
    site = tmp_path / "site"
    for folder, file, text in (
        ("lerobot_teleoperator_sim", "__init__.py", PLUGIN),
        (
            "lerobot_teleoperator_sim-0.1.dist-info",
            "METADATA",
            "Metadata-Version: 2.1\nName: lerobot_teleoperator_sim\nVersion: 0.1\n",
        ),
    ):
        (site / folder).mkdir(parents=True)
        (site / folder / file).write_text(text)
    if "lerobot_teleoperator_sim" not in sys.modules:  # LeRobot's registry outlives a test
        monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "state.json"


def tell(state: Path, text: str) -> None:
    """A new state of the device, whole or not at all."""
    state.with_suffix(".new").write_text(text)
    state.with_suffix(".new").rename(state)


def robot_file(state: Path, text: str) -> str:
    file = state.with_name("arm.yaml")
    file.write_text(f"teleoperator: {{state: {state}}}\n{text}")
    return str(file)


def until(holds: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60.0
    while not (found := holds()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def opened(stack: ExitStack, kind: str, file: str) -> tuple[Teleop, ConnectedRobot]:
    scene = MujocoConfig(task="reach", cameras=(), renderer="none")
    connected = stack.enter_context(simulated_robot(scene))
    connected.begin(0)
    return open_teleop(stack, f"lerobot:{kind}", connected, 0, file), connected


def test_a_leader_of_lerobot_is_a_leader(state: Path) -> None:
    tell(state, json.dumps([10.0, 20.0, 0.0, -90.0, 0.0, 90.0, 45.0, 100.0]))
    file = robot_file(
        state,
        "leader: {signs: [1, -1, 1, 1, 1, 1, 1], offsets: [0, 0, 0.5, 0, 0, 0, 0], "
        "gripper_open: 100, gripper_closed: 0}\n",
    )
    with ExitStack() as stack:
        teleop, connected = opened(stack, "sim_leader", file)
        degrees = np.radians([10.0, -20.0, 0.0, -90.0, 0.0, 90.0, 45.0])
        degrees[2] -= 0.5
        np.testing.assert_allclose(teleop.operator.q, degrees, atol=1e-9)  # type: ignore[attr-defined]
        robot = connected.robot.state()
        assert "of the leader is" in teleop.ready(robot)
        told = [math.degrees(x) for x in robot.q]
        told[1], told[2] = -told[1], told[2] + math.degrees(0.5)
        tell(state, json.dumps([*told, 0.0]))
        until(lambda: teleop.ready(robot) == "" and teleop.operator.alive(0.0))
        # It dies: nothing moves, and the sentence is the plug-in's.
        state.unlink()
        until(lambda: not teleop.operator.alive(0.0) and "No such file" in teleop.problem())
        tell(state, json.dumps([*told, math.nan]))
        until(lambda: "not all of it is a number" in teleop.problem())
        tell(state, json.dumps([*told, 0.0]))
        until(lambda: teleop.problem() == "" and teleop.operator.alive(0.0))


def test_steps_of_lerobot_move_the_hand(state: Path) -> None:
    tell(state, "[0, 0, 0, 1]")
    with ExitStack() as stack:
        teleop, _ = opened(stack, "sim_steps", robot_file(state, ""))
        operator = teleop.operator
        operator.show({"mode": "human"}, {})
        tell(state, "[1, -0.5, 0, 0]")
        until(lambda: np.allclose(operator.action(4), [0.4, -0.2, 0.0, -1.0]))
        tell(state, "[0, 0, 0, 1]")
        until(lambda: np.allclose(operator.action(4), [0.0, 0.0, 0.0, -1.0]))
        tell(state, "[0, 0, 7, 2]")
        until(lambda: np.allclose(operator.action(4), [0.0, 0.0, 0.4, 1.0]))
        state.unlink()
        until(lambda: "teleoperator is gone" in teleop.problem())
        assert not operator.action(4)[:3].any()


@pytest.mark.parametrize(
    ("kind", "section", "said"),
    [
        ("sim_laeder", "", "LeRobot has no teleoperator 'sim_laeder'. Did you mean 'sim_leader'"),
        ("sim_leader", "", "Missing required field"),
        ("sim_leader", "state: /nowhere", "No such file"),
        ("sim_leader", "state: STATE, calibrated: false", "is not calibrated"),
    ],
)
def test_what_lerobot_cannot_connect(kind: str, section: str, said: str, state: Path) -> None:
    tell(state, "[0, 0, 0, 0, 0, 0, 0, 0]")
    file = state.with_name("arm.yaml")
    file.write_text(f"teleoperator: {{{section.replace('STATE', str(state))}}}")
    with pytest.raises(UserError, match=said):
        connect_teleoperator(kind, str(file))


def test_an_arm_of_six_joints_does_not_fit(state: Path) -> None:
    tell(state, "[0, 0, 0, 0, 0, 0, 0]")
    file = state.with_name("arm.yaml")
    file.write_text(f"teleoperator: {{state: {state}, joints: 6}}")
    with pytest.raises(UserError, match="An arm with seven joints is moved by"):
        tells_steps(connect_teleoperator("sim_leader", str(file)))
