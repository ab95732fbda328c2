"""An arm of LeRobot's as our robot: a simulated one, found by LeRobot itself as a plug-in."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lerobot_arm import JOINTS, SimArm, install_plugin

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.real_robot.commands.deploy import deploy_checkpoint
from embodyrl.real_robot.connect_robot import ConnectedRobot, lerobot_robot
from embodyrl.real_robot.control.any_safety import decoder_for
from embodyrl.real_robot.control.joint_safety import JointSafetyConfig
from embodyrl.real_robot.control.messages import JointTarget, Mode
from embodyrl.real_robot.control.operator import Operator
from embodyrl.real_robot.control.preflight import robot_checks
from embodyrl.real_robot.control.robot import NotReadyError
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.env.config import RobotConfig, motors_spec
from embodyrl.real_robot.env.robot_env import RobotEnv
from embodyrl.real_robot.lerobot_arm.config import load_lerobot
from embodyrl.real_robot.policy_link.metadata import policy_facts
from embodyrl.real_robot.record.teleop import open_teleop

pytest.importorskip("lerobot")
pytestmark = [pytest.mark.robot, pytest.mark.xdist_group("lerobot_arm")]
CAMERAS = {"front": (64, 64)}


@pytest.fixture
def arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimArm:
    """The plug-in is installed as pip would; this is the file of its arm."""
    install_plugin(tmp_path / "site")
    if "lerobot_robot_sim_so" not in sys.modules:  # LeRobot's registry outlives a test
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return SimArm(tmp_path)


@pytest.fixture
def connected(arm: SimArm) -> Iterator[ConnectedRobot]:
    with lerobot_robot(str(arm.file), CAMERAS, "lift the arm") as robot:
        yield robot


def facts(safety: JointSafetyConfig) -> dict[str, Any]:
    return policy_facts(motors_spec(RobotConfig(robot="lerobot"), safety.space))


def until(holds: Callable[[], Any], seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def drive_to(connected: ConnectedRobot, q: np.ndarray, seconds: float = 3.0) -> SafetyFilter:
    """Follows a target for a while, or until the filter follows no more."""
    guard = SafetyFilter(connected.safety)
    clock, robot = connected.clock, connected.robot
    until(lambda: np.abs(robot.state().dq).max() < 0.05)
    guard.start(clock.now(), robot.state())
    guard.run(clock.now())
    end = clock.now() + seconds
    while clock.now() < end and guard.mode == Mode.RUN:
        now = clock.now()
        robot.send(guard.tick(now, robot.state(), JointTarget(now, q)))
        clock.sleep_until(now + connected.safety.tick)
    return guard


# ---- What it sees and does.


def test_it_measures_shows_and_moves(connected: ConnectedRobot) -> None:
    robot, safety = connected.robot, connected.safety
    assert isinstance(safety, JointSafetyConfig)
    checks = robot_checks(robot, facts(safety), safety, 10.0, 2.0)
    assert all(check.ok for check in checks), checks
    goal = np.array([0.5, -0.4, 0.3, 0.0, 0.0, 0.6])
    guard = drive_to(connected, goal)
    assert guard.mode == Mode.RUN, guard.reason
    state = robot.state()
    assert np.abs(state.q - goal).max() < 0.05
    until(lambda: np.abs(robot.state().dq).max() < 0.05)
    seen = robot.observe(decoder_for(facts(safety), 10.0, safety))
    assert seen["prompt"] == "lift the arm"
    assert seen["images"]["front"].shape == (64, 64, 3)
    # The proprio is the share of each motor's range.
    assert seen["proprio"] == pytest.approx(safety.space.share(robot.state().q), abs=0.02)
    assert seen["proprio"][5] == pytest.approx(0.2, abs=0.1)  # 60 of 0 to 100


def test_a_picture_is_fitted_to_the_policy(arm: SimArm) -> None:
    with lerobot_robot(str(arm.file), {"front": (32, 48)}, "") as connected:
        assert connected.robot.pictures()["front"].shape == (32, 48, 3)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"unplugged": True}, "LeRobot's robot failed (There is no status packet!)"),
        ({"nan": "elbow_flex"}, "is not 6 finite"),
        ({"hangs": 2.0}, "no fresh state of the robot"),
    ],
)
def test_a_device_that_fails_is_a_fault(
    arm: SimArm, connected: ConnectedRobot, fault: dict[str, Any], words: str
) -> None:
    guard = SafetyFilter(connected.safety)
    robot, clock = connected.robot, connected.clock
    guard.start(clock.now(), robot.state())
    guard.run(clock.now())
    arm.fault(**fault)
    end = clock.now() + 10.0
    rest = 0
    while rest < 25 and clock.now() < end:
        now = clock.now()
        command = guard.tick(now, robot.state(), JointTarget(now, np.zeros(6)))
        robot.send(command)
        rest += guard.mode == Mode.FAULT and not np.abs(command.dq).any()
        clock.sleep_until(now + 0.02)
    assert guard.mode == Mode.FAULT
    assert words in guard.reason
    if "unplugged" in fault:
        with pytest.raises(NotReadyError, match="no fresh picture"):
            until(lambda: robot.observe(None) and False)
    # Mended, a person clears it.
    arm.fault()
    until(lambda: not robot.state().trouble and np.isfinite(robot.state().dq).all())
    until(lambda: clock.now() - robot.state().stamp < 0.1)
    guard.clear(clock.now(), robot.state())
    assert guard.mode == Mode.HOLD


def test_an_arm_that_fell_does_not_jump_back(arm: SimArm, connected: ConnectedRobot) -> None:
    guard = drive_to(connected, np.zeros(6), seconds=0.5)
    robot, clock = connected.robot, connected.clock

    def tick(seconds: float) -> np.ndarray:
        """Goes on; the places of the second motor in degrees."""
        places = []
        end = clock.now() + seconds
        while clock.now() < end:
            now = clock.now()
            robot.send(guard.tick(now, robot.state(), JointTarget(now, np.zeros(6))))
            places.append(math.degrees(robot.state().q[1]))
            clock.sleep_until(now + 0.02)
        return np.array(places)

    arm.fault(unplugged=True)
    tick(1.0)
    assert guard.mode == Mode.FAULT
    arm.fault(fallen={"shoulder_lift": 60.0})
    until(lambda: robot.state().q[1] > 1.0)
    assert tick(1.0).min() > 55.0
    guard.clear(clock.now(), robot.state())
    assert tick(1.5).min() > 55.0
    # From there it is moved again.
    guard.run(clock.now())
    assert tick(3.0)[-1] < 10.0


def test_it_goes_home_between_episodes_but_not_before_the_check(connected: ConnectedRobot) -> None:
    away = np.array([0.4, -0.3, 0.2, 0.0, 0.0, 0.5])
    drive_to(connected, away)
    until(lambda: np.abs(connected.robot.state().dq).max() < 0.05)
    connected.begin(0)
    assert np.abs(connected.robot.state().q - away).max() < 0.06
    connected.begin(0)
    assert np.abs(connected.robot.state().q).max() < 0.06


@pytest.mark.parametrize("what", ["Ctrl-C", "a fault", "the page's stop"])
def test_what_stops_it_on_the_way_home_brakes_it_first(
    connected: ConnectedRobot, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The last command is at rest, so nothing lets go of a moving arm."""
    drive_to(connected, np.array([0.4, -0.3, 0.2, 0.0, 0.0, 0.5]))
    until(lambda: np.abs(connected.robot.state().dq).max() < 0.05)
    connected.begin(0)
    robot = connected.robot
    send, state, told, pressed, shown = robot.send, robot.state, [], [], []
    hot = what == "a fault"

    class AtThePage(Operator):
        """Presses stop on the way."""

        def wishes(self) -> list[str]:
            return pressed

        def show(self, status: dict[str, Any], images: dict[str, Any]) -> None:
            shown.append((status["reason"], status["can"]))

    connected.person = AtThePage()

    def sends(command: Any) -> None:
        told.append(np.abs(command.dq).max())
        if what == "the page's stop" and len(told) == 30:
            pressed.append("estop")
        if what == "Ctrl-C" and len(told) == 30:
            os.kill(os.getpid(), signal.SIGINT)
        send(command)

    def states() -> Any:
        now = state()
        return replace(now, trouble="a motor is hot") if hot and len(told) > 30 else now

    monkeypatch.setattr(robot, "send", sends)
    monkeypatch.setattr(robot, "state", states)
    words = {"Ctrl-C": "", "a fault": "a motor is hot", "the page's stop": "a person pressed stop"}
    error = KeyboardInterrupt if what == "Ctrl-C" else UserError
    with pytest.raises(error, match=words[what]):
        connected.begin(0)
    assert shown[0] == ("the arm goes home", ["estop"])
    assert max(told) > 0.05 and told[-1] < 1e-6
    # It stands where it was braked, and not at home.
    monkeypatch.undo()
    assert np.abs(robot.state().q).max() > 0.06


