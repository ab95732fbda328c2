"""The arm by libfranka, against franka-sim: real libfranka, its protocol, and the reflexes.

``make test-robot`` installs both; the parts that need neither are tested everywhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from franka_arm import ARM, HZ, PATIENT, SIM, SPACE, H, driven, start_sim
from robotiq_device import RobotiqDevice
from ros_arm import AWAY, FAR, TOLD, Faults, TakesOver, ends_at_rest, goes_on, is_there, towards

from embodyrl.build import make_policy
from embodyrl.cli.main import main
from embodyrl.config import compose
from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.real_robot.cameras.config import OpenCVCamera
from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.messages import Mode
from embodyrl.real_robot.control.preflight import robot_checks
from embodyrl.real_robot.grippers.robotiq import RobotiqGripper
from embodyrl.real_robot.libfranka.config import Franka, load_arm
from embodyrl.real_robot.libfranka.process_link import Link, pair
from embodyrl.real_robot.libfranka.realtime import ask_for_real_time
from embodyrl.real_robot.libfranka.robot import LibfrankaRobot
from embodyrl.real_robot.logs.mcap_log import read
from embodyrl.real_robot.twin.franka_sim import FrankaSimInScene
from embodyrl.real_robot.twin.mujoco_twin import MujocoTwin
from embodyrl.sims.mujoco.env import MujocoConfig
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_to_json

pytestmark = [pytest.mark.robot, pytest.mark.xdist_group("libfranka")]
ROOT = Path(__file__).parents[3]
HERE = (
    importlib.util.find_spec("pylibfranka") is not None
    and (SIM / "bin" / "run-franka-sim-server").exists()
)
needs_sim = pytest.mark.skipif(
    not HERE, reason="no pylibfranka or franka-sim here; make test-robot installs them"
)


@pytest.fixture(scope="module")
def sim() -> Iterator[subprocess.Popen[bytes]]:
    process = start_sim()
    yield process
    process.kill()
    process.wait()


def struck(robot: LibfrankaRobot, strike: Callable[[], object]) -> None:
    """Does something once the arm moves."""

    def wait_and_strike() -> None:
        end = time.monotonic() + 120.0
        while time.monotonic() < end and (
            robot._state is None or np.abs(robot._state.dq).max() < 0.15
        ):
            time.sleep(0.002)
        strike()

    threading.Thread(target=wait_and_strike, daemon=True).start()


@pytest.fixture
def robot(sim: subprocess.Popen[bytes]) -> Iterator[LibfrankaRobot]:
    robot = LibfrankaRobot(ARM, PATIENT, SPACE, {}, seconds=60.0)
    try:
        yield robot
    finally:
        robot.close()
        time.sleep(1.5)


@needs_sim
def test_a_filtered_sweep_raises_no_reflex(robot: LibfrankaRobot, tmp_path: Path) -> None:
    robot.begin(0, 120.0)
    np.testing.assert_allclose(robot.state().q, ARM.home, atol=0.01)
    episode = driven(robot, tmp_path / "run.mcap", 3.0)
    assert (episode.mode, episode.reason) == (Mode.HOLD, "the time is up"), episode
    assert max(episode.peak.values()) <= 1.0 and not robot.state().reflex
    # It counts the last hundred cycles, of which a busy computer may lose some.
    end = time.monotonic() + 30.0
    while robot.success_rate <= 0.99 and time.monotonic() < end:
        time.sleep(0.05)
        robot.state()
    assert robot.success_rate > 0.99
    messages = read(tmp_path / "run.mcap")
    hand = np.array([m["q"] for m in messages["/state"]])
    told = np.array([m["q"] for m in messages["/command"]])
    assert np.ptp(hand[:, 0]) > 0.05  # it did sweep
    assert (
        np.abs(hand[5:] - told[:-5])[:, :6].max() < 0.03
    )  # and was where it was told to be, 50 ms later; the
    # simulator's seventh joint is soft


@needs_sim
def test_the_same_sweep_unfiltered_raises_one(sim: subprocess.Popen[bytes]) -> None:
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "franka_arm.py"), "--unfiltered"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert "discontinuity" in said.stdout and "reflex" in said.stdout, said
    time.sleep(1.5)


def freeze(robot: LibfrankaRobot, seconds: float) -> None:
    """The control process stalls, so that the robot hears nothing."""
    pid = robot._processes[0].pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


@needs_sim
def test_the_arm_goes_on_from_where_it_is_after_cycles_that_were_lost(
    robot: LibfrankaRobot, tmp_path: Path
) -> None:
    robot.begin(0, 120.0)

    def stall_often() -> None:
        for _ in range(10):
            freeze(robot, 0.006)
            time.sleep(0.2)

    struck(robot, stall_often)
    goes_on(driven(robot, tmp_path / "run.mcap", 8.0), tmp_path / "run.mcap")
    assert not robot.state().reflex


@needs_sim
@pytest.mark.parametrize(
    ("fault", "told"),
    [("stall", "reflex: libfranka: Move command aborted"), ("killed", "the control process ended")],
)
def test_a_fault_of_the_control_process_is_a_fault(
    robot: LibfrankaRobot, tmp_path: Path, fault: str, told: str
) -> None:
    robot.begin(0, 120.0)
    kill = {"stall": lambda: freeze(robot, 0.5), "killed": lambda: robot._processes[0].kill()}
    struck(robot, kill[fault])
    episode = driven(robot, tmp_path / "run.mcap", 30.0)
    ends_at_rest(episode, tmp_path / "run.mcap", Mode.FAULT, told)
    if fault == "stall":
        assert "communication_constraints_violation" in episode.reason
        with pytest.raises(UserError, match="stopped by a reflex"):
            robot.begin(1)


@needs_sim
def test_a_ticker_that_is_killed_leaves_an_arm_that_brakes(
    sim: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    command = [
        sys.executable,
        str(ROOT / "tests" / "helpers" / "franka_arm.py"),
        str(tmp_path / "a.mcap"),
    ]
    ticker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert ticker.stdout is not None and ticker.stdout.readline() == "sweeps\n"
    (control,) = psutil.Process(ticker.pid).children()
    time.sleep(3.0)
    ticker.kill()
    ticker.wait()
    control.wait(timeout=60.0)  # it stops the arm, ends the motion, and then itself
    time.sleep(1.5)
    robot = LibfrankaRobot(ARM, PATIENT, SPACE, {}, seconds=60.0)
    try:
        assert not robot.state().reflex and not robot.state().trouble
    finally:
        robot.close()
        time.sleep(1.5)


@needs_sim
def test_a_reflex_is_recovered_from_only_where_that_is_asked_for(
    sim: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    robot = LibfrankaRobot(ARM, replace(PATIENT, recover_reflex=True), SPACE, {}, seconds=60.0)
    try:
        robot.begin(0, 120.0)
        struck(robot, lambda: freeze(robot, 0.5))
        assert (
            driven(robot, tmp_path / "run.mcap", 30.0).mode == Mode.FAULT and robot.state().reflex
        )
        robot.begin(1, 120.0)
        assert (
            driven(robot, tmp_path / "run.mcap", 1.0).mode == Mode.HOLD and not robot.state().reflex
        )
    finally:
        robot.close()
        time.sleep(1.5)


@needs_sim
def test_a_task_is_solved_in_the_scene_around_franka_sim(
    sim: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    robot = FrankaSimInScene(
        load_arm("")[0],
        PATIENT,
        SPACE,
        MujocoTwin(MujocoConfig(task="reach", image_size=32, split="eval")),
    )
    try:
        robot.begin(0, 120.0)
        ball = np.array(robot.twin.layouts[0].ball)  # type: ignore[union-attr]

        def reach(observation: dict[str, Any]) -> dict[str, Any]:
            assert observation["images"]["front"].shape == (32, 32, 3)
            way = np.clip((ball - observation["proprio"][3:6]) / SPACE.metres, -0.5, 0.5)
            chunk = np.zeros((H, 4), np.float32)
            chunk[0, :3] = way
            return {"actions": chunk}

        episode = driven(robot, tmp_path / "run.mcap", 8.0, reach)
        assert episode.solved and max(episode.peak.values()) <= 1.0 and not robot.state().reflex
    finally:
        robot.close()
        time.sleep(1.5)


@needs_sim
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_deploys_a_checkpoint(
    sim: subprocess.Popen[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An untrained policy that sees the camera."""
    (tmp_path / "preset.yaml").write_text(
        "env: {name: mujoco, task: reach, image_size: 32, num_envs: 1}\n"
        "policy: {name: flow_vla, width: 32, heads: 2}\nalgorithm: {name: ppo}\n"
    )
    config = compose(str(tmp_path / "preset.yaml"), [])
    env = MujocoTwin(config.env)  # type: ignore[arg-type]
    policy = make_policy(config.policy, env.spec, 0)
    meta = {
        "config": json.loads(json.dumps(asdict(config))),
        "spec": spec_to_json(env.spec),
    }
    env.close()
    saved = str(checkpoint.save(tmp_path / "step_000001", {"policy": policy.state_dict()}, meta))
    out = tmp_path / "out"
    status = main(["deploy", saved, "--robot", "libfranka", "--mode", "sync", "--out", str(out)])
    assert status == 0, capsys.readouterr()
    assert "mujoco/reach on libfranka" in capsys.readouterr().out
    (row,) = json.loads((out / "result.json").read_text())["results"]
    assert "reflex" not in row["reason"] and row["taken"] >= 1 and max(row["peak"].values()) <= 1.0
    time.sleep(1.5)


