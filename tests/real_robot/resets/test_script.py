"""A scripted return: its file, its log, and where it leaves the block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodyrl.errors import UserError
from embodyrl.real_robot.env.robot_env import RobotConfig, RobotEnv
from embodyrl.real_robot.logs.mcap_log import read
from embodyrl.real_robot.resets.waypoints import read_script
from embodyrl.real_robot.twin.mujoco_twin import BOX
from embodyrl.sims.mujoco.experts import ScriptedExpert

LOW, HIGH = BOX["box_low"], BOX["box_high"]
WAYPOINTS = """
spread: [0.08, 0.10, 0.0]
waypoints:
  - {position: [0.48, 0.0, 0.15], fingers: closed}
  - {position: [0.48, 0.0, 0.03], fingers: closed}
  - {position: [0.48, 0.0, 0.03], fingers: open, seconds: 1.0}
  - {position: [0.48, 0.0, 0.15], fingers: open}
"""
STATES: dict[str, Any] = {"task": "pick", "cameras": (), "renderer": "none", "speed": 0.5}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "return.yaml"
    path.write_text(WAYPOINTS)
    return path


def play(env: RobotEnv, init: int, still: bool = False) -> bool:
    """An episode of the task's expert, or of nobody; whether it was solved."""
    env.reset(init=[init])
    expert = ScriptedExpert(env.twin)
    while True:
        env.look()
        action = torch.zeros(1, 4) if still else expert.act()
        step = env.step(action[:, None])
        if bool(step.done):
            return bool(step.success)


def test_the_block_is_put_down_where_the_script_says_each_time_elsewhere(
    script: Path, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    env = RobotEnv(RobotConfig(**STATES, reset=str(script), log=str(logs)))
    places = []
    colours = set()
    for init in range(4):
        assert play(env, init)
        places.append(env.twin.view().blocks[0, 0, :2].copy())
        colours.add(env.twin.instructions[0])
    counts = env.between.state.counts
    env.close()
    # Nothing was arranged: it is the same block, and not where the simulator would put it.
    assert len(colours) == 1 and counts.resets == counts.ready == 3 and not counts.asked
    later = np.array(places[1:])
    assert (np.abs(later - [0.48, 0.0]) < [0.10, 0.12]).all()
    assert np.hypot(*(later[0] - later[1])) > 0.01 and np.hypot(*(later[1] - later[2])) > 0.01
    # Each reset has a log of its own, whose commands are marked and keep the limits of the filter.
    files = sorted((logs / "resets").glob("*.mcap"))
    assert [file.name for file in files] == [f"reset_{k:06d}_1.mcap" for k in (1, 2, 3)]
    log = read(files[0])
    assert log["/run"][0]["settings"]["reset"] == {"by": "scripted", "try": 1}
    assert log["/episode"][0]["solved"] and len(log["/command"]) > 100
    assert np.abs([command["ddq"] for command in log["/command"]]).max() < 20.0
    assert not any("reset" in read(f)["/run"][0]["settings"] for f in logs.glob("*.mcap"))


def test_the_log_of_an_episode_is_played_again(script: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    env = RobotEnv(RobotConfig(**STATES, reset=str(script), log=str(logs)))
    assert play(env, 0) and play(env, 1)
    before = env.twin.view().blocks[0, 0, :2].copy()
    env.close()
    replay = logs / "resets" / "reset_000001_1.mcap"
    points = read_script(str(replay), LOW, HIGH).waypoints
    opened = [k for k, point in enumerate(points) if point.is_open]
    assert 0 < opened[0] < len(points) - 1 and points[opened[0]].seconds > 0
    # The block comes to lie where it lay then.
    env = RobotEnv(RobotConfig(**STATES, reset=str(replay)))
    assert play(env, 0) and play(env, 1)
    again = env.twin.view().blocks[0, 0, :2].copy()
    env.close()
    assert np.hypot(*(again - before)) < 0.02


def test_a_person_is_asked_when_the_arm_cannot_get_there(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = RobotEnv(RobotConfig(**STATES, reset=str(script), reset_seconds=0.5, reset_tries=3))
    assert play(env, 0) and play(env, 1)
    counts = env.between.state.counts
    env.close()
    # As often, and as long, as it was allowed; the simulator then arranges, as a person would.
    assert (counts.tries, counts.asked, counts.ready) == (3, 1, 0)
    assert 1.5 < counts.seconds < 6.0
    assert "not back after 0.5 s. A person is asked: 1 of 1 resets." in capsys.readouterr().out


def test_a_person_is_asked_after_failures_in_a_row(script: Path) -> None:
    settings = STATES | {"max_episode_steps": 8}
    env = RobotEnv(RobotConfig(**settings, reset=str(script), ask_after=2))
    solved = [play(env, init, still=True) for init in range(4)]
    counts = env.between.state.counts
    env.close()
    assert not any(solved) and (counts.resets, counts.ready, counts.asked) == (3, 2, 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("waypoints: []", "it has no waypoints"),
        ("waypoints: [{position: [0.5, 0, 0.2], fingers: ajar}]", "fingers is 'ajar'"),
        ("waypoints: [{position: [0.5, 0.2], fingers: open}]", "must be x, y and z"),
        ("waypoints: [{fingers: open}]", "has no 'position'"),
        ("waypoints: [{position: [0.5, 0, 0.2], fingers: open, seconds: -1}]", "seconds of"),
        ("waypoints: [{position: [0.5, 0, 0.9], fingers: open}]", "outside the workspace"),
        (
            "spread: [0.2, 0, 0]\nwaypoints: [{position: [0.6, 0, 0.2], fingers: open}]",
            "with a spread of .* outside the workspace",
        ),
    ],
)
def test_a_script_that_cannot_be_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        read_script(str(path), LOW, HIGH)