def test_an_arm_that_is_gone_does_not_come_home(arm: SimArm, connected: ConnectedRobot) -> None:
    drive_to(connected, np.full(6, 0.3))
    connected.begin(0)
    arm.fault(unplugged=True)
    until(lambda: connected.robot.state().trouble)
    with pytest.raises(UserError, match="no status packet"):
        connected.begin(0)


# ---- What cannot be used.


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"lerobot": {}, "safety": {}}, "must say in its section lerobot which robot it is"),
        (
            {"lerobot": {"port": "x"}, "safety": {"joints": JOINTS}},
            "must say in its section lerobot which robot it is",
        ),
        ({"lerobot": {"type": "sim_so"}, "safety": {}}, "must give the range of each motor"),
        ({"lerobot": {"type": "sim_so"}, "robot": 3}, "has no key 'robot'"),
        ({"lerobot": {"type": "sim_soo"}}, "LeRobot has no robot 'sim_soo'. Did you mean 'sim_so'"),
        (
            {"lerobot": {"type": "sim_so", "prot": 1}},
            "settings of LeRobot's robot sim_so are wrong",
        ),
        ({"lerobot": {"type": "so101_follower"}}, "robot so101_follower are wrong"),
        (
            {"lerobot": {"type": "so101_follower", "port": "/dev/nothing"}},
            "LeRobot's robot so101_follower cannot be connected",
        ),
        ({"safety": {"joints": {**JOINTS, "elbow": [0, 9]}}}, "names the motor elbow, which"),
        (
            {"safety": {"joints": {"shoulder_pan": [-90, 90]}}},
            "gives no range for the motor shoulder_lift",
        ),
        ({"safety": {"joints": JOINTS, "sped": 1}}, "safety has no key 'sped'"),
        ({"safety": {"joints": JOINTS, "speed": "fast"}}, "safety.speed is wrong"),
        ({"safety": {"joints": [1, 2]}}, "must give the range of each motor"),
    ],
)
def test_a_file_that_cannot_be(arm: SimArm, sections: dict[str, Any], words: str) -> None:
    usual = {"lerobot": {"type": "sim_so"}, "safety": {"joints": JOINTS}}
    arm.write(sections if len(sections) > 1 else {**usual, **sections})
    with (
        pytest.raises(UserError, match=re.escape(words)),
        lerobot_robot(str(arm.file), CAMERAS, ""),
    ):
        pass


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"no_port": True}, "cannot be connected: Could not connect on port"),
        ({"calibrated": False}, "is not calibrated. Do that first: lerobot-calibrate"),
        ({"unplugged": True}, "The robot cannot be used: LeRobot's robot failed"),
    ],
)
def test_a_device_that_cannot_be_used(arm: SimArm, fault: dict[str, Any], words: str) -> None:
    arm.fault(**fault)
    with (
        pytest.raises(UserError, match=re.escape(words)),
        lerobot_robot(str(arm.file), CAMERAS, ""),
    ):
        pass


