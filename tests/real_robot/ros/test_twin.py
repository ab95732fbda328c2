"""The twin behind real transports: ROS 2, ROS 1 and rosbridge, in processes that are really killed.

Rosbridge runs everywhere; rclpy and rospy where they are installed (``make test-robot`` sees to
it).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ros_arm import (
    AWAY,
    BOX,
    CALM,
    FAR,
    HZ,
    PATIENT,
    SPACE,
    TOLD,
    Arm,
    Faults,
    H,
    TakesOver,
    ends_at_rest,
    goes_on,
    hands,
    is_there,
    sweep,
    towards,
)  # fmt: skip
from ros_twin import FAULTS

from embodyrl.build import make_policy
from embodyrl.cli.main import main
from embodyrl.config import compose
from embodyrl.errors import MissingDependencyError
from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.actions import DeltaDecoder
from embodyrl.real_robot.control.clocks import RealClock
from embodyrl.real_robot.control.episode import RobotEpisode
from embodyrl.real_robot.control.executor import Executor, ExecutorConfig
from embodyrl.real_robot.control.inference import VirtualInference
from embodyrl.real_robot.control.messages import Mode
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.ticker import drive
from embodyrl.real_robot.logs.mcap_log import read
from embodyrl.real_robot.ros import rosbridge
from embodyrl.real_robot.ros.connect_bus import KINDS
from embodyrl.real_robot.twin.mujoco_twin import MujocoTwin
from embodyrl.sims.mujoco.env import MujocoConfig
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_to_json

pytestmark = pytest.mark.robot
ROOT = Path(__file__).parents[3]
HELPERS = ROOT / "tests" / "helpers"


def installed(kind: str) -> bool:
    if kind == "ros2":
        return importlib.util.find_spec("rclpy") is not None
    if kind == "ros1":
        try:
            return bool(rosbridge.find_rospy()) and shutil.which("rosmaster") is not None
        except MissingDependencyError:
            return False
    return True


# Each transport is a group of its own, which pytest-xdist gives to one process.
GROUPS = [pytest.param(kind, marks=pytest.mark.xdist_group(kind)) for kind in KINDS]


@pytest.fixture(scope="module", params=GROUPS)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    if not installed(request.param):
        pytest.skip(f"{request.param} is not installed here; make test-robot installs it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
        patch.setenv("ROS_DOMAIN_ID", str(os.getpid() % 100 + 1))  # other tests are not heard
        with roscore(patch) if request.param == "ros1" else nullcontext():
            yield request.param


@contextmanager
def roscore(patch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A ROS 1 master at a free port, in a process group of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    patch.setenv("ROS_MASTER_URI", f"http://127.0.0.1:{port}")
    patch.setenv("ROS_IP", "127.0.0.1")
    process = subprocess.Popen(
        ["rosmaster", "--core", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.1)
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Twin:
    """The simulated arm in another process; ``with`` ends it."""

    def __init__(self, kind: str) -> None:
        self.kind, script = kind, HELPERS / "ros_twin.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script), kind, "reach"], stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Twin:
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        assert words and words[0] == "ready", words
        self.address = f"127.0.0.1:{words[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, number)


@pytest.fixture(scope="module")
def twin(kind: str) -> Iterator[Twin]:
    with Twin(kind) as twin:
        yield twin


@pytest.fixture
def arm(twin: Twin, tmp_path: Path) -> Iterator[Arm]:
    with Arm(twin.kind, twin.address, tmp_path / "run.mcap") as arm:
        yield arm


@pytest.fixture(scope="module")
def here() -> Iterator[MujocoTwin]:
    """The same arm in this process."""
    twin = MujocoTwin(MujocoConfig(task="reach", image_size=32, split="eval"))
    yield twin
    twin.close()


def reach(ball: np.ndarray) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Straight to the ball, from the commanded hand in proprio."""

    def infer(observation: dict[str, Any]) -> dict[str, Any]:
        where, chunk = observation["proprio"][3:6], np.zeros((H, 4), np.float32)
        for k in range(H):
            chunk[k, :3] = np.clip((ball - where) / SPACE.metres, -0.5, 0.5)
            where = where + SPACE.metres * chunk[k, :3]
        return {"actions": chunk}

    return infer