@needs_sim
@pytest.mark.parametrize("fault", [*TOLD])
def test_a_fault_of_the_policy_ends_at_rest_within_limits_and_in_the_log(
    robot: LibfrankaRobot, tmp_path: Path, fault: str
) -> None:
    robot.begin(0, 120.0)
    episode = driven(robot, tmp_path / "run.mcap", 20.0, Faults(fault, 20.0))
    ends_at_rest(
        episode,
        tmp_path / "run.mcap",
        Mode.HOLD,
        TOLD[fault],
        reason="stale: no fresh",
        moving=False,
    )
    assert not robot.state().reflex


@needs_sim
def test_a_cold_start_waits_at_rest(robot: LibfrankaRobot, tmp_path: Path) -> None:
    robot.begin(0, 120.0)
    goes_on(
        driven(robot, tmp_path / "run.mcap", 2.0, Faults("cold start", 3.0)), tmp_path / "run.mcap"
    )
    commands = read(tmp_path / "run.mcap")["/command"]
    assert [c["mode"] for c in commands[:5]] == ["hold"] * 5 and not robot.state().reflex


@needs_sim
@pytest.mark.parametrize("where", AWAY)
def test_where_the_arm_cannot_go_no_reflex_is_raised(
    robot: LibfrankaRobot, tmp_path: Path, where: str
) -> None:
    robot.begin(0, 120.0)
    episode = driven(
        robot, tmp_path / "run.mcap", 6.0, towards(*AWAY[where]), replace(PATIENT, **FAR)
    )
    assert (
        is_there(goes_on(episode, tmp_path / "run.mcap")[-1], where, "fr3")
        and not robot.state().reflex
    )


