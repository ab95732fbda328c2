"""``embodyrl serve`` and ``deploy`` with a checkpoint, as a user calls them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from untrained import untrained
from websockets.sync.client import connect

from embodyrl.build import make_policy
from embodyrl.cli.main import main
from embodyrl.real_robot.control.executor import ExecutorConfig
from embodyrl.real_robot.control.messages import RobotState
from embodyrl.real_robot.control.preflight import Check, preflight
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.real_robot.logs.mcap_log import read
from embodyrl.real_robot.policy_link.client import PolicyClient
from embodyrl.real_robot.ros.config import load_robot
from embodyrl.real_robot.twin.mujoco_twin import BOX, MujocoTwin
from embodyrl.storage import checkpoint
from embodyrl.storage.folder_lock import locked

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of an untrained policy that sees states only."""
    folder = tmp_path_factory.mktemp("robot")
    return untrained(
        folder,
        "env: {name: mujoco, task: reach, renderer: none, cameras: [], num_envs: 1}\n"
        "policy: {name: flow_vla, width: 32, heads: 2}\nalgorithm: {name: ppo}\n",
    )


def test_deploy_runs_logs_and_sums_up(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert (
        main(["deploy", str(saved), "--episodes", "2", "--latency", "0.1", "--out", str(out)]) == 0
    )
    said = capsys.readouterr().out
    assert "joint limits (panda)" in said and "FAILS" not in said and "mujoco/reach on twin" in said
    result = json.loads((out / "result.json").read_text())
    assert result["episodes"] == 2 and all(
        max(r["peak"].values()) <= 1.0 for r in result["results"]
    )
    messages = read(out / "episode_0001.mcap")
    assert messages["/run"][0]["settings"]["init"] == 1 and len(messages["/command"]) > 50


def test_deploy_speaks_before_it_imports_pytorch(saved: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "embodyrl.cli", "deploy", str(saved), "--dry-run"]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path)], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "embodyrl: loading PyTorch ...\n"
        process.terminate()