def test_the_task_is_solved_as_it_is_in_this_process(arm: Arm, here: MujocoTwin) -> None:
    for init in (0, 1):
        here.begin(init)
        ball = np.array(here.layouts[0].ball)  # type: ignore[union-attr]
        virtual = VirtualInference(reach(ball), lambda took: 0.03)
        executor = Executor(ExecutorConfig(H, 4, HZ, "naive"), virtual)
        alone = drive(
            here, here, SafetyFilter(PATIENT), executor, DeltaDecoder(SPACE, HZ, **BOX), seconds=4.0
        )
        arm.robot.begin(init)
        np.testing.assert_allclose(arm.robot.state().q, here._q_cmd[0], atol=0.02)
        over = arm.drive(reach(ball))
        assert alone.solved and over.solved, (alone, over)
        assert max(over.peak.values()) <= 1.0 and over.mode == Mode.HOLD
        assert over.seconds < alone.seconds + 2.0


def test_pictures_and_words_are_those_of_the_task(arm: Arm, here: MujocoTwin) -> None:
    arm.robot.begin(3)
    decoder = DeltaDecoder(SPACE, HZ, **BOX)
    decoder.start(0.0, arm.robot.state())
    seen = arm.robot.observe(decoder)
    here.begin(3)
    np.testing.assert_allclose(
        seen["images"]["front"].astype(int), here.pictures()["front"].astype(int), atol=12
    )
    assert seen["prompt"] == here.instructions[0] and seen["proprio"].shape == (7,)


SIGNALS = {
    "silent": signal.SIGSTOP,
    "clock": signal.SIGUSR1,
    "camera": signal.SIGUSR2,
    "killed": signal.SIGKILL,
}
SIGNALS |= {fault: signal.SIGRTMIN + number for number, fault in enumerate(FAULTS)}


@pytest.mark.parametrize(
    ("fault", "mode", "told"),
    [
        # The force is as old as the state, and which of the two is missed first is chance.
        ("silent", Mode.FAULT, ("no fresh state of the robot", "no fresh force at the hand")),
        ("clock", Mode.FAULT, ("the clock that stamps",)),
        ("camera", Mode.HOLD, ("no fresh picture of camera front",)),
        ("repeats", Mode.HOLD, ("camera front repeats its picture",)),
        (
            "killed",
            Mode.FAULT,
            ("no fresh state of the robot", "no fresh force at the hand", "was lost"),
        ),
        ("frozen", Mode.FAULT, ("the measured angles stand still",)),
        ("late", Mode.FAULT, ("no fresh state of the robot", "no fresh force at the hand")),
        ("not finite", Mode.FAULT, ("the fingers are not finite",)),
        ("force", Mode.FAULT, ("force: 50 N at the hand",)),
        ("no force", Mode.FAULT, ("no fresh force at the hand",)),
        ("same force", Mode.FAULT, ("the measured force at the hand is exactly the same",)),
    ],
)
def test_a_fault_in_mid_run_ends_at_rest_within_limits_and_in_the_log(
    twin: Twin, tmp_path: Path, fault: str, mode: Mode, told: tuple[str, ...]
) -> None:
    with Twin(twin.kind) if fault == "killed" else nullcontext(twin) as victim:
        twin.signal(signal.SIGSTOP) if victim is not twin else None
        try:
            with Arm(victim.kind, victim.address, tmp_path / "run.mcap") as arm:
                episode, took = struck(arm, lambda: victim.signal(SIGNALS[fault]))
        finally:
            victim.signal(signal.SIGHUP)  # all is well again
            twin.signal(signal.SIGCONT)
    ends_at_rest(episode, tmp_path / "run.mcap", mode, *told)
    assert took < 10.0, took  # until the state or the picture is too old, and the stop


def test_states_that_are_lost_repeated_or_in_the_wrong_order_change_nothing(
    twin: Twin, arm: Arm, tmp_path: Path
) -> None:
    arm.robot.begin(0)
    twin.signal(SIGNALS["shuffled"])
    try:
        episode = arm.drive(sweep, 3.0, CALM)
    finally:
        twin.signal(signal.SIGHUP)
    goes_on(episode, tmp_path / "run.mcap")


