"""A recorded run, with a person's corrections, as a data set that is learned from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from embodyrl.data.demos import Demonstrations
from embodyrl.errors import UserError
from embodyrl.real_robot.env import Config, RobotEnv
from embodyrl.real_robot.export import export_logs
from embodyrl.real_robot.log import picture, read

SETTINGS = {"task": "reach", "image_size": 32, "renderer": "opengl", "max_episode_steps": 25}


def played(folder: Path, episodes: int, **settings: object) -> None:
    """Episodes in which the policy does nothing, and a scripted person takes over after three actions."""
    env = RobotEnv(Config(**SETTINGS | {"log": str(folder), "record": True, "corrector": 3} | settings))  # type: ignore[arg-type]
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
    assert people == [False] * 3 + [True] * (len(people) - 3) and len(log["/camera/front"]) == len(people)
    assert log["/episode"][0]["solved"] and picture(log["/camera/front"][0]).shape == (32, 32, 3)

    written = export_logs(tmp_path / "logs", tmp_path / "data")
    assert written["episodes"] == 2 and written["left_out"] == 0
    assert written["frames"] - written["human_frames"] == 6
    env = RobotEnv(Config(**SETTINGS))  # type: ignore[arg-type]
    demos = Demonstrations.load(tmp_path / "data", 5, spec=env.spec)
    env.close()
    n = len(people)
    assert len(demos) == written["frames"] and demos.intervention[:n].tolist() == people
    np.testing.assert_allclose(demos.actions[:n], [m["action"] for m in log["/action"]], atol=1e-6)
    np.testing.assert_allclose(demos.proprio[:n], [m["proprio"] for m in log["/action"]], atol=1e-6)
    images = np.stack([picture(m) for m in log["/camera/front"]]).astype(float)
    assert np.abs(np.asarray(demos.images["front"][:n]) - images).mean() < 2.0  # the video's own loss
    assert demos.reward[:n].tolist() == [0.0] * (n - 1) + [1.0] and bool(demos.success.all())

    with pytest.raises(UserError, match=r"None of the 1 episodes .* was solved"):
        export_logs(tmp_path / "logs2", tmp_path / "none")
    assert export_logs(tmp_path / "logs2", tmp_path / "all", keep_failures=True)["human_frames"] == 0


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no logs"):
        export_logs(tmp_path, tmp_path / "data")
    played(tmp_path / "logs", 1, record=False, renderer="none", cameras=())
    with pytest.raises(UserError, match="--record"):
        export_logs(tmp_path / "logs", tmp_path / "data")
    with pytest.raises(UserError, match="--out"):
        export_logs(tmp_path / "logs", "")
    assert not (tmp_path / "data").exists()