@needs_sim
def test_a_person_takes_over_while_the_policy_thinks_and_the_workspace_holds(
    robot: LibfrankaRobot, tmp_path: Path
) -> None:
    robot.begin(0, 120.0)
    policy = Faults("hangs", 3.0)
    episode = driven(
        robot, tmp_path / "run.mcap", 20.0, policy, operator=TakesOver(policy, robot.now)
    )
    assert (
        episode.reason == "a person said failure" and episode.human > 5 and not robot.state().reflex
    )
    assert max(episode.peak.values()) <= 1.0
    modes = [c["mode"] for c in read(tmp_path / "run.mcap")["/command"]]
    assert "run" not in modes[modes.index("human") :]  # the policy's late answer moves nothing
    robot.begin(1, 120.0)
    down = {"actions": np.tile(np.array([0.0, 0.0, -1.0, 1.0], np.float32), (H, 1))}
    episode = driven(robot, tmp_path / "run.mcap", 2.0, lambda seen: down)
    assert (episode.mode, episode.reason) == (
        Mode.HOLD,
        "the time is up",
    ) and not robot.state().reflex
    hand = np.array([kinematics.tip(m["q"]) for m in read(tmp_path / "run.mcap")["/command"]])
    assert PATIENT.box_low[2] - 0.01 < hand[:, 2].min() < PATIENT.box_low[2] + 0.02


