"""``embodyrl record`` on an arm behind rosbridge, in real time, with a person who arranges the scene."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from record_session import Page, session

from embodyrl.data.lerobot_read import open_dataset
from embodyrl.real_robot.logs.mcap_log import read

pytestmark = [pytest.mark.timeout(1200), pytest.mark.robot]

HELPERS = Path(__file__).parents[2] / "helpers"
# Without topics for the task, its success and its reset; a busy machine is no fault.
ARM = """
preset: twin
topics: {instruction: "", success: "", reset: "", init: "", max_image_age: 9, max_clock_jump: 9}
safety: {max_gap: 9, max_state_age: 9, max_target_age: 9, box_low: [0.28, -0.3, 0.012],
  box_high: [0.72, 0.3, 0.4]}
"""
HOME = (0.45, 0.0, 0.25)


@pytest.fixture
def port() -> Iterator[str]:
    """An arm behind its own rosbridge server, in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-u", str(HELPERS / "ros_twin.py"), "rosbridge", "reach"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield next(line.split()[1] for line in process.stdout if line.startswith("ready"))
    process.kill()
    process.wait()


def test_a_person_records_on_an_arm_behind_rosbridge(port: str, tmp_path: Path) -> None:
    out = tmp_path / "data"
    (tmp_path / "arm.yaml").write_text(ARM)
    words = (
        "record", "env.image_size=32", "--robot", "rosbridge", "--address", f"ws://127.0.0.1:{port}",
        "--robot-file", tmp_path / "arm.yaml", "--episodes", "2", "--out", out,
    )  # fmt: skip
    with session(*words) as unnamed:
        assert "give the instruction, such as --task" in unnamed.ends(1)
    with session(*words, "--task", "touch the ball") as started:
        page = Page(started)
        page.until(lambda s: s["reason"].startswith("Arrange the scene. Press Start"))
        page.moves(4)
        page.do("success")
        started.says(r"episode 0: a person said success")
        page.moves(4)
        page.do("success")
        said = started.ends(0)
        page.close()
    assert "Wrote 2 episodes" in said and "did not come home" not in said
    origin = json.loads((out / "meta" / "embodyrl.json").read_text())
    assert origin["env"] == "robot/rosbridge" and origin["config"] == {}
    assert origin["spec"]["conventions"]["actions"] == "delta"
    data = open_dataset(out, ["observation.state"])
    assert data.cameras == {"observation.images.front": (32, 32)}
    logs = [read(tmp_path / "data.logs" / f"episode_000{k}.mcap") for k in (0, 1)]
    assert {m["prompt"] for log in logs for m in log["/action"]} == {"touch the ball"}
    # Between the episodes the hand went home, and out of the person's way.
    first = logs[1]["/action"][0]["proprio"][:3]
    assert np.abs(np.array(first) - HOME).max() < 0.03, first
    last = logs[0]["/action"][-1]["proprio"][:3]
    assert np.abs(np.array(last) - HOME).max() > 0.03, last
