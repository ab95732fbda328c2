"""A recorded run, with a person's corrections, as a data set that is learned from."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from untrained import untrained
from websockets import Origin
from websockets.sync.client import connect

from embodyrl.cli.main import main
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.errors import UserError
from embodyrl.real_robot.env.robot_env import RobotConfig, RobotEnv
from embodyrl.real_robot.logs.export import export_logs
from embodyrl.real_robot.logs.mcap_log import logged_picture, read
from embodyrl.storage.loggers import read_metrics

SETTINGS = {"task": "reach", "image_size": 32, "renderer": "opengl", "max_episode_steps": 25}


def played(folder: Path, episodes: int, **settings: object) -> None:
    """Episodes in which the policy does nothing; a scripted person takes over after 3 actions."""
    env = RobotEnv(
        RobotConfig(**SETTINGS | {"log": str(folder), "record": True, "corrector": 3} | settings)
    )  # type: ignore[arg-type]
    for init in range(episodes):
        env.reset(init=[init])
        while not bool(env.step(torch.zeros(1, 5, 4)).done):
            pass
    env.close()


def test_corrections_become_demonstrations(tmp_path: Path) -> None:
    played(tmp_path / "logs", 2)
    played(tmp_path / "logs2", 1, corrector=0)  # nobody helps: a failure
    log = read(tmp_path / "logs" / "episode_000000.mcap")
    people = [m["human"] for m in log["/action"]]
    assert people == [False] * 3 + [True] * (len(people) - 3) and len(log["/camera/front"]) == len(
        people
    )
    assert log["/episode"][0]["solved"] and logged_picture(log["/camera/front"][0]).shape == (
        32,
        32,
        3,
    )

    written = export_logs(tmp_path / "logs", tmp_path / "data")
    assert written["episodes"] == 2 and written["left_out"] == 0
    assert written["frames"] - written["human_frames"] == 6
    env = RobotEnv(RobotConfig(**SETTINGS))  # type: ignore[arg-type]
    demos = load_demonstrations(tmp_path / "data", 5, spec=env.spec)
    env.close()
    n = len(people)
    assert len(demos) == written["frames"] and demos.intervention[:n].tolist() == people
    np.testing.assert_allclose(demos.actions[:n], [m["action"] for m in log["/action"]], atol=1e-6)
    np.testing.assert_allclose(demos.proprio[:n], [m["proprio"] for m in log["/action"]], atol=1e-6)
    images = np.stack([logged_picture(m) for m in log["/camera/front"]]).astype(float)
    assert (
        np.abs(np.asarray(demos.images["front"][:n]) - images).mean() < 2.0
    )  # the video's own loss
    assert demos.reward[:n].tolist() == [0.0] * (n - 1) + [1.0] and bool(demos.success.all())

    with pytest.raises(UserError, match=r"None of the 1 episodes .* was solved"):
        export_logs(tmp_path / "logs2", tmp_path / "none")
    assert (
        export_logs(tmp_path / "logs2", tmp_path / "all", keep_failures=True)["human_frames"] == 0
    )


PRESET = """
env:
  {name: mujoco, task: reach, image_size: 32, renderer: opengl, num_envs: 1, max_episode_steps: 500}
policy: {name: flow_vla, width: 32, heads: 2, critic_width: 16}
algorithm: {name: sft, batch_size: 8, steps_per_iteration: 5}
run:
  {iterations: 2, eval_every: 0, eval_before: false, eval_episodes: 1, checkpoint_every: 2,
   videos: 0, device: cpu}