def test_dry_run_and_refusals(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "deploy",
                str(saved),
                "--dry-run",
                "--mode",
                "sync",
                "--latency",
                "0",
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    states = read(tmp_path / "episode_0000.mcap")["/command"]
    assert np.ptp([c["q"] for c in states], axis=0).max() > 1e-3
    for arguments, words in (
        (["--robot", "fr4"], "There is no robot 'fr4'"),
        (["--robot-file", "arm.yaml"], "--robot-file arm.yaml has no effect on the robot twin"),
        (["--address", "10.0.0.2"], "give --robot rosbridge or libfranka, or leave it out"),
        (["--prompt", "lift it"], "--prompt lift it has no effect on the robot twin"),
        (["--mode", "rct"], "Did you mean 'rtc'"),
        (["--speed", "2"], "above 0 and at most 1"),
        (["--episodes", "0"], "at least 1"),
        (["env.task=raech"], "no task 'raech'"),
        (["env.control_mode=ee_delta_pose"], "does not fit"),
    ):
        assert main(["deploy", str(saved), "--out", str(tmp_path), *arguments]) == 1
        assert words in " ".join(capsys.readouterr().err.split()), arguments


def test_a_robots_file_is_read_before_the_policy_is(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No policy is served for minutes to find a typing error then; here there is none at all."""
    typo = tmp_path / "arm.yaml"
    typo.write_text("safty: {}\n")
    for robot, file, words in (
        ("ros2", tmp_path / "am.yaml", "There is no file"),
        ("rosbridge", typo, "Did you mean 'safety'"),
        ("libfranka", typo, "Did you mean 'safety'"),
        ("lerobot", typo, "Did you mean 'safety'"),
    ):
        command = ["deploy", "no/run", "--robot", robot, "--robot-file", str(file)]
        assert main([*command, "--out", str(tmp_path / "out")]) == 1
        assert words in " ".join(capsys.readouterr().err.split()), robot


def test_why_a_policy_cannot_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reason alone, without what the server said of its steps before."""
    missing = str(tmp_path / "run")
    command = ["deploy", missing, "--robot", "rosbridge", "--out", str(tmp_path / "out")]
    assert main(command) == 1
    said = capsys.readouterr().err
    assert "There is no checkpoint in" in said and "loading PyTorch" not in said


def reflex_in(episode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arm stops itself at the first command of that episode."""
    begin, send, begun = MujocoTwin.begin, MujocoTwin.send, []

    def begins(self: MujocoTwin, init: int) -> None:
        begin(self, init)
        begun.append(init)  # the first one is the check's
        self.reflex = ""

    def stops(self: MujocoTwin, *command: Any) -> None:
        send(self, *command)
        self.reflex = "cartesian_reflex" if len(begun) == episode + 2 else ""

    monkeypatch.setattr(MujocoTwin, "begin", begins)
    monkeypatch.setattr(MujocoTwin, "send", stops)


def test_a_fault_is_no_failure_of_the_policy(
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ["--episodes", "3", "--latency", "0.1", "--out", str(tmp_path)]
    reflex_in(0, monkeypatch)
    assert main(["deploy", str(saved), *options]) == 2
    said = capsys.readouterr().out
    assert "no episodes; 1 of 1 was ended by a fault, not counted" in said and "0%" not in said
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["episodes"], result["ended_by_fault"]) == (0, 1)
    assert result["success_rate"] is None and result["stopped_by"] == "fault"
    monkeypatch.undo()
    reflex_in(1, monkeypatch)
    assert main(["deploy", str(saved), *options]) == 2
    said = capsys.readouterr().out
    told = "(0/1) (executing 2 of 5 actions); 1 of 2 was ended by a fault, not counted; logs in"
    assert told in said


def test_no_log_of_an_earlier_run_is_written_over_or_mixed(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["deploy", str(saved), "--latency", "0.1", "--out", str(out)]
    assert main([*command, "--episodes", "2"]) == 0
    first = [(out / f"episode_000{k}.mcap").read_bytes() for k in (0, 1)]
    capsys.readouterr()
    for number in (0, 1):
        assert main([*command, "--episodes", "1"]) == 0
        assert f"are now in {out / f'earlier_{number}'}" in capsys.readouterr().out
    # Of this run alone; all of the run before.
    assert [file.name for file in sorted(out.glob("*.mcap"))] == ["episode_0000.mcap"]
    earlier = out / "earlier_0"
    assert [(earlier / f"episode_000{k}.mcap").read_bytes() for k in (0, 1)] == first
    assert json.loads((earlier / "result.json").read_text())["episodes"] == 2
    # Two at the same time would write into each other's logs.
    with locked(out):
        assert main([*command, "--episodes", "1"]) == 1
    assert "Another process is writing into" in capsys.readouterr().err
    assert not (out / "earlier_2").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_brakes_the_arm_and_is_no_failure_of_the_policy(
    number: signal.Signals,
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solved, asked = MujocoTwin.solved, []

    def interrupts(self: MujocoTwin) -> bool:
        asked.append(1)
        if len(asked) == 20:
            os.kill(os.getpid(), number)
        return solved(self)

    monkeypatch.setattr(MujocoTwin, "solved", interrupts)
    options = ["--episodes", "3", "--latency", "0.1", "--out", str(tmp_path)]
    assert main(["deploy", str(saved), *options]) == 130
    assert "no episodes; 1 of 1 was ended by a person, not counted" in capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["stopped_by"] == "person" and result["results"][0]["mode"] == "estop"
    told = read(Path(result["results"][0]["log"]))["/command"]
    assert np.abs([command["dq"] for command in told]).max() > 0.01
    np.testing.assert_allclose(told[-1]["dq"], 0.0, atol=1e-6)


def test_a_continued_chunk_is_chosen_among_several_too(saved: Path) -> None:
    from embodyrl.real_robot.policy_link.checkpoint_policy import CheckpointPolicy

    served = CheckpointPolicy(str(saved), "cpu")
    config = replace(served.policy.config, chooser_width=8, proposals=4)
    served.policy = make_policy(config, served.spec, 0).eval()
    served.policy.chooser.ready.fill_(True)
    seen = {}

    def choose(features: Any, proposals: Any) -> Any:
        seen["features"], seen["proposals"] = features, proposals
        return proposals[:, 2]

    # As they are: an edit would change what must be continued.
    served.policy.chooser.choose = choose
    served.policy.chooser.best_of = None
    shape = (config.horizon, served.spec.action_dim)
    observation = {
        "images": {n: np.zeros((*s, 3), np.uint8) for n, s in served.spec.cameras.items()},
        "proprio": np.zeros(served.spec.proprio_dim, np.float32),
        "prompt": "go",
        "previous": np.zeros(shape, np.float32),
        "delay": 1,
        "execute": 2,
    }
    chunk = served.infer(observation)["actions"]
    assert len(seen["features"]) == 1 and tuple(seen["proposals"].shape) == (1, 4, *shape)
    assert float((seen["proposals"][0, 0] - seen["proposals"][0, 1]).abs().max()) > 1e-4
    assert np.array_equal(chunk, seen["proposals"][0, 2].numpy())


def test_a_plan_is_sent_whole_and_executed_in_part(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from embodyrl.real_robot.policy_link.checkpoint_policy import CheckpointPolicy

    states, meta = checkpoint.load(saved)
    meta["config"]["policy"]["execute"] = 2
    path = checkpoint.save(tmp_path / "step_000001", states, meta)
    served = CheckpointPolicy(str(path), "cpu")
    assert (served.metadata["horizon"], served.metadata["execute"]) == (5, 2)
    observation = {"proprio": np.zeros(served.spec.proprio_dim, np.float32), "prompt": "go"}
    assert served.infer(observation)["actions"].shape == (5, 4)
    # Carrying it out, and scoring it in the simulator, name both numbers.
    options = ["--episodes", "1", "--latency", "0.1", "--mode", "sync", "--out", str(tmp_path)]
    assert main(["deploy", str(path), *options]) == 0
    assert "(executing 2 of 5 actions)" in capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["execute"], result["horizon"]) == (2, 5)
    taken = [row["taken"] / row["chunks"] for row in result["results"]]
    assert all(1.5 < each <= 2 for each in taken)
    assert main(["eval", str(path), "--episodes", "1", "policy.execute=4", "--json"]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert (scored["execute"], scored["horizon"]) == (4, 5)


def test_the_sampler_of_a_checkpoint_is_set_where_it_is_served(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from embodyrl.real_robot.policy_link.checkpoint_policy import CheckpointPolicy

    def chunks(*overrides: str) -> list[Any]:
        """What two servers with other noise answer to the same observation."""
        found = []
        for seed in (0, 1):
            served = CheckpointPolicy(str(saved), "cpu", seed, overrides=overrides)
            observation = {"proprio": np.zeros(served.spec.proprio_dim, np.float32), "prompt": "go"}
            found.append(served.infer(observation)["actions"])
        return found

    one, other = chunks()
    assert not np.allclose(one, other)
    one, other = chunks("policy.start_noise=0")
    assert np.array_equal(one, other)
    # The twin in this process, a server, and one that runs already.
    options = ["--episodes", "1", "--latency", "0.1", "--mode", "sync", "--out", str(tmp_path)]
    assert main(["deploy", str(saved), *options, "policy.execute=2"]) == 0
    assert "(executing 2 of 5 actions)" in capsys.readouterr().out
    assert main(["serve", str(saved), "env.task=reach"]) == 1
    assert "env.task=reach has no effect" in capsys.readouterr().err
    there = ["deploy", "ws://127.0.0.1:1", "--robot", "ros2", "--out", str(tmp_path)]
    assert main([*there, "policy.start_noise=0"]) == 1
    assert "give policy.start_noise=0 to `embodyrl serve` there" in capsys.readouterr().err


class Moved:
    """An arm that believes its hand to be a centimetre higher, as with a longer tool."""

    def __init__(self, robot: MujocoTwin) -> None:
        self._robot = robot

    def state(self) -> RobotState:
        state = self._robot.state()
        assert state.hand is not None
        return replace(state, hand=state.hand + np.array([0.0, 0.0, 0.01]))


def test_preflight_is_red_where_it_should_be(saved: Path) -> None:
    from embodyrl.real_robot.policy_link.checkpoint_policy import CheckpointPolicy

    policy = CheckpointPolicy(str(saved), "cpu")
    twin = MujocoTwin(policy.config.env)  # type: ignore[arg-type]
    twin.begin(0)
    safety = SafetyConfig(BOX["box_low"], BOX["box_high"], robot="panda", max_force=None)
    assert safety == load_robot("")[1]
    execution = ExecutorConfig(5, 4, 12.5, "rtc", 2)

    def checked(**changes: object) -> list[Check]:
        given = {
            "robot": twin,
            "infer": policy.infer,
            "metadata": policy.metadata,
            "safety": safety,
        }
        given |= {"charged": lambda took: 0.1} | changes  # this machine may be busy
        return preflight(**given, execution=execution, trials=1)  # type: ignore[arg-type]

    def red(**changes: object) -> str:
        return " ".join(f"{c.name}: {c.found}" for c in checked(**changes) if not c.ok)

    assert red() == ""
    assert "more than 5" in red(robot=Moved(twin))
    assert "Outside" in red(safety=replace(safety, box_low=(0.6, 0.2, 0.1)))
    assert "not known to a robot" in red(metadata=policy.metadata | {"control_mode": "joints"})
    assert "cameras must be" in red(metadata=policy.metadata | {"cameras": {"front": [8, 8]}})
    of_states = policy.metadata | {"proprio_dim": 99}
    assert "numbers of proprio, and the policy was trained on 99" in red(metadata=of_states)
    assert "not the finite chunk" in red(infer=lambda o: {"actions": np.full((5, 4), np.nan)})

    def slow(observation: dict) -> dict:
        threading.Event().wait(0.4)
        return policy.infer(observation)

    def slow_in_flight(observation: dict) -> dict:
        return slow(observation) if "previous" in observation else policy.infer(observation)

    assert "slower than the 240 ms" in red(infer=slow, charged=float)
    assert "slower than the 240 ms" in red(infer=slow_in_flight, charged=float)
    assert "slower than the 240 ms" in red(charged=lambda took: 0.3) and red(infer=slow) == ""
    # .1 s is two actions at 12.5 a second.
    trained = {"metadata": policy.metadata | {"max_prefix": 1}}
    assert "2 actions are taken, and the policy was trained to continue after at most 1" in red(
        **trained
    )
    trained = {"metadata": policy.metadata | {"max_prefix": 2, "execute": 1}}
    assert red(**trained) == ""
    told = "2 actions of a chunk are executed, in training 1; a delay of 2 actions, in training up to 2"
    assert told in checked(**trained)[-1].found
    twin.reflex = "cartesian_reflex"
    assert "reflex" in red()
    twin.close()


def test_serve_answers_and_ends_on_ctrl_c(saved: Path) -> None:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "embodyrl.cli"),
            *("serve", str(saved), "--port", "0", "--device", "cpu", "policy.start_noise=0"),
        ],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        client = PolicyClient(line.split(" at ")[1].split()[0])
        metadata = client.connect()
        answer = client.infer(
            {"proprio": np.zeros(metadata["proprio_dim"], np.float32), "prompt": "go"}
        )
        assert (
            answer["actions"].shape == (metadata["horizon"], 4)
            and answer["server_timing"]["infer_ms"] > 0
        )
        client.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait()
    assert main(["serve", str(saved), "--host", "0.0.0.0"]) == 1
    assert main(["serve", str(saved), "--token-file", "/nonexistent"]) == 1


def test_deploy_is_an_arm_on_the_page_of_several(saved: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*(sys.executable, "-u", "-m", "embodyrl.cli"), *("operator", "--port", "0")],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip

    def person() -> None:
        """Labels the episode as soon as the arm is there."""
        own: Any = address
        with connect(f"{address.replace('http', 'ws')}/socket", origin=own, max_size=None) as link:
            link.send(token)
            while True:
                data = link.recv(timeout=120.0)
                rows = json.loads(data)["status"]["arms"] if isinstance(data, str) else []
                if rows and rows[0]["linked"] and rows[0]["mode"] == "run":
                    seen.append(rows[0]["name"])
                    break
            # On a busy machine a label may come late, and is then dropped.
            while not done.wait(0.5):
                link.send(json.dumps({"do": "success", "arm": "left"}))

    seen: list[str] = []
    done = threading.Event()
    try:
        assert process.stdout is not None
        address, token = process.stdout.readline().split(": ", 1)[1].strip().split("/#")
        arms = process.stdout.readline().split(" at ")[1].split("/NAME")[0]
        thread = threading.Thread(target=person)
        thread.start()
        given = ("deploy", str(saved), "--operator", f"{arms}/left", "--out", str(tmp_path))
        assert main([*given]) == 0
        done.set()
        thread.join(timeout=30.0)
        result = json.loads((tmp_path / "result.json").read_text())
        assert seen == ["left"] and result["results"][0]["reason"] == "a person said success"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        done.set()
        process.kill()
        process.wait()
    assert main(["deploy", str(saved), "--operator", f"{arms}/left", "--out", str(tmp_path)]) == 1
    assert main(["operator", "--host", "0.0.0.0"]) == 1