def test_a_camera_that_is_not_there(arm: SimArm) -> None:
    with (
        pytest.raises(UserError, match="camera 'wrist', and the robot has front"),
        lerobot_robot(str(arm.file), {"wrist": (64, 64)}, ""),
    ):
        pass


def test_without_a_file_or_lerobot(monkeypatch: pytest.MonkeyPatch, arm: SimArm) -> None:
    with pytest.raises(UserError, match="--robot lerobot needs --robot-file"):
        load_lerobot("")
    with pytest.raises(UserError, match="There is no file nowhere"):
        load_lerobot("nowhere.yaml")
    monkeypatch.setitem(sys.modules, "lerobot.robots", None)
    with (
        pytest.raises(MissingDependencyError, match=r"needs LeRobot.*embodyrl\[data\]"),
        lerobot_robot(str(arm.file), CAMERAS, ""),
    ):
        pass


def test_no_algorithm_plays_on_it() -> None:
    with pytest.raises(UserError, match="embodyrl improve"):
        RobotEnv(RobotConfig(robot="lerobot"))


def test_an_exported_server_of_a_franka_is_refused(arm: SimArm, tmp_path: Path) -> None:
    from embodyrl.real_robot.policy_link.server import PolicyServer

    conventions = {"actions": "delta"}
    metadata = {
        **{"env": "mujoco/pick", "control_mode": "ee_delta_pos", "conventions": conventions},
        **{"action_dim": 4, "proprio_dim": 7, "control_hz": 25.0, "max_episode_steps": 40},
        **{"cameras": {"front": [64, 64]}, "horizon": 5, "execute": 5},
    }
    server = PolicyServer(lambda seen: {}, metadata, port=0)
    import threading

    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(UserError, match="mujoco/pick/ee_delta_pos are no positions of motors"):
            deploy_checkpoint(
                f"ws://127.0.0.1:{server.port}", robot="lerobot", robot_file=str(arm.file),
                mode="sync", out=str(tmp_path / "out"),
            )  # fmt: skip
    finally:
        server.close()


