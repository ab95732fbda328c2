"""A LeRobot arm in our commands: recorded by a leader, learned from, deployed and corrected."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from lerobot_arm import JOINTS, SimArm, environment, install_plugin
from record_session import Page, Session, session

from embodyrl.real_robot.logs.mcap_log import read

pytest.importorskip("lerobot")
pytestmark = pytest.mark.timeout(900)  # processes, each of which imports PyTorch and LeRobot
STEPS = 25
LIFTED = {"shoulder_pan": 20.0, "shoulder_lift": -40.0, "elbow_flex": 28.0, "gripper": 80.0}
FAST = ("run.iterations=2", "algorithm.steps_per_iteration=40", "algorithm.batch_size=32")


def lift(arm: SimArm, begin: float = 0.0) -> None:
    """Moves the leader from a share of the way to its end."""
    for share in np.linspace(begin, 1.0, STEPS):
        arm.stand(**{name: float(share * end) for name, end in LIFTED.items()})
        time.sleep(0.1)
    time.sleep(1.0)  # until the arm is there, too


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[SimArm, Path]:
    """Two demonstrations: the arm's file, and the folder of everything."""
    folder = tmp_path_factory.mktemp("arm")
    install_plugin(folder / "site")
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment(folder / "site", folder / "hf").items():
            patch.setenv(key, value)
        arm = SimArm(folder, max_target_age=2.0, max_state_age=2.0, max_gap=2.0)
        words = (
            *("record", "env.control_hz=10", "env.max_episode_steps=60", "--robot", "lerobot"),
            *("--robot-file", arm.file, "--teleop", "lerobot:sim_so_leader", "--speed", 1),
            *("--task", "lift the arm", "--episodes", 2, "--out", folder / "data"),
        )
        with session(*words) as command:
            page = Page(command)
            for number in (1, 2):
                # Where the arm begins the leader must be, too.
                arm.stand(**dict.fromkeys(LIFTED, 0.0))
                page.until(lambda s, n=number: f"record episode {n} of 2" in s["reason"])
                if number == 1:
                    arm.stand(elbow_flex=60.0)
                    time.sleep(0.3)
                    page.do("takeover")
                    page.until(lambda s: "elbow_flex of the leader is at 60" in s["reason"])
                    arm.stand(elbow_flex=0.0)
                    time.sleep(0.3)
                page.do("takeover")
                page.until(lambda s: s["mode"] == "human")
                lift(arm)
                page.do("success")
            command.ends(0)
            page.close()
    return arm, folder


