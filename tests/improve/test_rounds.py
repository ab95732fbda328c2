"""``embodyrl improve`` on the simulated arm, as a user calls it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from untrained import untrained

from embodyrl.cli.main import main
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.real_robot.logs.mcap_log import outcome, read
from embodyrl.real_robot.twin.mujoco_twin import MujocoTwin
from embodyrl.storage import checkpoint

ROOT = Path(__file__).parents[2]
QUICK = ("--helper", "scripted", "--latency", "0.01", "--speed", "1")
SCRIPTED = ("helper.patience=0.5", "helper.reaction=0.1", "helper.rewind=0.3")
LEARNER = ("run.iterations=1", "run.threads=1", "algorithm.steps_per_iteration=4")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of an untrained policy that sees states only."""
    folder = tmp_path_factory.mktemp("policy")
    return untrained(
        folder,
        "env: {name: mujoco, task: reach, renderer: none, cameras: [], num_envs: 1, "
        "max_episode_steps: 25}\n"
        "policy: {name: flow_mlp, width: 32, horizon: 5}\nalgorithm: {name: ppo}\n",
    )


def command(saved: Path, out: Path, *more: str, rounds: int = 1) -> list[str]:
    """The words of a small loop."""
    words = ["improve", str(saved), *QUICK, "--rounds", str(rounds), "--episodes", "3"]
    return [*words, "--look", "2", "--out", str(out), *SCRIPTED, *LEARNER, *more]


def content(out: Path) -> dict[str, Any]:
    return json.loads((out / "improve.json").read_text())