class Stalls(RealClock):
    """Once, while the arm moves, the ticker is kept from its work for longer than it may be."""

    def __init__(self, arm: Arm) -> None:
        self.arm, self.stalled = arm, False

    def sleep_until(self, stamp: float) -> None:
        if not self.stalled and np.abs(self.arm.robot.state().dq).max() > 0.1:
            self.stalled = True
            time.sleep(PATIENT.max_gap + 0.2)
        super().sleep_until(stamp)


def test_a_ticker_that_stalls_holds(arm: Arm, tmp_path: Path) -> None:
    """Meanwhile the arm goes along the stop that came with the last command."""
    arm.robot.begin(0)
    episode = arm.drive(sweep, seconds=12.0, clock=Stalls(arm))
    ends_at_rest(episode, tmp_path / "run.mcap", Mode.HOLD, "no tick for 1.")


def test_a_cold_start_waits_at_rest(arm: Arm, tmp_path: Path) -> None:
    arm.robot.begin(0)
    goes_on(arm.drive(Faults("cold start", 2.0), 2.0, CALM), tmp_path / "run.mcap")
    commands = read(tmp_path / "run.mcap")["/command"]
    waited = [c for c in commands if c["stamp"] < commands[0]["stamp"] + 1.9]
    assert {c["mode"] for c in waited} == {"hold"} and not any(any(c["dq"]) for c in waited)


def test_against_the_workspaces_floor_the_hand_stays_above_it(arm: Arm, tmp_path: Path) -> None:
    arm.robot.begin(0)
    hand = hands(goes_on(arm.drive(towards(0.3, 0.0, -1.0), 4.0, CALM), tmp_path / "run.mcap"))
    assert CALM.box_low[2] - 0.011 < hand[:, 2].min() < CALM.box_low[2] + 0.02
    arm.robot.begin(0)  # the same initial state once more
    np.testing.assert_allclose(kinematics.tip(arm.robot.state().q.tolist()), hand[0], atol=0.02)


@pytest.mark.parametrize("where", AWAY)
def test_where_the_arm_cannot_go_it_stays_within_limits(
    twin: Twin, tmp_path: Path, where: str
) -> None:
    # Out there the camera sees nothing of it.
    with Arm(twin.kind, twin.address, tmp_path / "run.mcap", blind=True) as arm:
        arm.robot.begin(0)
        episode = arm.drive(towards(*AWAY[where]), 6.0, replace(CALM, **FAR))
    assert is_there(goes_on(episode, tmp_path / "run.mcap")[-1], where, "panda")


@pytest.mark.parametrize("fault", [*TOLD])
def test_a_fault_of_the_policy_ends_at_rest_within_limits_and_in_the_log(
    arm: Arm, tmp_path: Path, fault: str
) -> None:
    arm.robot.begin(0)
    episode = arm.drive(Faults(fault, 6.0), seconds=20.0)
    ends_at_rest(
        episode,
        tmp_path / "run.mcap",
        Mode.HOLD,
        TOLD[fault],
        reason="stale: no fresh",
        moving=False,
    )


def test_a_person_takes_over_while_the_policy_thinks(arm: Arm, tmp_path: Path) -> None:
    arm.robot.begin(0)
    policy = Faults("hangs", 0.8)
    episode = arm.drive(policy, seconds=20.0, operator=TakesOver(policy, time.monotonic))
    assert (episode.mode, episode.reason) == (
        Mode.HOLD,
        "a person said failure",
    ) and episode.human > 5
    assert max(episode.peak.values()) <= 1.0
    modes = [c["mode"] for c in read(tmp_path / "run.mcap")["/command"]]
    assert modes.index("human") < len(modes) - modes[::-1].index("human") <= len(modes)
    assert "run" not in modes[modes.index("human") :]  # its late answer moves nothing


def struck(arm: Arm, strike: Callable[[], None]) -> tuple[RobotEpisode, float]:
    """An episode in which something happens while the arm moves, and s from there to its end."""
    arm.robot.begin(0)
    happened = []

    def wait_and_strike() -> None:
        time.sleep(1.5)  # the robot's clock is known by now
        end = time.monotonic() + 8.0
        while time.monotonic() < end and np.abs(arm.robot.state().dq).max() < 0.1:
            time.sleep(0.002)
        happened.append(time.monotonic())
        strike()

    striker = threading.Thread(target=wait_and_strike)
    striker.start()
    episode = arm.drive(sweep, seconds=12.0)
    striker.join()
    return episode, time.monotonic() - happened[0]