@needs_sim
def test_a_gripper_that_hangs_does_not_stop_the_arm(
    sim: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    robot = LibfrankaRobot(replace(ARM, gripper=True), PATIENT, SPACE, {}, seconds=60.0)
    try:
        robot.begin(0, 120.0)
        struck(robot, lambda: os.kill(robot._processes[1].pid, signal.SIGSTOP))
        episode = driven(robot, tmp_path / "run.mcap", 2.0)
        assert (episode.mode, episode.reason) == (
            Mode.HOLD,
            "the time is up",
        ) and not robot.state().reflex
    finally:
        os.kill(robot._processes[1].pid, signal.SIGCONT)
        robot.close()
        time.sleep(1.5)


@needs_sim
def test_the_gripper_has_a_process_of_its_own(sim: subprocess.Popen[bytes]) -> None:
    robot = LibfrankaRobot(Franka(realtime=False), PATIENT, SPACE, {}, seconds=60.0)
    try:
        assert robot._gripper is not None
        for width in (0.02, 0.06):
            robot._gripper.move(width)
            robot._wait(
                lambda width=width: abs(robot.state().width - width) < 0.005, 60.0, f"not {width} m"
            )
    finally:
        robot.close()
        time.sleep(1.5)


@needs_sim
def test_a_gripper_whose_process_ends_is_a_fault(
    sim: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    robot = LibfrankaRobot(replace(ARM, gripper=True), PATIENT, SPACE, {}, seconds=60.0)
    try:
        robot.begin(0, 120.0)
        struck(robot, robot._processes[1].kill)
        episode = driven(robot, tmp_path / "run.mcap", 30.0)
        told = "the gripper's process ended"
        ends_at_rest(episode, tmp_path / "run.mcap", Mode.FAULT, told)
    finally:
        robot.close()
        time.sleep(1.5)


@needs_sim
def test_a_robotiq_beside_the_arm(sim: subprocess.Popen[bytes], tmp_path: Path) -> None:
    device = RobotiqDevice(tmp_path / "robotiq")
    arm = replace(ARM, gripper=RobotiqGripper(str(device.path)))
    robot = LibfrankaRobot(arm, PATIENT, SPACE, {}, seconds=60.0)
    try:
        robot.begin(0, 120.0)
        metadata = {
            "env": "robot", "control_mode": "ee_delta_pos", "cameras": {}, "proprio_dim": 7,
        }  # fmt: skip
        checks = {c.name: c for c in robot_checks(robot, metadata, PATIENT, HZ, HZ)}
        assert checks["gripper"].ok and "8.0 cm open" in checks["gripper"].found, checks
        # Its width is the robot's, and the policy's actions move it.
        closes = lambda seen: {"actions": np.tile(np.float32([0, 0, 0, -1]), (H, 1))}  # noqa: E731
        driven(robot, tmp_path / "close.mcap", 2.0, closes)
        assert robot.state().width == 0.0
        widths = [m["width"] for m in read(tmp_path / "close.mcap")["/state"]]
        assert widths[0] == pytest.approx(0.08) and any(0.02 < width < 0.06 for width in widths)
        # In mid-motion it stops answering.
        struck(robot, lambda: setattr(device, "noise", "silent"))
        episode = driven(robot, tmp_path / "run.mcap", 30.0)
        ends_at_rest(episode, tmp_path / "run.mcap", Mode.FAULT, "the Robotiq 2f_85", "answer")
    finally:
        robot.close()
        device.unplug()
        time.sleep(1.5)


@needs_sim
def test_a_robot_that_is_gone_is_a_fault(
    sim: subprocess.Popen[bytes], robot: LibfrankaRobot, tmp_path: Path
) -> None:
    """The last one, because the simulator does not come back."""
    robot.begin(0, 120.0)
    struck(robot, sim.kill)
    episode = driven(robot, tmp_path / "run.mcap", 30.0)
    ends_at_rest(
        episode, tmp_path / "run.mcap", Mode.FAULT, "no fresh state", "libfranka", "control process"
    )


def test_a_link_hands_over_whole_messages_and_notices_an_end() -> None:
    here, other = pair()
    there = Link(other)
    for k in range(2000):  # more than fits: what does not is lost, and nobody waits
        here.say("command", k, [0.5] * 7)
    heard = there.heard()
    assert 10 < len(heard) <= 2000 and heard[0] == ["command", 0, [0.5] * 7]
    assert [m[1] for m in heard] == list(range(len(heard)))
    here.close()
    assert there.heard() == [] and there.closed


def test_arms_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "arm.yaml"
    file.write_text(
        "libfranka: {address: 172.16.0.2, cameras: {front: 0}}\n"
        "safety: {box_low: [0.3, -0.3, 0.0], box_high: [0.7, 0.3, 0.5]}\n"
    )
    arm, safety = load_arm(str(file))
    assert (arm.address, arm.realtime, arm.cameras, safety.robot) == (
        "172.16.0.2",
        True,
        {"front": OpenCVCamera("0")},
        "fr3",
    )
    for text, told in (
        ("safety: {}", "must give the workspace"),
        ("topics: {}", "has no key 'topics'"),
        (
            "libfranka: {home: [1.0]}\nsafety: {box_low: [0, 0, 0], box_high: [1, 1, 1]}",
            "has seven joints",
        ),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=told):
            load_arm(str(file))
    with pytest.raises(UserError, match="There is no file"):
        load_arm(str(tmp_path / "none.yaml"))


def test_real_time_is_asked_for_or_said_to_be_missing(tmp_path: Path) -> None:
    kernel = tmp_path / "realtime"
    with pytest.raises(RuntimeError, match=r"no real-time one.*robot_setup"):
        ask_for_real_time(kernel)
    kernel.write_text("1\n")
    code = f"""
import os, pathlib
from embodyrl.real_robot.libfranka.realtime import ask_for_real_time
try:
    ask_for_real_time(pathlib.Path({str(kernel)!r}))
    print(os.sched_getscheduler(0) == os.SCHED_FIFO)
except RuntimeError as error:
    print("rtprio" in str(error) and os.geteuid() != 0)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "True", said


def test_without_pylibfranka_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pylibfranka" else find(name)
    )
    with pytest.raises(MissingDependencyError, match="pip install pylibfranka"):
        LibfrankaRobot(*load_arm(""), SPACE, {})