@pytest.fixture(scope="module")
def once(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a round that is over."""
    out = tmp_path_factory.mktemp("rounds") / "out"
    assert main(command(saved, out)) == 0
    return out


def test_a_round_helps_learns_and_looks(once: Path, saved: Path) -> None:
    found = content(once)["rounds"]["round_0"]
    rows = [outcome(p) for p in sorted((once / "round_0" / "help.logs").glob("*.mcap"))]
    assert [row["init"] for row in rows] == [0, 1, 2]
    helped = [row for row in rows if row["help"]["times"]]
    # An untrained policy needs help, and the expert solves the task.
    assert helped and all(row["solved"] and row["ended_by"] == "person" for row in helped)
    assert found["helped"]["interventions"] == sum(row["help"]["times"] for row in rows)
    assert found["helped"]["rewinds"] == len(helped) == sum(r["help"]["rewinds"] for r in rows)
    seconds = sum(row["help"]["seconds"] for row in rows)
    assert found["helped"]["person_seconds"] == pytest.approx(seconds, abs=0.02)
    assert seconds < found["helped"]["robot_seconds"]
    # Both policies looked at the same states, and nobody helped.
    looks = [
        [outcome(p) for p in sorted((once / "round_0" / f"look_{when}.logs").glob("*.mcap"))]
        for when in ("before", "after")
    ]
    inits = [[row["init"] for row in rows] for rows in looks]
    assert inits[0] == inits[1] and len(inits[0]) == 2 and not set(inits[0]) & {0, 1, 2}
    assert not any(row["help"]["times"] for rows in looks for row in rows)
    # The later policy is served unless it solved fewer.
    better = found["look"]["after"] >= found["look"]["before"]
    assert found["look"]["keeps"] == better
    learned = str(once / "round_0" / "learn")
    assert content(once)["best"] == (learned if better else str(saved))
    # The learning rate's file shows that the run went from the served policy, without an env.
    meta = json.loads((Path(learned) / "meta.json").read_text())
    assert meta["finished"] and not list((Path(learned) / "evals").glob("*"))
    assert set(found["seconds"]) == {"help", "data", "learn", "look"}


def test_every_turn_is_an_episode_of_its_own(once: Path) -> None:
    found = content(once)["rounds"]["round_0"]
    log = read(once / "round_0" / "help.logs" / "episode_0000.mcap")["/action"]
    human = [m["human"] for m in log]
    back = [m["recovery"] for m in log]
    # First the policy, then the way back, then the correction.
    begin, turn = human.index(True), back.index(True)
    correction = len(back) - back[::-1].index(True)
    assert begin == turn > 0 and all(human[begin:]) and all(back[turn:correction])
    assert correction < len(log)
    demos = load_demonstrations(found["data"], 5, keep="all")
    first, second = int(demos.end[0]), int(demos.end[int(demos.end[0])])
    assert first == begin and second == len(log)
    assert not demos.success[:first].any() and bool(demos.success[first:second].all())
    assert demos.intervention[:second].tolist() == human
    # What failed is not imitated; the way back is.
    imitated = load_demonstrations(found["data"], 5)
    assert bool(imitated.intervention.all())
    assert found["written"]["human_frames"] == len(imitated)
    assert 0 < found["written"]["recovery_frames"] < len(imitated)


def test_the_way_back_is_made_of_actions(once: Path) -> None:
    log = read(once / "round_0" / "help.logs" / "episode_0000.mcap")["/action"]
    back = [k for k, m in enumerate(log) if m["recovery"]]
    hand = np.array([m["proprio"][3:6] for m in log])  # where it was told to be
    # The actions of the way back lead from where it began to where it ended.
    moved = 0.035 * np.sum([log[k]["action"][:3] for k in back], axis=0)
    really = hand[back[-1] + 1] - hand[back[0]]
    assert np.linalg.norm(really) > 0.005
    assert np.linalg.norm(moved - really) < 0.5 * np.linalg.norm(really)


def test_the_same_command_repeats_nothing_and_goes_on(
    once: Path, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.stat().st_mtime_ns for p in once.rglob("*.mcap")}
    assert main(command(saved, once)) == 0
    assert "episode 0" not in capsys.readouterr().out
    assert main(command(saved, once, "--episodes", "1", "--look", "1", rounds=2)) == 0
    assert {p: p.stat().st_mtime_ns for p in before} == before
    found = content(once)
    best = "round_1" if found["rounds"]["round_1"]["look"]["keeps"] else "round_0"
    assert found["rounds"]["round_1"]["policy"].endswith(("round_0/learn", "step_000001"))
    assert best == "round_0" or found["best"].endswith("round_1/learn")
    # It learned from both rounds.
    learned = once / "round_1" / "learn" / "config.yaml"
    assert "round_0/data" in learned.read_text() and "round_1/data" in learned.read_text()
    said = capsys.readouterr().out
    assert "person s" in said and "cycle min" in said
    # Other settings are another loop.
    assert main(command(saved, once, "--method", "rl", rounds=2)) == 1
    assert "method was 'imitate'" in capsys.readouterr().err.replace("imitate,", "'imitate',")


@pytest.mark.parametrize("method", ["rl", "edit"])
def test_off_policy_learning_reads_failed_turns_and_no_hidden_state(
    method: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(saved, tmp_path, "--method", method)
    words += ["algorithm.critic_warmup=5", "algorithm.batch_size=8", "algorithm.actor_batch_size=4"]
    words += ["algorithm.steps_per_iteration=10"]  # two of the actor
    words += ["algorithm.gate=warn"]  # so few turns cannot say whether critics help
    assert main([*words, "policy.chooser_width=16", "policy.proposals=2"]) == 0
    run = tmp_path / "round_0" / "learn"
    states, _ = checkpoint.load(checkpoint.find(run))
    old, _ = checkpoint.load(saved)
    weights = {k: v for k, v in states["policy"].items() if k in old["policy"]}
    same = [bool((v == old["policy"][k]).all()) for k, v in weights.items()]
    # With edit the policy's own weights stay as they were.
    assert all(same) if method == "edit" else not all(same)
    assert bool(states["policy"]["chooser.ready"])
    assert any("editor" in k for k in states["policy"]) == (method == "edit")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["gradient_steps"] >= 5 and np.isfinite(rows[-1]["critic_loss"])
    # The round says what the gate says.
    gate = content(tmp_path)["rounds"]["round_0"]["gate"]
    assert gate["says"] == "cannot tell" and "takes 10 of each" in gate["why"]
    assert json.loads((run / "meta.json").read_text())["verdict"] == gate["why"]
    said = capsys.readouterr().out
    assert gate["why"] in said and any("cannot tell" in x for x in said.splitlines()[-3:])


def test_with_too_few_turns_for_the_gate_the_served_policy_stays(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(saved, tmp_path, "--method", "rl")) == 0
    found = content(tmp_path)
    assert found["best"] == found["rounds"]["round_0"]["learned"] == str(saved)
    assert found["rounds"]["round_0"]["gate"] == {}
    said = capsys.readouterr().out
    assert "takes 10 of each (algorithm.gate=warn goes on without), so" in said


def test_a_fault_ends_it_with_2_and_is_no_failure(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, send, begun = MujocoTwin.begin, MujocoTwin.send, []

    def begins(self: MujocoTwin, init: int) -> None:
        begin(self, init)
        begun.append(init)
        self.reflex = ""

    def stops(self: MujocoTwin, *told: Any) -> None:
        send(self, *told)
        self.reflex = "cartesian_reflex" if len(begun) == 3 else ""  # the check, then two episodes

    monkeypatch.setattr(MujocoTwin, "begin", begins)
    monkeypatch.setattr(MujocoTwin, "send", stops)
    assert main(command(saved, tmp_path)) == 2
    said = capsys.readouterr().err
    assert "reflex" in said and "the same command goes on" in said
    monkeypatch.undo()
    assert main(command(saved, tmp_path)) == 0
    logs = sorted((tmp_path / "round_0" / "help.logs").glob("*.mcap"))
    # The log of the fault is kept, and its state was played again.
    assert [outcome(p)["init"] for p in logs] == [0, 1, 1, 2]
    assert content(tmp_path)["rounds"]["round_0"]["helped"]["episodes"] == 3


def test_ctrl_c_ends_it_with_130_and_at_most_an_episode_is_lost(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    solved, asked = MujocoTwin.solved, []

    def interrupts(self: MujocoTwin) -> bool:
        asked.append(1)
        if len(list((tmp_path / "round_0" / "help.logs").glob("*.mcap"))) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return solved(self)

    monkeypatch.setattr(MujocoTwin, "solved", interrupts)
    assert main(command(saved, tmp_path)) == 130
    assert "the arm is at rest" in capsys.readouterr().err
    assert len(list((tmp_path / "round_0" / "help.logs").glob("*.mcap"))) == 1


def test_sigterm_between_two_episodes_ends_it_as_ctrl_c_does(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, begun = MujocoTwin.begin, []

    def ends(*_: object) -> None:
        raise AssertionError("SIGTERM would have killed the program, with the robot connected")

    def begins(self: MujocoTwin, init: int) -> None:
        begun.append(init)  # the first one is the check's
        if len(begun) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        begin(self, init)

    before = signal.signal(signal.SIGTERM, ends)
    monkeypatch.setattr(MujocoTwin, "begin", begins)
    try:
        assert main(command(saved, tmp_path)) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(list((tmp_path / "round_0" / "help.logs").glob("*.mcap"))) == 1


@pytest.mark.slow
def test_killed_at_any_time_it_goes_on(saved: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "embodyrl.cli", *command(saved, tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for goal in ("round_0/help.logs/episode_0001.mcap", "round_0/learn/config.yaml",
                 "round_0/look_after.logs/episode_0000.mcap"):  # fmt: skip
        with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL) as process:
            end = time.monotonic() + 200
            while not (tmp_path / goal).exists() and time.monotonic() < end:
                time.sleep(0.02)
            process.kill()
        assert (tmp_path / goal).exists(), goal
    assert main(command(saved, tmp_path)) == 0
    found = content(tmp_path)["rounds"]["round_0"]
    assert (found["helped"]["episodes"], found["look"]["episodes"]) == (3, 2)


def test_a_detector_is_fitted_anew_to_what_is_served(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # An untrained policy solves nothing, so what it usually does counts as a success here.
    monkeypatch.setattr(MujocoTwin, "solved", lambda self: self._now >= 0.5)
    more = ("--detector", "clock", "--false-alarms", "0.5", "helper.patience=1")
    words = command(saved, tmp_path, *more, "--look", "4", rounds=2)
    words[words.index("--episodes") + 1] = "1"
    assert main(words) == 0
    assert "no detector: the person watches" in capsys.readouterr().out
    found = content(tmp_path)["rounds"]
    assert (found["round_0"]["detector"], found["round_1"]["detector"]) == (False, True)
    about = json.loads((tmp_path / "round_1" / "detector" / "detector.json").read_text())
    assert about["policy"] == found["round_1"]["policy"] and about["fitted"] == 2


def test_what_cannot_be_is_told_before_anything_moves(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for more, said in (
        (("--robot", "fr4"), "no robot 'fr4'"),
        (("--robot-file", "arm.yaml"), "--robot-file arm.yaml has no effect on the robot twin"),
        (("--prompt", "lift it"), "--prompt lift it has no effect on the robot twin"),
        (("--helper", "mouse"), "no --helper 'mouse'"),
        (("--robot", "ros2"), "scripted reads the simulator's state"),
        (("--helper", "page"), "--helper is page"),
        (("--method", "imitation"), "imitate"),
        (("--rounds", "0"), "rounds"),
        (("--look", "0"), "look"),
        (("--false-alarms", "1"), "false_alarms"),
        (("--false-alarms", "0.2"), "there is none"),
        (("--detector", "flaot"), "Did you mean 'float'"),
        (("--demos", str(tmp_path / "none")), "no data set"),
        (("--mode", "rct"), "rtc"),
        (("helper.skil=1",), "Did you mean 'skill'"),
        (("helper.skill=0",), "skill"),
        (("algoritm.lr=1",), "SECTION.key=value"),
        (("algorithm.name=ppo",), "plays while it learns"),
        (("algorithm.name=pa_rl_offline",), "learns by sft"),
        (("algorithm.lrr=1",), "no key 'lrr'"),
        (("env.task=raech",), "no task 'raech'"),
        (("env.reflector=runs/reflector",), "the twin's own success counts"),
    ):
        assert main(command(saved, out, *more)) == 1, more
        assert said in " ".join(capsys.readouterr().err.split()), more
        assert not list(out.rglob("*.mcap")), more
    assert main(["improve", str(tmp_path / "nothing"), *QUICK, "--out", str(out)]) == 1
    assert main(["improve", "ws://127.0.0.1:1", *QUICK, "--out", str(out)]) == 1
    assert "its weights are needed" in capsys.readouterr().err


def test_what_was_refused_before_anything_moved_may_be_given_otherwise(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    # The pre-flight check finds that chunks come too late, whatever learns from them.
    for mode in ("naive", "sync"):
        assert main(command(saved, out, "--latency", "9", "--mode", mode)) == (mode == "naive")
        assert "other settings" not in capsys.readouterr().err
    assert content(out)["rounds"]["round_0"]["helped"]["episodes"] == 3
    # What was played has its settings.
    assert main(command(saved, out, "--mode", "naive", rounds=2)) == 1
    assert "other settings (mode was sync, now naive)" in capsys.readouterr().err
    # Rounds have a folder of their own.
    preset = tmp_path / "run"
    preset.mkdir()
    (preset / "config.yaml").write_text("run: {}")
    capsys.readouterr()
    assert main(command(saved, preset)) == 1
    assert "is the folder of a training run" in capsys.readouterr().err