def run(folder: Path, *words: object, stdin: str = "", status: int = 0) -> str:
    """One of our commands in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "embodyrl.cli", *map(str, words)],
        input=stdin,
        capture_output=True,
        text=True,
        env=environment(folder / "site", folder / "hf"),
        timeout=280,
    )
    said = done.stdout + done.stderr
    assert done.returncode == status, said
    assert "Traceback" not in said
    return said


@pytest.fixture(scope="module")
def learned(recorded: tuple[SimArm, Path]) -> Path:
    """A run that has learned a little from them."""
    _, folder = recorded
    words = ("train", "lerobot_arm_sft", f"data.path={folder / 'data'}", f"run.out={folder}")
    said = run(folder, *words, *FAST)
    assert "Done" in said
    return folder / "lerobot_arm_sft"


def test_the_data_are_what_the_leader_showed(recorded: tuple[SimArm, Path]) -> None:
    from embodyrl.data.load_demonstrations import load_demonstrations

    _, folder = recorded
    demos = load_demonstrations(folder / "data", 5)
    assert demos.num_episodes == 2
    assert demos.sentences == ["lift the arm"]
    assert demos.actions.shape[1] == demos.proprio.shape[1] == 6
    # An action is the leader's position as a share of the motor's range.
    last = demos.actions[-1].numpy()
    middle = np.array([(low + high) / 2 for low, high in JOINTS.values()])
    half = np.array([(high - low) / 2 for low, high in JOINTS.values()])
    shown = np.array([LIFTED.get(name, 0.0) for name in JOINTS])
    assert last == pytest.approx((shown - middle) / half, abs=0.02)
    # The arm follows it; both episodes begin at home.
    assert np.abs(demos.proprio[-1].numpy() - last).max() < 0.2
    begins = [0, int(demos.end[0])]
    home = (0.0 - middle) / half
    assert np.abs(demos.proprio[begins].numpy() - home).max() < 0.1


def test_the_log_names_the_motors(recorded: tuple[SimArm, Path]) -> None:
    _, folder = recorded
    messages = read(folder / "data.logs" / "episode_0000.mcap")
    assert len(messages["/state"][0]["q"]) == len(messages["/command"][0]["ddq"]) == 6
    assert messages["/state"][0]["width"] == 0.0
    assert messages["/run"][0]["settings"]["safety"]["joints"] == JOINTS


def test_a_policy_that_learned_from_them_is_deployed(
    recorded: tuple[SimArm, Path], learned: Path
) -> None:
    arm, folder = recorded
    where = ("--robot", "lerobot", "--robot-file", arm.file, "--prompt", "lift the arm")
    usual = (*where, "--speed", 1, "--mode", "sync", "--record")
    said = run(folder, "deploy", learned, *usual, "--out", folder / "deployed", stdin="\n")
    assert "0/1" in said
    messages = read(folder / "deployed" / "episode_0000.mcap")
    assert messages["/episode"][0]["reason"] == "the time is up"
    # It was moved, by the policy's actions.
    q = np.array([m["q"] for m in messages["/state"]])
    assert np.ptp(q, axis=0).max() > 0.2
    assert len(messages["/action"]) > 30
    # In a dry run nothing is sent.
    arm.stand()
    out = folder / "dry"
    run(folder, "deploy", learned, *usual[:-1], "--dry-run", "--out", out, stdin="\n")
    q = np.array([m["q"] for m in read(out / "episode_0000.mcap")["/command"]])
    assert np.ptp(q, axis=0).max() > 0.2
    # A range that is not the one of the data is refused, before anything moves.
    sections = json.loads(arm.file.read_text())
    other = folder / "other.yaml"
    sections["safety"]["joints"]["elbow_flex"] = [-80, 95]
    other.write_text(json.dumps(sections))
    words = ("--robot", "lerobot", "--robot-file", other, "--mode", "sync")
    said = run(folder, "deploy", learned, *words, "--out", out, status=1)
    assert "trained with elbow_flex -95 to 95" in said
    # So are keys and devices that move the hand of a Franka, and a Franka.
    words = (*where, "--hand", "gamepad", "--out", out)
    assert "embodyrl improve" in run(folder, "deploy", learned, *words, status=1)
    said = run(folder, "deploy", learned, "--robot", "ros2", "--out", out, status=1)
    assert "robot/joint_pos are not known" in said


def test_it_learns_from_that_env_s_data_alone(learned: Path, recorded: tuple[SimArm, Path]) -> None:
    _, folder = recorded
    said = run(folder, "train", "lerobot_arm_sft", "data.path=", f"run.out={folder}/x", status=1)
    assert "give data.path=FOLDER" in said
    other = folder / "other_data"
    shutil.copytree(folder / "data", other, dirs_exist_ok=True)
    origin = json.loads((other / "meta" / "embodyrl.json").read_text())
    (other / "meta" / "embodyrl.json").write_text(json.dumps({**origin, "env": "mujoco/pick"}))
    words = ("train", "lerobot_arm_sft", f"data.path={other}", f"run.out={folder}/x")
    assert "was not recorded on an arm of LeRobot's" in run(folder, *words, status=1)
    said = run(folder, *words[:2], f"data.path={folder / 'data'}", "--dry-run")
    assert "6 action dims (joint_pos)" in said


class _Later:
    """What a command says from its n-th page on."""

    def __init__(self, started: Session, number: int) -> None:
        self._started = started
        self._number = number
        self.process = started.process

    @property
    def said(self) -> str:
        return self._started.said

    def says(self, pattern: str, seconds: float = 200.0) -> re.Match[str]:
        end = time.monotonic() + seconds
        while len(found := list(re.finditer(pattern, self.said))) <= self._number:
            assert time.monotonic() < end and self.process.poll() is None, self.said
            time.sleep(0.05)
        return found[self._number]


@pytest.mark.slow
def test_a_person_corrects_it_with_the_leader(
    recorded: tuple[SimArm, Path], learned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm, folder = recorded
    for key, value in environment(folder / "site", folder / "hf").items():
        monkeypatch.setenv(key, value)
    words = (
        *("improve", learned, "--robot", "lerobot", "--robot-file", arm.file),
        *("--helper", "lerobot:sim_so_leader", "--prompt", "lift the arm", "--speed", 1),
        *("--mode", "sync", "--rounds", 1, "--episodes", 1, "--look", 1),
        *("--demos", folder / "data", "--out", folder / "better", *FAST),
    )
    with session(*words) as command:
        # 1. The policy acts; the person has it go back, then takes over and finishes.
        page = Page(command)
        page.until(lambda s: "Then press run" in s["reason"])
        page.do("run")
        page.until(lambda s: s["mode"] == "run")
        time.sleep(2.0)
        page.do("hold")
        page.until(lambda s: s["mode"] == "hold")
        arm.stand(**dict.fromkeys(LIFTED, 0.0))
        arm.stand(shoulder_pan=100.0)
        time.sleep(0.3)
        page.do("takeover")
        page.until(lambda s: "shoulder_pan of the leader is at 100" in s["reason"])
        page.do("rewind")
        page.until(lambda s: s["mode"] == "hold" and "beginning" in str(s["events"]))
        arm.stand(shoulder_pan=0.0)
        time.sleep(0.3)
        page.do("takeover")
        page.until(lambda s: s["mode"] == "human")
        lift(arm)
        page.do("success")
        page.close()
        # 2. Two looks, in which nobody may take over.
        for number in (1, 2):
            page = Page(_Later(command, number))  # type: ignore[arg-type]
            page.until(lambda s: "Then press run" in s["reason"])
            page.do("run")
            page.until(lambda s: s["mode"] == "run")
            assert "takeover" not in page.status["can"]
            page.do("success")
            page.close()
        command.ends(0)
    record = json.loads((folder / "better" / "improve.json").read_text())["rounds"]["round_0"]
    assert record["helped"]["interventions"] == record["helped"]["rewinds"] == 1
    assert record["written"]["recovery_frames"] > 0
    assert record["written"]["human_frames"] > 20
    assert record["look"]["episodes"] == 1
