"""``embodyrl record`` on the simulated arm: real processes, a real terminal, the page's own words."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from record_session import Page, session

from embodyrl.cli.main import main
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.data.verify import verify_dataset
from embodyrl.real_robot.logs.mcap_log import logged_picture, read
from embodyrl.real_robot.record.episode_logs import RUNNING, logs_folder

pytestmark = pytest.mark.timeout(1200)

ENV = ("mujoco", "env.task=reach", "env.image_size=32", "env.renderer=opengl", "env.num_envs=1")
SCRIPTED = ("record", *ENV, "--teleop", "scripted")
PRESET = """
env: {name: mujoco, task: reach, image_size: 32, renderer: opengl, num_envs: 1}
policy: {name: flow_vla, width: 16, layers: 1, heads: 1, text_layers: 0, critic_width: 8}
algorithm: {name: sft, batch_size: 8, steps_per_iteration: 2}
run: {iterations: 1, eval_every: 0, eval_before: false, eval_episodes: 1, videos: 0, device: cpu}
"""


def frames_of(data: Path, out: Path) -> list[int]:
    info = json.loads((data / "meta" / "info.json").read_text())
    assert info["total_episodes"] == len(list(logs_folder(out).glob("*.mcap")))
    return [len(read(file)["/action"]) for file in sorted(logs_folder(out).glob("*.mcap"))]


def test_what_a_scripted_person_demonstrates_is_what_collect_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    assert main([*SCRIPTED, "--episodes", "2", "--out", str(data)]) == 0
    said = capsys.readouterr().out
    assert (
        "2 of 2 episodes to record" in said and "GB left, for about" in said and "FAILS" not in said
    )
    assert main(["collect", *ENV, "--episodes", "1", "--out", str(other)]) == 0
    mine, theirs = (json.loads((d / "meta/embodyrl.json").read_text()) for d in (data, other))
    # The simulator's state is the only difference: a robot has none.
    assert mine["spec"].pop("privileged_dim", 0) == 0 and theirs["spec"].pop("privileged_dim") > 0
    for facts in (mine, theirs):
        facts["spec"].pop("num_envs"), facts["config"].pop("num_envs")
    for key in ("env", "split", "control_mode", "control_hz", "tasks"):
        assert mine[key] == theirs[key], key
    assert mine["spec"]["conventions"] == theirs["spec"]["conventions"]
    assert mine["config"].items() <= theirs["config"].items()
    features = [json.loads((d / "meta/info.json").read_text())["features"] for d in (data, other)]
    assert set(features[1]) - set(features[0]) == {"privileged"} and set(features[0]) <= set(
        features[1]
    )
    # The frames are those of the logs.
    counts = frames_of(data, data)
    demos = load_demonstrations(data, 5)
    logs = [read(file) for file in sorted(logs_folder(data).glob("*.mcap"))]
    actions = np.concatenate([[m["action"] for m in log["/action"]] for log in logs])
    np.testing.assert_allclose(demos.actions, actions, atol=1e-6)
    pictures = np.concatenate([[logged_picture(m) for m in log["/camera/front"]] for log in logs])
    assert np.abs(np.asarray(demos.images["front"]) - pictures.astype(float)).mean() < 2.0
    assert bool(demos.success.all()) and sum(counts) == len(demos)
    assert all(m["human"] for log in logs for m in log["/action"])
    assert json.loads((data / "meta/doubtful.json").read_text()) == []
    # It is sound, it means what the env means, and it is learned from at once.
    assert main(["data", "verify", str(data)]) == 0
    assert "It means what" in capsys.readouterr().out
    (tmp_path / "preset.yaml").write_text(PRESET)
    run_ = [f"data.path={data}", f"run.out={tmp_path / 'runs'}"]
    assert main(["train", str(tmp_path / "preset.yaml"), *run_, "--dry-run"]) == 0
    assert main(["train", str(tmp_path / "preset.yaml"), *run_]) == 0
    # Recorded actions, replayed in the env, solve its task again.
    again = ["collect", *ENV, "--replay", str(data), "--perturb", "0", "--episodes", "2"]
    assert main([*again, "--out", str(tmp_path / "again")]) == 0
    # A data set is not overwritten, and whoever wants more of it is told how.
    assert main([*SCRIPTED, "--episodes", "3", "--out", str(data)]) == 1
    assert "move" in (said := capsys.readouterr().err) and "with more --episodes" in said


def test_a_session_that_is_killed_goes_on_and_loses_the_running_episode_alone(
    tmp_path: Path,
) -> None:
    out = tmp_path / "data"
    words = (*SCRIPTED, "--episodes", "4", "--out", out)
    with session(*words) as first:
        first.says(r"episode 1: solved")
        while not (logs_folder(out) / RUNNING).exists():
            time.sleep(0.005)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
    kept = {file.name: file.read_bytes() for file in logs_folder(out).glob("*.mcap")}
    assert len(kept) >= 2 and not out.exists()
    # A second session goes on from there; it is killed while it makes the data set.
    with session(*words) as second:
        second.says(rf"{4 - len(kept)} of 4 episodes to record")
        second.says(r"Writing")
        while not out.with_name("data.partial").exists():
            assert not out.exists()
            time.sleep(0.005)
        second.process.send_signal(signal.SIGKILL)
        second.process.wait()
    assert not out.exists()
    with session(*words) as third:
        said = third.ends(0)
    assert "to record" not in said and "Wrote 4 episodes" in said
    for name, content in kept.items():
        assert (logs_folder(out) / name).read_bytes() == content
    assert verify_dataset(out).faults == [] and len(frames_of(out, out)) == 4
    assert not (logs_folder(out) / RUNNING).exists()
    inits = [read(f)["/run"][0]["settings"]["init"] for f in logs_folder(out).glob("*.mcap")]
    assert len(set(inits)) == 4


def test_a_person_at_the_page_labels_discards_and_stops(tmp_path: Path) -> None:
    out = tmp_path / "data"
    words = ("record", *ENV, "env.split=eval", "--keep-failures", "--episodes", "2", "--out", out)
    with session(*words) as started:
        page = Page(started)
        page.until(lambda s: "Press Start (t) to record episode 1 of 2" in s["reason"])
        page.until(lambda s: page.pictures > 1)
        assert page.status["can"] == ["takeover"]
        assert "left, for about" in page.status["numbers"]["disk"]
        # Discarded: the same episode begins again.
        page.moves(3)
        assert page.status["numbers"]["episode"] == "1 of 2"
        page.do("discard")
        started.says(r"episode 0: discarded; it begins again")
        # Stopped, cleared, gone on, and labelled as a failure.
        page.moves(3)
        page.held = []
        page.do("estop")
        page.until(lambda s: s["mode"] == "estop")
        page.do("takeover")  # no way past a stop
        time.sleep(0.5)
        assert page.status["mode"] == "estop"
        page.do("clear")
        page.until(lambda s: s["mode"] == "hold")
        page.held = ["s"]
        page.do("takeover")
        page.until(lambda s: s["mode"] == "human")
        page.do("hold")
        page.until(lambda s: s["mode"] == "hold")
        page.do("failure")
        started.says(r"episode 0: a person said failure.*kept \(1 of 2")
        page.moves(6)
        page.do("success")
        said = started.ends(0)
        page.close()
    assert re.search(r"look at episode 0, .* the arm stopped: human -> estop", said), said
    demos = load_demonstrations(out, 5, keep="all")
    counts = frames_of(out, out)
    assert len(counts) == 2 and counts[1] >= 6
    assert demos.success.tolist() == [False] * counts[0] + [True] * counts[1]
    doubts = json.loads((out / "meta/doubtful.json").read_text())
    assert {d["kind"] for d in doubts if d["episode"] == 0} >= {"stopped"}


def test_every_key_of_the_terminal(tmp_path: Path) -> None:
    out = tmp_path / "data"
    ours, theirs = pty.openpty()
    words = ("record", *ENV, "env.split=eval", "--teleop", "keyboard", "--keep-failures")

    def press(keys: str) -> None:
        os.write(ours, keys.encode())

    def hold(keys: str, page: Page, frames: int) -> None:
        """A held key, as a terminal repeats it, until there are that many frames."""
        end = time.monotonic() + 300.0
        while int(page.status["numbers"]["frames"]) < frames:
            assert time.monotonic() < end, page.status
            press(keys)
            time.sleep(0.03)

    with session(*words, "--episodes", "2", "--out", out, stdin=theirs) as started:
        os.close(theirs)
        page = Page(started)
        started.says(r"t start or go on, h pause")
        page.until(lambda s: "Press Start" in s["reason"])
        press("t")
        page.until(lambda s: s["mode"] == "human")
        hold("w", page, 3)
        press("x")
        started.says("discarded")
        page.until(lambda s: "Press Start" in s["reason"])
        # A push starts, too, once the keys were let go: up and turned; the gripper closes; pause; success.
        time.sleep(1.5)
        hold("rq", page, 4)
        press(" ")
        page.until(lambda s: not s["open"])
        press("h")
        page.until(lambda s: s["mode"] == "hold" and "let go" not in s["reason"])
        press("\x1b[A")  # an arrow is no stop
        time.sleep(0.3)
        assert page.status["mode"] == "hold"
        press("\x1b")
        page.until(lambda s: s["mode"] == "estop")
        press("c")
        page.until(lambda s: s["mode"] == "hold")
        press("1")
        started.says(r"episode 0: a person said success")
        page.until(lambda s: "Press Start" in s["reason"])
        hold("s", page, 2)
        press("0")
        started.says(r"episode 1: a person said failure")
        started.ends(0)
        page.close()
    os.close(ours)
    log = read(logs_folder(out) / "episode_0000.mcap")
    actions = np.array([m["action"] for m in log["/action"]])
    assert actions[:, 2].max() == pytest.approx(0.4) and {-1.0, 1.0} == set(actions[:, -1].tolist())


def test_ctrl_c_ends_a_session_and_the_same_command_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "data"
    words = ("record", *ENV, "--episodes", "1", "--out", out)
    with session(*words) as started:
        page = Page(started)
        page.moves(2)
        started.process.send_signal(signal.SIGINT)
        said = started.ends(130)
        page.close()
    assert "0 episodes are recorded" in said and "goes on" in said
    assert not list(logs_folder(out).glob("episode*")) and not (logs_folder(out) / RUNNING).exists()
    assert main([*SCRIPTED, "--episodes", "1", "--out", str(out)]) == 0


def in_a_process(words: list[str], largest_file: int = 0) -> tuple[int, str]:
    """Exit status and words of a command whose files may have so many bytes; 0: any.

    It is a new program: a forked one would wait for threads of this one's simulator.
    """
    limit = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({largest_file}, {largest_file}));"
    code = f"import resource, sys; {limit if largest_file else ''} from embodyrl.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout


def test_a_full_disk_loses_the_running_episode_alone(tmp_path: Path) -> None:
    out = tmp_path / "data"
    words = [*SCRIPTED, "--episodes", "2", "--out", str(out)]
    status, text = in_a_process(words, largest_file=20_000)
    last = text.strip().splitlines()[-1]
    assert status == 1 and "largest size that is allowed" in last and "goes on" in last, text
    assert not list(logs_folder(out).glob("*.mcap")) and not out.exists()
    # A disk that is too small is noticed before anything moves.
    too_much = [*words, "--seconds", "3600", "--speed", "1"]
    too_much[too_much.index("2")] = "100000"
    status, text = in_a_process(too_much)
    assert status == 1 and re.search(r"100000 more episodes may take \d+\.\d GB", text), text
    assert "fewer --seconds" in text
    assert main(words) == 0 and len(frames_of(out, out)) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--teleop", "sextant"], "There is no teleoperation by 'sextant'"),
        (["--teleop", "keyboard"], "there is none. Start it in one, or use --teleop page"),
        (["--task", "pick it up"], "The twin's scenes say their own"),
        (["--robot", "ros2"], "records for the env `robot`, not for mujoco"),
        (["--robot", "fr4"], "There is no robot 'fr4'"),
        (["--robot-file", "arm.yaml"], "--robot-file arm.yaml has no effect on the robot twin"),
        (["--address", "10.0.0.2"], "--address 10.0.0.2 has no effect on the robot twin"),
        (["--speed", "0"], "--speed is 0"),
        (["--seconds", "nan"], "--seconds is nan"),
        (["--episodes", "0"], "--episodes must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", *ENV, *words, "--out", str(tmp_path / "data")]) == 1
    assert said in " ".join(capsys.readouterr().err.split())


def test_episodes_of_other_settings_make_no_one_data_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data"
    assert main([*SCRIPTED, "--episodes", "1", "--out", str(out)]) == 0
    out.rename(tmp_path / "away")
    words = [*SCRIPTED, "--episodes", "1", "--out", str(out)]
    assert main([*words, "--speed", "0.5"]) == 1
    assert "speed was 0.25, now 0.5" in capsys.readouterr().err
    damaged = logs_folder(out) / "episode_0000.mcap"
    content = damaged.read_bytes()
    damaged.write_bytes(content[: len(content) // 2])
    assert main(words) == 1
    assert "episode_0000.mcap is no whole log" in " ".join(capsys.readouterr().err.split())