"""


@contextmanager
def deployed(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "embodyrl.cli", "deploy", *command],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def correct(page: str) -> None:
    """A person who takes over after five actions, moves the hand for five, and says success."""
    at, token = re.findall(r"http://(\S+)/#(\S+)", page)[0]
    with connect(f"ws://{at}/socket", origin=Origin(f"http://{at}")) as socket:
        socket.send(token)
        for message in socket:
            if isinstance(message, bytes):
                continue  # a picture
            status = json.loads(message).get("status")
            if status is None:
                continue  # nothing new is shown
            policys, persons = map(
                int, status["numbers"].get("actions, the person's", "0, 0").split(", ")
            )
            if persons >= 5:
                socket.send(json.dumps({"do": "success"}))
            elif policys >= 5:
                socket.send(json.dumps({"keys": ["w"], "open": True}))
                if status["mode"] != "human":
                    socket.send(json.dumps({"do": "takeover"}))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_was_corrected_on_the_arm_is_learned_by_the_commands(tmp_path: Path) -> None:
    """Deployed with a person at the page, recorded, made a data set, trained, deployed again."""
    preset, logs, data = tmp_path / "preset.yaml", tmp_path / "logs", tmp_path / "data"
    saved = str(untrained(tmp_path, PRESET))

    with deployed(
        saved, "--operator", "0", "--record", "--latency", "0.05", "--out", str(logs)
    ) as process:
        assert process.stdout is not None
        correct(next(line for line in process.stdout if "http://" in line))
        assert process.wait(timeout=300) == 0
    taken = read(logs / "episode_0000.mcap")["/action"]
    assert sum(m["human"] for m in taken) >= 5 and sum(not m["human"] for m in taken) >= 5
    assert main(["data", "from-logs", str(logs), "--out", str(data)]) == 0
    assert main(["data", "verify", str(data)]) == 0
    demos = load_demonstrations(data, 5)
    assert demos.intervention.tolist() == [m["human"] for m in taken] and bool(demos.success.all())
    told = [
        f"data.path={data}",
        "data.intervention_weight=2",
        f"run.out={tmp_path}",
        "run.name=again",
    ]
    assert main(["train", str(preset), *told]) == 0
    rows = read_metrics(tmp_path / "again" / "metrics.jsonl")
    assert len(rows) == 2 and all(np.isfinite(row["loss"]) for row in rows)
    assert (
        main(
            [
                "deploy",
                str(tmp_path / "again"),
                "--dry-run",
                "--latency",
                "0",
                "--out",
                str(tmp_path / "dry"),
            ]
        )
        == 0
    )


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no logs"):
        export_logs(tmp_path, tmp_path / "data")
    played(tmp_path / "logs", 1, record=False, renderer="none", cameras=())
    with pytest.raises(UserError, match="--record"):
        export_logs(tmp_path / "logs", tmp_path / "data")
    with pytest.raises(UserError, match="--out"):
        export_logs(tmp_path / "logs", "")
    assert not (tmp_path / "data").exists()


def test_an_env_that_is_opened_again_writes_behind_its_logs(tmp_path: Path) -> None:
    """An actor that dies is started again: what it recorded is there."""
    small = {"max_episode_steps": 1, "corrector": 0, "cameras": (), "renderer": "none"}
    played(tmp_path, 2, **small)
    before = {file.name: file.read_bytes() for file in tmp_path.glob("*.mcap")}
    played(tmp_path, 1, **small)
    after = {file.name: file.read_bytes() for file in tmp_path.glob("*.mcap")}
    assert sorted(after) == [f"episode_00000{k}.mcap" for k in range(3)]
    assert before.items() <= after.items()


def test_what_a_fault_or_the_stop_cut_short_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reflex, Ctrl-C, an episode that the program left: nobody knows how they would have gone."""
    logs, data = tmp_path / "logs", tmp_path / "data"
    env = RobotEnv(
        RobotConfig(**SETTINGS | {"log": str(logs), "record": True, "max_episode_steps": 5})  # type: ignore[arg-type]
    )
    still = torch.zeros(1, 5, 4)
    env.reset(init=[0])
    env.step(still)  # its time is up: a failure
    env.reset(init=[1])
    env.step(still[:, :2])
    env.reset(init=[2])  # the one before was left in the middle
    with monkeypatch.context() as patch:
        patch.setattr(env._connected.robot, "reflex", "cartesian_reflex")
        env.step(still)
    env.reset(init=[3])
    env.step(still[:, :2])
    assert env._driver is not None
    env._driver.guard.estop("a person pressed stop")
    env.step(still[:, :2])
    env.close()
    endings = [read(file)["/episode"][-1] for file in sorted(logs.glob("*.mcap"))]
    assert [e["ended_by"] for e in endings] == ["policy", "person", "fault", "person"], endings
    assert endings[1]["reason"] == "broken off" and endings[3]["mode"] == "estop"

    command = ["data", "from-logs", str(logs), "--keep-failures", "--out", str(data)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "Wrote 1 episodes" in said and "3 were cut short by a fault or the stop" in said
    # Where nothing else is left, the message says so.
    (logs / "episode_000000.mcap").unlink()
    assert main([*command[:-1], str(tmp_path / "none")]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "3 were cut short" in said and "--keep-failures" not in said


def test_episodes_of_one_action_and_odd_pictures_are_exported(tmp_path: Path) -> None:
    played(tmp_path / "logs", 3, max_episode_steps=1, corrector=0, image_size=33)
    written = export_logs(tmp_path / "logs", tmp_path / "data", keep_failures=True)
    assert (written["episodes"], written["frames"]) == (3, 3)
    demos = load_demonstrations(tmp_path / "data", 2, keep="all")
    assert len(demos) == 3 and demos.images["front"].shape[1:] == (33, 33, 3)