# ---- The person's leader.


@pytest.mark.parametrize(
    "kind", ["page", "keyboard", "gamepad", "spacemouse", "leader", "scripted"]
)
def test_only_a_leader_moves_it(arm: SimArm, connected: ConnectedRobot, kind: str) -> None:
    with ExitStack() as opened, pytest.raises(UserError, match="a leader with the same motors"):
        open_teleop(opened, kind, connected, 0, str(arm.file))


def test_a_leader_is_followed_from_where_the_arm_is(arm: SimArm, connected: ConnectedRobot) -> None:
    safety = connected.safety
    assert isinstance(safety, JointSafetyConfig)
    with ExitStack() as opened:
        teleop = open_teleop(opened, "lerobot:sim_so_leader", connected, 0, str(arm.file))
        operator = teleop.operator
        arm.stand(shoulder_pan=60.0)
        until(lambda: operator.action(6)[0] == pytest.approx(60 / 110))
        assert "shoulder_pan of the leader is at 60 degrees, and the arm's at 0" in teleop.ready(
            connected.robot.state()
        )
        # A gripper is followed from wherever it is.
        arm.stand(shoulder_pan=10.0, gripper=90.0)
        until(lambda: teleop.ready(connected.robot.state()) == "")
        # Beyond the arm's range is its end.
        arm.stand(wrist_flex=300.0)
        until(lambda: operator.action(6)[3] == 1.0)
        assert operator.alive(0.0)
        for text, words in (
            ('{"pose": {"shoulder_pan": NaN}}', "not all of it is a number"),
            ("{}", "teleoperator is gone"),
        ):
            arm.leader.write_text(text)
            until(lambda words=words: words in teleop.problem())
            until(lambda: not operator.alive(0.0))
        arm.stand(shoulder_pan=0.0)
        until(lambda: teleop.problem() == "" and operator.alive(0.0))


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"motors": ["shoulder_pan", "gripper"]}, "does not tell shoulder_lift.pos"),
        ({"motor": []}, "teleoperator sim_so_leader are wrong"),
    ],
)
def test_a_leader_of_another_arm(
    arm: SimArm, connected: ConnectedRobot, section: dict[str, Any], words: str
) -> None:
    own = {"state": str(arm.leader), **section}
    usual = {"lerobot": {"type": "sim_so"}, "safety": {"joints": JOINTS}}
    arm.write({**usual, "teleoperator": own})
    with ExitStack() as opened, pytest.raises(UserError, match=re.escape(words)):
        open_teleop(opened, "lerobot:sim_so_leader", connected, 0, str(arm.file))
