"""LeRobot's own commands, as processes without a display or a hub: another's arm, and ours."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lerobot_arm import SimArm, environment, install_plugin

from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.errors import UserError
from embodyrl.real_robot.connect_robot import ConnectedRobot, simulated_robot
from embodyrl.real_robot.control.any_safety import decoder_for
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.step_driver import StepDriver
from embodyrl.real_robot.policy_link.metadata import policy_facts
from embodyrl.sims.mujoco.config import MujocoConfig

pytest.importorskip("lerobot")
pytestmark = pytest.mark.timeout(900)  # processes, each of which imports PyTorch and LeRobot
OURS = (
    "--robot.discover_packages_path=embodyrl.real_robot.lerobot_plugin",
    "--robot.type=embodyrl",
    "--robot.overrides=[env.task=reach,env.speed=1]",
    "--robot.init=3",
)
SCRIPTED = ("--teleop.type=embodyrl", "--teleop.device=scripted")
QUIET = ("--dataset.push_to_hub=false", "--play_sounds=false", "--dataset.reset_time_s=0")


def lerobot(folder: Path, command: str, *words: str, status: int = 0) -> str:
    """One of LeRobot's commands in a process of its own."""
    done = subprocess.run(
        [Path(sys.executable).with_name(f"lerobot-{command}"), *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment(folder / "site", folder / "hf"),
        timeout=280,
    )
    assert (done.returncode == 0) == (status == 0), done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    install_plugin(tmp_path / "site")
    return tmp_path


def dataset(folder: Path) -> tuple[str, str]:
    return "--dataset.repo_id=me/data", f"--dataset.root={folder / 'data'}"


def test_their_commands_take_the_simulated_arm_that_ours_take(folder: Path) -> None:
    arm = SimArm(folder)
    arm.stand(shoulder_pan=20.0, gripper=50.0)
    robot = ("--robot.type=sim_so",)
    teleop = ("--teleop.type=sim_so_leader", f"--teleop.state={arm.leader}")
    length = ("--dataset.num_episodes=1", "--dataset.episode_time_s=2", "--dataset.fps=10")
    what = "--dataset.single_task=turn"
    lerobot(folder, "record", *robot, *teleop, *dataset(folder), *length, *QUIET, what)
    demos = load_demonstrations(folder / "data", 1)
    # LeRobot's own data hold its units.
    assert demos.actions[-1].numpy() == pytest.approx([20, 0, 0, 0, 0, 50])
    assert demos.proprio[-1].numpy() == pytest.approx([20, 0, 0, 0, 0, 50], abs=4.0)


def test_their_commands_move_our_simulated_arm(folder: Path) -> None:
    length = ("--dataset.num_episodes=1", "--dataset.episode_time_s=8", "--dataset.fps=25")
    what = "--dataset.single_task=reach the green ball"
    words = (*OURS, *SCRIPTED, *dataset(folder), *length, *QUIET, what)
    lerobot(folder, "record", *words)
    config = MujocoConfig(task="reach", num_envs=1)
    # The data fit our env, and hold what our own twin does by these actions from this state.
    with simulated_robot(config) as connected:
        twin = connected.robot
        demos = load_demonstrations(folder / "data", 1, spec=twin.spec)  # type: ignore[attr-defined]
        assert demos.num_episodes == 1
        assert demos.sentences == ["reach the green ball"]
        assert len(demos) > 15
        hand = demos.proprio[:, :3].numpy()
        assert np.abs(hand[-1] - hand[0]).max() > 0.05  # it went somewhere
        connected.begin(3)
        assert twin.state().hand == pytest.approx(hand[0], abs=2e-3)
    # The expert solves it, behind LeRobot as before us: the hand ends at the ball.
    facts = policy_facts(twin.spec)  # type: ignore[attr-defined]
    with simulated_robot(config) as connected:
        connected.begin(3)
        decoder = decoder_for(facts, 25.0, connected.safety)
        assert not connected.robot.solved()
        _play(connected, decoder, demos.actions.numpy())
        assert connected.robot.solved()
        assert connected.robot.state().hand == pytest.approx(hand[-1], abs=5e-3)
    # The same words play it again.
    lerobot(folder, "replay", *OURS, *dataset(folder), "--dataset.episode=0", QUIET[1])


@pytest.mark.slow
def test_their_commands_move_ours_without_recording(folder: Path) -> None:
    said = lerobot(folder, "teleoperate", *OURS, *SCRIPTED, "--teleop_time_s=1", "--fps=25")
    assert "Teleop loop time" in said


def _play(connected: ConnectedRobot, decoder: Any, actions: np.ndarray) -> None:
    """Has the twin carry out actions, one after the other."""
    guard = SafetyFilter(replace(connected.safety, resume="fresh_target"))
    driver = StepDriver(connected.robot, connected.clock, guard, decoder, threaded=False)
    driver.start()
    for action in actions:
        driver.wait_until(driver.act(action))
    driver.stop()


def test_settings_that_cannot_be(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    from lerobot.robots import make_robot_from_config

    from embodyrl.real_robot.lerobot_plugin import (
        EmbodyrlArmConfig,
        EmbodyrlPerson,
        EmbodyrlPersonConfig,
    )

    calibration = {"calibration_dir": folder}
    with pytest.raises(UserError, match="Give LeRobot's own teleoperator"):
        EmbodyrlPerson(EmbodyrlPersonConfig(device="lerobot:gamepad", **calibration)).connect()
    person = EmbodyrlPerson(EmbodyrlPersonConfig(device="gamepad", **calibration))
    person.connect()
    with pytest.raises(UserError, match="none is connected"):
        person.get_action()
    # LeRobot wraps what a robot's constructor raises.
    with pytest.raises(ValueError, match="give its type as"):
        make_robot_from_config(EmbodyrlArmConfig(arm="lerobot", **calibration))
    arm = make_robot_from_config(EmbodyrlArmConfig(arm="twinn", **calibration))
    with pytest.raises(UserError, match="There is no robot 'twinn'"):
        arm.connect()
    with pytest.raises(UserError, match="not connected"):
        arm.get_observation()
    arm = make_robot_from_config(EmbodyrlArmConfig(overrides=["env.task=reach"], **calibration))
    arm.connect()
    try:
        with pytest.raises(UserError, match="There is no gamepad at"):
            person.get_action()
        assert arm.get_observation()["front"].shape == (64, 64, 3)
        action = dict.fromkeys(arm.action_features, 5.0)
        assert set(arm.send_action(action).values()) == {1.0}
        # What is no number stops the arm, and is said.
        arm.send_action(action | {"delta_x": float("nan")})
        with pytest.raises(UserError, match="The arm stopped: the target is not finite"):
            arm.get_observation()
    finally:
        arm.disconnect()
    assert not arm.is_connected