@pytest.mark.slow
def test_without_commands_the_arm_brakes_by_itself(twin: Twin, arm: Arm, tmp_path: Path) -> None:
    """The ticker's process is killed in mid-motion: each command had carried a stop."""
    command = [sys.executable, str(HELPERS / "ros_arm.py"), twin.kind, twin.address]
    arm.robot.begin(0)
    other = subprocess.Popen(
        [*command, str(tmp_path / "other.mcap")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "sweeps\n"
        end, killed, fastest = time.monotonic() + 60.0, 0.0, 0.0
        while time.monotonic() < end and not (killed and fastest < 0.01):
            fastest = float(np.abs(arm.robot.state().dq).max())
            if not killed and fastest > 0.25:
                other.kill()
                killed = time.monotonic()
            time.sleep(0.002)
        assert killed, other.communicate()[0] if other.poll() is not None else "it did not move"
        # Nothing that was on its way moves it on for long, and it does not stop where it happens to
        # be.
        assert fastest < 0.01 and time.monotonic() - killed < 5.0
    finally:
        other.kill()
        other.wait()


@pytest.mark.slow
def test_the_commands_twin_and_deploy(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a user calls them, with an untrained policy that sees the camera."""
    config = compose(str(preset(tmp_path)), [])
    env = MujocoTwin(config.env)  # type: ignore[arg-type]
    policy = make_policy(config.policy, env.spec, 0)
    meta = {
        "config": json.loads(json.dumps(asdict(config))),
        "spec": spec_to_json(env.spec),
    }
    env.close()
    saved = str(checkpoint.save(tmp_path / "step_000001", {"policy": policy.state_dict()}, meta))
    twin = subprocess.Popen(
        [
            *(sys.executable, "-u", "-m", "embodyrl.cli"),
            *("twin", saved, "--transport", kind, "--port", "0"),
        ],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert twin.stdout is not None
        said = twin.stdout.readline()
        assert f"mujoco/reach is on {kind}" in said
        file = tmp_path / "twin.yaml"
        file.write_text(json.dumps({"preset": "twin", "safety": asdict(PATIENT)}))
        address = said.split("ws://")[1].split(". ")[0] if "ws://" in said else ""
        options = [
            "--robot",
            kind,
            "--address",
            address,
            "--robot-file",
            str(file),
            "--out",
            str(tmp_path / "out"),
        ]
        assert main(["deploy", saved, *options, "--episodes", "2", "--mode", "sync"]) == 0, (
            capsys.readouterr()
        )
        assert "mujoco/reach on" in capsys.readouterr().out
        result = json.loads((tmp_path / "out" / "result.json").read_text())
        assert result["episodes"] == 2 and all(
            max(r["peak"].values()) <= 1.0 for r in result["results"]
        )
        assert all(r["taken"] >= 5 for r in result["results"]), result
        assert main(["deploy", saved, *options, "env.task=push"]) == 1
        assert "embodyrl twin RUN env.task=push" in capsys.readouterr().err.replace("\n", " ")
        twin.send_signal(signal.SIGINT)
        assert twin.wait(timeout=90) == 130
    finally:
        twin.kill()
        twin.wait()


def preset(folder: Path) -> Path:
    (folder / "preset.yaml").write_text(
        "env: {name: mujoco, task: reach, image_size: 32, num_envs: 1}\n"
        "policy: {name: flow_vla, width: 32, heads: 2}\nalgorithm: {name: ppo}\n"
    )
    return folder / "preset.yaml"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "told"), [("roscore", "roscore"), ("node", "the rospy node ended")]
)
def test_the_parts_of_ros_1_that_die_stop_the_arm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, victim: str, told: str
) -> None:
    if not installed("ros1"):
        pytest.skip("ros1 is not installed here; make test-robot installs it")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with (
        roscore(monkeypatch) as master,
        Twin("ros1") as twin,
        Arm("ros1", twin.address, tmp_path / "a.mcap") as arm,
    ):
        node = arm.bus._wire.pid  # type: ignore[attr-defined]
        kill = {
            "roscore": lambda: os.killpg(master.pid, signal.SIGKILL),
            "node": lambda: os.kill(node, signal.SIGKILL),
        }
        episode, _ = struck(arm, kill[victim])
    ends_at_rest(episode, tmp_path / "a.mcap", Mode.FAULT, told)
